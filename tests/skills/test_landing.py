"""A landing killed at every point where it could matter is finished or undone; random kills of a whole run, too."""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from skills.frame import landing, staging
from skills.frame.landing import Change, state
from tests.skills.toy import left_behind, make_checkout, pith, start, tree

_POINTS = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "open")
_BEFORE = {"a.txt": "a", "kept.txt": "kept", "old/gone.txt": "gone"}
_AFTER = {"a.txt": "A", "kept.txt": "kept", "deep/er/b.txt": "b", "c.txt": "c"}


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def plan(folder: Path) -> tuple[Path, Path, list[Change]]:
    """A tree as before, one as after, and the changes between."""
    root, staged = _write(folder / "root", _BEFORE), _write(folder / "staged", _AFTER)
    names = sorted({*_BEFORE, *_AFTER})
    rows = [Change(name, state(root / name), state(staged / name)) for name in names]
    return root, staged, [row for row in rows if row.before != row.after]


def files(root: Path) -> dict[str, str]:
    return {name: text for name, (_, text) in tree(root).items()}


def _dying(countdown: int, body: Callable[[], object]) -> int:
    """The wait status of a child that runs `body` and is killed at the countdown-th call of a function of _POINTS."""
    pid = os.fork()
    if pid == 0:
        left = [countdown]

        def deadly(name: str) -> Callable[..., object]:
            real = getattr(os, name)

            def call(*arguments: object, **options: object) -> object:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        try:
            for name in _POINTS:
                setattr(os, name, deadly(name))
            body()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def sweep(folder: Path, *, blocked: bool) -> list[str]:
    """Kills a landing at one call after another, and then its recovery at some call; what became of each landing.

    blocked: b.txt can never be put into its place, in a new folder, so that all has to be put back.
    """
    outcomes, real = [], os.replace

    def refuse(source: Path, target: Path) -> None:
        if blocked and target.name == "b.txt":
            raise OSError("b.txt is in use")
        real(source, target)

    os.replace = refuse
    for kills in range(1, 1000):
        root, staged, changes = plan(folder / str(kills))
        journal = root / landing.FOLDER

        def whole(root: Path = root, staged: Path = staged, changes: list[Change] = changes) -> None:
            expected = ["cannot be landed: b.txt is in use"] if blocked else []
            assert landing.commit(root, landing.prepare(root, staged, changes)) == expected

        status = _dying(kills, whole)
        decided = (journal / "commit.json").exists() or (journal / "undo.json").exists()
        assert status in (0, signal.SIGKILL) and (decided or files(root) in (_BEFORE, _AFTER))
        outcome = "finished" if decided else "whole" if files(root) == _AFTER else "undone"
        assert _dying(kills % 7 + 1, lambda root=root: landing.recover(root)) in (0, signal.SIGKILL)
        landing.recover(root)
        assert files(root) == (_BEFORE if blocked or outcome == "undone" else _AFTER) and not journal.exists()
        assert (root / "deep").exists() is (files(root) == _AFTER)
        outcomes.append(outcome)
        if status == 0:
            return outcomes
    raise AssertionError("the landing never came to its end")


def _swept(tmp_path: Path, *, blocked: bool) -> list[str]:
    code = f"from tests.skills.test_landing import *; print(*sweep(Path({str(tmp_path)!r}), blocked={blocked}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_a_landing_killed_anywhere_is_finished_or_undone(tmp_path: Path) -> None:
    outcomes = _swept(tmp_path, blocked=False)
    assert outcomes == sorted(outcomes, key=["undone", "finished", "whole"].index)
    assert min(outcomes.count(name) for name in ("undone", "finished", "whole")) >= 1 and len(outcomes) > 30


def test_a_landing_that_cannot_be_is_put_back_also_when_killed(tmp_path: Path) -> None:
    outcomes = _swept(tmp_path, blocked=True)
    assert outcomes.count("finished") > 20 and outcomes[0] == outcomes[-1] == "undone" and "whole" not in outcomes


def half_landed(folder: Path) -> tuple[Path, list[Change]]:
    """A decided landing of which one file is in its place."""
    root, staged, changes = plan(folder)
    journal = landing.prepare(root, staged, changes)
    os.rename(journal / "plan.json", journal / "commit.json")
    landing._bring(root, journal, changes[:1], "new")
    return root, changes


def test_recovery_overwrites_nobodys_change(tmp_path: Path) -> None:
    root, changes = half_landed(tmp_path)
    assert changes[0].path == "a.txt" and files(root)["a.txt"] == "A"
    (root / "c.txt").write_text("mine")
    with pytest.raises(landing.Stuck, match=r"4 files cannot end: c\.txt changed since; save those"):
        landing.recover(root)
    assert files(root) == _BEFORE | {"a.txt": "A", "c.txt": "mine"}
    (root / "c.txt").unlink()
    (root / "a.txt").write_text("a")  # what was in its place already is put back too
    assert staging.recover(root) == "finished an interrupted landing: a.txt, c.txt, deep/er/b.txt, old/gone.txt"
    assert files(root) == _AFTER


def test_a_landing_of_another_checkout_is_left_to_it(tmp_path: Path) -> None:
    """Two checkouts whose runs/ is one folder, on another disk perhaps."""
    root, _ = half_landed(tmp_path)
    other = _write(tmp_path / "other", _BEFORE)
    (other / "runs").symlink_to(root / "runs")
    with pytest.raises(landing.Stuck, match=rf"interrupted landing of {root}; run `pith skill list` there"):
        landing.recover(other)
    assert {name: text for name, text in files(other).items() if name != "runs"} == _BEFORE
    landing.recover(root)
    assert files(root) == _AFTER


def test_files_are_renamed_within_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since runs/, or any folder, may be another file system."""
    root, staged, changes = plan(tmp_path)
    real = os.replace

    def within(source: Path, target: Path) -> None:
        assert source.parent == target.parent
        real(source, target)

    monkeypatch.setattr(os, "replace", within)
    assert landing.commit(root, landing.prepare(root, staged, changes)) == [] and files(root) == _AFTER


def test_the_next_command_finishes_a_landing(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    staged = _write(tmp_path / "staged", {"words.txt": "landed\n"})
    change = Change("words.txt", state(checkout / "words.txt"), state(staged / "words.txt"))
    journal = landing.prepare(checkout, staged, [change])
    os.rename(journal / "plan.json", journal / "commit.json")
    done = pith(checkout, "skill", "list")
    assert done.returncode == 0 and done.stderr == "finished an interrupted landing: words.txt\n"
    assert (checkout / "words.txt").read_text() == "landed\n" and not journal.exists()


@pytest.mark.parametrize("obstacle", ["edited", "made", "removed", "folder", "link"])
def test_nothing_lands_over_what_changed_meanwhile(tmp_path: Path, obstacle: str) -> None:
    root, staged, changes = plan(tmp_path)
    match obstacle:
        case "edited":
            (root / "a.txt").write_text("mine")
        case "made":
            (root / "c.txt").write_text("c")
        case "removed":
            (root / "old/gone.txt").unlink()
        case "folder":
            (root / "c.txt").mkdir()
        case "link":
            (root / "deep").symlink_to("old")
    before = files(root)
    assert len(landing.commit(root, landing.prepare(root, staged, changes))) == 1
    assert files(root) == before and not (root / landing.FOLDER).exists()


def test_what_cannot_be_written_is_refused_before_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, staged, changes = plan(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != root / "old")
    with pytest.raises(PermissionError, match=r"old: cannot be written; make it so"):
        landing.prepare(root, staged, changes)
    assert files(root) == _BEFORE and not (root / landing.FOLDER).exists()


def kill_at_random(folder: Path, times: int) -> list[bool]:
    """Kills a run's processes `times` times, at a random moment or shortly after it says that it lands.

    Returns whether each had landed. The tree is never half changed, and changed only if that was said.
    """
    draw, checkout = random.Random(times), make_checkout(folder / "checkout")
    before = tree(checkout)
    start_time = time.monotonic()
    assert pith(checkout, "skill", "run", "add-word", "tree", "--weights", "3").returncode == 0
    seconds, after, landed = time.monotonic() - start_time, tree(checkout), []
    for number in range(times):
        staging.git(checkout, "checkout", "--quiet", "--", "words.txt", "old/gone.txt")
        staging.git(checkout, "clean", "--quiet", "-fd", "deep")
        assert tree(checkout) == before
        process = start(checkout, "skill", "run", "add-word", "tree", "--weights", "3")
        assert process.stderr is not None
        if number % 2:
            time.sleep(draw.uniform(0, seconds))
            said = ""
        else:
            said = process.stderr.readline()
            time.sleep(draw.uniform(0, 0.06))
        os.killpg(process.pid, signal.SIGKILL)
        said += process.communicate(timeout=30)[1]
        with staging.locked(checkout, patience=30):
            now = tree(checkout)
        assert now in (before, after), f"kill {number} left the tree half changed"
        landed.append(now == after)
        assert "landing 12 files" in said or not landed[-1]
    if landed[-1]:
        staging.git(checkout, "checkout", "--quiet", "--", "words.txt", "old/gone.txt")
        staging.git(checkout, "clean", "--quiet", "-fd", "deep")
    assert pith(checkout, "skill", "run", "add-word", "tree", "--weights", "3").returncode == 0
    assert left_behind(checkout) == []
    return landed


@pytest.mark.prove
def test_a_run_killed_at_random_leaves_no_half_changed_tree(tmp_path: Path) -> None:
    assert False in kill_at_random(tmp_path, 4)


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_fifty_random_kills_leave_no_half_changed_tree(tmp_path: Path) -> None:
    landed = kill_at_random(tmp_path, 50)
    assert landed.count(True) >= 5 and landed.count(False) >= 20
