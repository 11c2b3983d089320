"""`pith skill run` on a toy skill, as a user meets it: every way to end, its exit code, and the tree afterwards."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from skills.frame import Params, Workspace, staging
from skills.frame.report import shortened
from skills.frame.running import results_folder
from tests.skills.toy import (
    NOISE,
    left_behind,
    make_checkout,
    napping,
    pith,
    run_python,
    start,
    start_python,
    tree,
    wait_for,
)

ADD = ("skill", "run", "add-word", "tree", "--weights", "3")
NEW = {"deep/run.sh", "deep/link", *(f"deep/er/{number}.txt" for number in range(8))}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


def test_a_run_lands_all_its_files(checkout: Path) -> None:
    before = tree(checkout)
    done = pith(checkout, *ADD)
    assert done.returncode == 0, done.stderr
    assert "The list has 3 words." in done.stdout and "created  deep/er/7.txt" in done.stdout
    after = tree(checkout)
    assert set(after) - set(before) == NEW and set(before) - set(after) == {"old/gone.txt"}
    assert {name for name in set(before) & set(after) if before[name] != after[name]} == {"words.txt"}
    assert after["words.txt"][1] == "a\nb\ntree\n" and after["deep/link"][1] == "../words.txt"
    assert after["deep/run.sh"][0] & 0o111 == 0o111
    assert left_behind(checkout) == []


FAILING = [
    (["tree", "--weights", "3", "--mood", "prove"], 1, "failed", "the word is not proven"),
    (["tree", "--weights", "3", "--mood", "step"], 1, "failed", "the word is odd; choose another"),
    (["tree", "--weights", "3", "--mood", "exit"], 1, "failed", "the skill called exit with 0"),
    (["tree", "--weights", "3", "--mood", "catch"], 130, "interrupted", "Nothing was changed."),
    (["tree", "--weights", "3", "--mood", "folder"], 1, "failed", "new.txt: a file in one tree, a folder or the like"),
    (["tree", "--weights", "3", "--mood", "file"], 1, "failed", "old: a file in one tree, a folder or the like"),
    (["tree", "--weights", "3", "--mood", "meddle"], 1, "failed", "the postconditions themselves changed files"),
    (["Tree", "--weights", "3"], 3, "bad parameters", "WORD: got 'Tree', expected lowercase letters; write 'tree'"),
    (["tree", "--weights", "x"], 3, "bad parameters", "--weights: got 'x'"),
    (["-x @ w.T", "--weights", "3", "--mood", "happy"], 3, "bad parameters", "--mood: got 'happy'"),
    (["tree"], 3, "bad parameters", "--weights; expected: pith skill run add-word"),
    (["tree", "--weights", "3", "--colour"], 3, "bad parameters", "unrecognized arguments: --colour"),
]
RUNS = "import json, sys; from skills.frame.running import main; cases = json.loads(sys.argv[1])"
RUNS += "; codes = [(main('add-word', [*words, '--json']), print('==='))[0] for words in cases]; print(codes)"


def test_what_fails_has_its_code_and_changes_nothing(checkout: Path) -> None:
    before = tree(checkout)
    done = run_python(checkout, "-c", RUNS, json.dumps([words for words, *_ in FAILING]))
    *texts, codes = done.stdout.split("\n===\n")
    assert json.loads(codes) == [code for _, code, *_ in FAILING], done.stderr
    for text, (words, code, status, said) in zip(texts, FAILING, strict=True):
        report = json.loads(text)
        assert (report["exit_code"], report["status"]) == (code, status), words
        assert said in " ".join(report["failures"])
    assert tree(checkout) == before and left_behind(checkout) == []


@pytest.mark.parametrize(("mood", "bug"), [("break", "a bug of the skill"), ("boast", "a bug of the summary")])
def test_a_bug_of_the_skill_is_shown_and_changes_nothing(checkout: Path, mood: str, bug: str) -> None:
    before = tree(checkout)
    done = pith(checkout, *ADD, "--mood", mood, "--json")
    assert done.returncode == 1 and f"KeyError: '{bug}'" in done.stderr
    assert json.loads(done.stdout)["status"] == "failed"
    assert tree(checkout) == before and left_behind(checkout) == []


def test_a_missing_precondition_says_the_remedy(checkout: Path) -> None:
    (checkout / "words.txt").unlink()
    done = pith(checkout, *ADD)
    assert (done.returncode, done.stdout) == (2, "")
    assert "missing: no words.txt\n  remedy: write one" in done.stderr
    done = pith(checkout, *ADD, "--list-file", "x" * 300, "--json")  # longer than a name can be
    (missing,) = json.loads(done.stdout)["missing"]
    assert done.returncode == 2 and "File name too long" in missing["what"] and "name another" in missing["remedy"]


def test_without_a_skill_or_a_checkout_the_answer_is_json_too(checkout: Path) -> None:
    for words in (("--json",), ("", "--json")):
        done = pith(checkout, "skill", "run", *words)
        assert done.returncode == json.loads(done.stdout)["exit_code"] == 3
        assert "expected one of add-word" in json.loads(done.stdout)["failures"][0]
    process = start_python(checkout, "-m", "typer_cli.main", *ADD, "--json", cwd=checkout.parent)
    report = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == report["exit_code"] == 2 and "no checkout of pith at or above" in report["failures"][0]


def test_a_full_disk_ends_as_any_failure(checkout: Path) -> None:
    """No file may be longer than 8 kB, so the checkout cannot be copied; nothing of the copy is left."""
    before = tree(checkout)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (8192, 8192))
    process = start_python(checkout, "-m", "typer_cli.main", *ADD, "--json", preexec_fn=limit)
    report = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == report["exit_code"] == 1 and "File too large" in report["failures"][0]
    assert tree(checkout) == before and left_behind(checkout) == []


def test_a_copy_with_read_only_folders_is_removed() -> None:
    """By a user whom that stops: root may do anything, so root becomes nobody."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        pid = os.fork()
        if pid == 0:
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                tempfile.tempdir = folder
                stage = staging.stage_folder(Path("/checkout"))
                (stage / "a/b").mkdir(parents=True)
                (stage / "a/b/file").touch()
                (stage / "link").symlink_to("/")
                (stage / "a/b").chmod(0o555)
                (stage / "a").chmod(0o555)
                staging.remove_stage(Path("/checkout"))
                os._exit(stage.exists())
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_report_that_cannot_be_printed_is_not_the_end_of_the_run(checkout: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start_python(checkout, "-m", "typer_cli.main", *ADD, stdout=full)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and stderr.endswith(
        "the report was not printed: [Errno 28] No space left on device\n"
    )
    assert (checkout / "deep/er/7.txt").exists() and left_behind(checkout) == []


def test_names_that_cannot_be_shown_are_escaped(checkout: Path) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    process = start_python(checkout, "-m", "typer_cli.main", *ADD, "--mood", "names", "--dry-run", env=ascii_only)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    for shown in ("  created  \\x1b[31mred\\n\n", "  created  \\udcff\n", "\n+\\udcff\n"):
        assert shown in stdout
    done = pith(checkout, *ADD, "--mood", "names", "--json")
    assert done.returncode == 0 and {"\x1b[31mred\n", "\udcff"} <= set(json.loads(done.stdout)["changes"])
    assert {"\x1b[31mred\n", "\udcff"} <= set(tree(checkout))


def test_a_dry_run_shows_the_diff_and_lands_nothing(checkout: Path) -> None:
    before = tree(checkout)
    done = pith(checkout, *ADD, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert tree(checkout) == before and left_behind(checkout) == []
    assert "+++ b/words.txt" in done.stdout and "\n+tree\n" in done.stdout and "deleted file mode 100644" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Nothing was proven, and nothing has changed")
    (patch,) = (checkout / "runs/skills/add-word").glob("*/change.diff")
    assert pith(checkout, *ADD).returncode == 0
    landed = tree(checkout)
    staging.git(checkout, "apply", "--reverse", str(patch))
    assert tree(checkout) == before != landed


def test_a_printed_diff_is_short() -> None:
    """New JSON is a line, other JSON is not; long changes are cut."""
    added = "".join(f"+{number}\n" for number in range(312))
    head = "diff --git a/{0} b/{0}\n{1}--- a/{0}\n+++ b/{0}\n@@ -0,0 +1,312 @@\n"
    new, old = (head.format("golden/x.json", mode) + added for mode in ("new file mode 100644\nindex 0..1\n", ""))
    assert shortened(new) == "golden/x.json: new, 312 lines"
    assert shortened(new + head.format("a.py", "") + "+1\n").splitlines()[:2] == [
        "golden/x.json: new, 312 lines",
        "diff --git a/a.py b/a.py",
    ]
    assert len(shortened(old).splitlines()) == 201 and shortened(old).endswith("... 116 more lines of this file")


def test_the_users_git_settings_change_nothing(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "hook").chmod(0o755)
    (tmp_path / "hooks").mkdir()
    for name in ("prepare-commit-msg", "post-commit", "reference-transaction"):
        (tmp_path / "hooks" / name).symlink_to(tmp_path / "hook")
    core = f"autocrlf = true\nsafecrlf = true\nhooksPath = {tmp_path}/hooks\n"
    (tmp_path / ".gitconfig").write_text(f"[core]\n{core}[diff]\nnoprefix = true\nexternal = false\n")
    process = start_python(checkout, "-m", "typer_cli.main", *ADD, "--dry-run", env={"HOME": str(tmp_path)})
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    (patch,) = (checkout / "runs/skills/add-word").glob("*/change.diff")
    staging.git(checkout, "apply", "--check", str(patch))


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    monkeypatch.setattr(Path, "exists", lambda _: False)  # each looks before the other has made its own
    assert [results_folder(tmp_path, "add-word").name for _ in range(3)] == ["now", "now-2", "now-3"]


def test_paths_are_absolute_in_lists_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Several(Params):
        one: Path
        more: list[Path]

    monkeypatch.chdir(tmp_path)
    params = Several(one=Path("a"), more=[Path("b"), Path("/c")])
    assert (params.one, params.more) == (tmp_path / "a", [tmp_path / "b", Path("/c")])


def test_the_json_is_whole_and_kept(checkout: Path) -> None:
    done = pith(checkout, *ADD, "--json", "--weights", "4")
    report = json.loads(done.stdout)
    assert report["result"] == {"words": 3, "mean": "nan", "boasts": False} and report["params"]["weights"] == [3, 4]
    assert report["params"]["list_file"] == str(checkout / "words.txt")
    assert report["changes"]["words.txt"] == "changed" and report["changes"]["old/gone.txt"] == "removed"
    assert json.loads((Path(report["out"]) / "result.json").read_text()) == report
    assert done.stderr == f"{NOISE}landing 12 files\n"


def test_what_was_edited_meanwhile_is_kept_and_nothing_lands(checkout: Path) -> None:
    before = tree(checkout)
    done = pith(checkout, *ADD, "--mood", "edit")
    assert done.returncode == 1 and "words.txt: changed in the checkout meanwhile" in done.stderr
    after = tree(checkout)
    assert after.pop("words.txt")[1] == "somebody's\n" and before.pop("words.txt") and after == before
    assert left_behind(checkout) == []


def test_a_second_run_is_refused_while_one_holds_the_checkout(checkout: Path) -> None:
    with staging.locked(checkout):
        before = tree(checkout)
        done = pith(checkout, *ADD)
        assert done.returncode == 2 and "missing: another skill is changing this checkout" in done.stderr
        assert tree(checkout) == before


@pytest.mark.parametrize("whole_group", [True, False])
def test_no_process_survives_a_killed_run(checkout: Path, whole_group: bool) -> None:
    process = start(checkout, *ADD, "--mood", "wait", "--json")
    wait_for(lambda: napping(checkout))
    if whole_group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        for _ in range(5):  # somebody who cannot wait does not disturb the clearing up
            process.terminate()
            time.sleep(0.02)
    assert process.wait(20) == (-signal.SIGKILL if whole_group else 130)
    with staging.locked(checkout, patience=20):  # free when the last process is gone
        assert not napping(checkout)
    stdout, _ = process.communicate()
    assert whole_group or json.loads(stdout)["status"] == "interrupted"
    assert (left_behind(checkout) == []) is not whole_group
    assert pith(checkout, *ADD).returncode == 0 and left_behind(checkout) == []


def test_the_script_in_the_folder_does_the_same(checkout: Path) -> None:
    script = [sys.executable, "skills/add-word/scripts/run.py", "tree", "--weights", "3"]
    done = subprocess.run(script, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "The list has 3 words." in done.stdout, done.stderr


def test_without_git_history_too(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    before = tree(checkout)
    done = pith(checkout, *ADD)
    assert done.returncode == 0, done.stderr
    assert set(tree(checkout)) - set(before) == NEW and "ignored.log" not in done.stdout


def test_help_is_made_from_the_parameters(checkout: Path) -> None:
    done = pith(checkout, "skill", "run", "add-word", "--help")
    words = " ".join(done.stdout.split())
    assert done.returncode == 0 and "usage: pith skill run add-word [-h] --weights WEIGHTS [--mood MOOD]" in words
    assert "How the toy behaves: 100% calm, or in a way that a test wants to see. (calm|step|" in words
    assert "default: calm)" in words and "Numbers to stand beside it. (int, repeatable)" in words
    assert "add-word" in pith(checkout, "skill", "list").stdout
    assert "# Add a word" in pith(checkout, "skill", "show", "add-word").stdout


COUNT = """
from pathlib import Path

from skills.frame import Missing, Params, Result, Skill, Workspace


class Counted(Result):
    words: int

    def summary(self) -> str:
        return f"{self.words} words."


class CountWords(Skill[Params, Counted]):
    params, result = Params, Counted

    def preconditions(self, params: Params, root: Path) -> list[Missing]:
        return []

    def steps(self, params: Params, workspace: Workspace) -> Counted:
        words = (workspace.root / "words.txt").read_text().split()
        (workspace.out / "words").write_text(" ".join(words))
        return Counted(words=len(words))

    def postconditions(self, params: Params, result: Counted, workspace: Workspace) -> list[str]:
        return [] if result.words else ["no words"]


SKILL = CountWords()
"""


def test_a_skill_that_only_reads_works_in_the_checkout(checkout: Path) -> None:
    (checkout / "skills/count_words.py").write_text(COUNT)
    (checkout / "skills/count-words").mkdir()
    page = "---\nmetadata: {pith.entry: 'skills.count_words:SKILL'}\n---\n"
    (checkout / "skills/count-words/SKILL.md").write_text(page)
    dry = pith(checkout, "skill", "run", "--dry-run", "count-words")
    assert dry.returncode == 0 and "dry run" in dry.stdout and not (checkout / "runs/skills/count-words").exists()
    with staging.locked(checkout):  # it changes nothing, so it need not wait for one that does
        done = pith(checkout, "skill", "run", "count-words")
    assert done.returncode == 0 and "2 words." in done.stdout, done.stderr
    (words,) = (checkout / "runs/skills/count-words").glob("*/words")
    assert words.read_text() == "a b" and (words.parent / "result.json").is_file()
    (checkout / "words.txt").write_text("")
    assert pith(checkout, "skill", "run", "count-words").returncode == 1


def test_a_command_ends_with_all_that_it_started(tmp_path: Path) -> None:
    workspace = Workspace(make_checkout(tmp_path / "checkout"), tmp_path)
    nap = "import subprocess; subprocess.Popen(['sleep', '61.5'], stdout=-3, stderr=-3, start_new_session=True)"
    done = workspace.run("timeit", "-n1", "-r1", nap, seconds=30)
    assert done.returncode == 0 and "1 loop" in done.stdout and not napping(workspace.root)
    done = workspace.run("timeit", "-n1", "-r1", f"{nap}.wait()", seconds=0.5)
    assert done.returncode == 124 and done.stderr == "no answer within 0.5 s: ended\n"
    assert not napping(workspace.root)
    assert "returned 2, expected 0" in workspace.failures("json.tool", "no-such-file", seconds=30)[0]
