"""The runner itself: every bug can be planted, and what it reports is what happened."""

import subprocess
from pathlib import Path

import pytest

from spec.document import Mutant, read
from tests.mutants import runner


def bug(**changes: str) -> Mutant:
    fields = {
        "id": "a-bug",
        "file": "code.py",
        "text": "1 + 1",
        "replacement": "1 - 1",
        "catcher": "test_code.py",
        "statement": "x.y",
    }
    return Mutant(**(fields | changes))


def test_every_mutant_can_be_planted() -> None:
    document = read(runner.ROOT)
    assert runner.problems(document.mutants) == []
    assert len(document.mutants) >= 30


def test_text_must_stand_exactly_once(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1 + 1\nb = 1 + 1\n")
    [twice] = runner.problems([bug()], tmp_path)
    assert "stands 2 times in code.py" in twice
    [never] = runner.problems([bug(text="2 + 2")], tmp_path)
    assert "stands 0 times" in never
    [missing] = runner.problems([bug(file="none.py")], tmp_path)
    assert "stands 0 times in none.py" in missing
    [same] = runner.problems([bug(text="a = 1 + 1", replacement="a = 1 + 1")], tmp_path)
    assert "nothing would change" in same


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code.py").write_text("answer = 1 + 1\nunseen = 2 + 2\n")
    (tmp_path / "test_code.py").write_text("import code_under_test\n")
    (tmp_path / "code_under_test.py").write_text(
        "from pathlib import Path\nassert '1 + 1' in Path('code.py').read_text()\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(runner, "copy_tree", lambda destination: _copy(tmp_path, destination))
    monkeypatch.setattr(runner, "command", lambda check: ["true"] if check != "test_code.py" else ["python3", check])
    return tmp_path


def _copy(source: Path, destination: Path) -> None:
    runner_copy = {path.name: path.read_text() for path in source.glob("*.py")}
    for name, text in runner_copy.items():
        (destination / name).write_text(text)


def test_a_bug_is_caught_by_the_first_check_that_fails(checkout: Path) -> None:
    verdict = runner.judge(bug())
    assert verdict.catcher == "test_code.py"
    assert "AssertionError" in verdict.output
    assert "1 + 1" in (checkout / "code.py").read_text(), "the checkout itself must stay as it was"


def test_a_bug_that_nothing_sees_survives(checkout: Path) -> None:
    verdict = runner.judge(bug(text="2 + 2", replacement="2 - 2"))
    assert verdict.catcher is None
    assert runner.score({"a-bug": verdict}) == "0 of 1 planted bugs caught, 0 of them by pith verify"


def test_a_check_that_is_red_without_a_bug_is_reported(checkout: Path) -> None:
    (checkout / "code.py").write_text("")
    [problem] = runner.baseline([bug()])
    assert problem.startswith("test_code.py fails without any bug")


def test_copy_holds_what_git_tracks_and_new_files_but_nothing_ignored(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=source, check=True)
    (source / ".gitignore").write_text("ignored\n")
    for name in ("ignored", "new.py"):
        (source / name).write_text(name)
    runner.copy_tree(destination, source)
    assert sorted(path.name for path in destination.iterdir()) == [".gitignore", "new.py"]
