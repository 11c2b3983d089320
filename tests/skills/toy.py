"""A small checkout of pith with one toy skill, and running its `pith`."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skills.frame.landing import FOLDER
from skills.frame.staging import git

ROOT = Path(__file__).parents[2]
COPIED = ("skills/__init__.py", "skills/frame", "typer_cli", "spec/__init__.py", "spec/run.schema.json")
COPIED += ("spec/source.py", "spec/document.py")

PAGE = """---
name: add-word
description: Adds a word to the list. Use it when a word is missing.
metadata:
  pith.entry: "skills.add_word:SKILL"
  pith.example: "tree --weights 3"
  pith.tests: "tests/test_words.py::test_words"
---
# Add a word

Reads `words.txt`; see [the list](../../words.txt) and `skills.add_word:AddWord.steps`. `train.steps` is a key.

```sh
.venv/bin/pith skill run add-word tree --weights 3  # as it stands
pith skill run add-word tree --weights 3 --dry-run | cat
```

`pith skill run add-word NAME --mood calm` and `pith verify --case NAME` and `pith skill list` name what there is.
"""

SKILL = '''
import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from skills.frame import Failed, Missing, Params, Result, Skill, Workspace


class AddParams(Params):
    word: str
    """The word, in lowercase."""
    weights: list[int] = Field(kw_only=True)
    """Numbers to stand beside it."""
    mood: Literal[
        "calm", "step", "break", "wait", "edit", "prove", "meddle", "exit", "boast", "folder", "file", "names", "catch"
    ] = "calm"
    """How the toy behaves: 100% calm, or in a way that a test wants to see."""
    list_file: Path = Path("words.txt")
    """A path."""

    @field_validator("word")
    @classmethod
    def _lowercase(cls, word: str) -> str:
        if not word.islower():
            raise ValueError(f"got {word!r}, expected lowercase letters; write {word.lower()!r}")
        return word


class AddResult(Result):
    words: int
    """How many words there are now."""
    mean: float = float("nan")
    """Of no numbers."""
    boasts: bool = False
    """Whether the summary has a bug."""

    def summary(self) -> str:
        if self.boasts:
            raise KeyError("a bug of the summary")
        return f"The list has {self.words} words."


class AddWord(Skill[AddParams, AddResult]):
    params = AddParams
    result = AddResult
    writes = True

    def preconditions(self, params: AddParams, root: Path) -> list[Missing]:
        return [] if params.list_file.is_file() else [Missing("no words.txt", "write one")]

    def steps(self, params: AddParams, workspace: Workspace) -> AddResult:
        print("what a skill prints is not its report")
        root = workspace.root
        words = root / "words.txt"
        words.write_text(words.read_text() + params.word + "\\n")
        (root / "deep/er").mkdir(parents=True)
        for number in range(8):
            (root / "deep/er" / f"{number}.txt").write_text(f"{params.word} {number}" * 1000)
        (root / "deep/run.sh").write_text("echo")
        (root / "deep/run.sh").chmod(0o755)
        os.symlink("../words.txt", root / "deep/link")
        (root / "old/gone.txt").unlink()
        if params.mood == "step":
            raise Failed("the word is odd; choose another")
        if params.mood == "catch":
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
        if params.mood == "exit":
            sys.exit(0)
        if params.mood == "folder":
            (root / "new.txt").unlink()
            (root / "new.txt").mkdir()
        if params.mood == "file":
            shutil.rmtree(root / "old")
            (root / "old").write_text("a file")
        if params.mood == "names":
            (root / "\\x1b[31mred\\n").touch()
            (root / os.fsdecode(b"\\xff")).touch()
            words.write_bytes(b"\\xff")
            return AddResult(words=0)
        if params.mood == "break":
            raise KeyError("a bug of the skill")
        if params.mood == "wait":
            workspace.run("timeit", "-n1", "-r1", "-s", "import subprocess, time", NAPS, seconds=60)
        if params.mood == "edit":
            (workspace.out.parents[3] / "words.txt").write_text("somebody's\\n")
        return AddResult(words=len(words.read_text().split()), boasts=params.mood == "boast")

    def postconditions(self, params: AddParams, result: AddResult, workspace: Workspace) -> list[str]:
        if params.mood == "meddle":
            (workspace.root / "words.txt").write_text("")
        return ["the word is not proven"] if params.mood == "prove" else []


# A process in a session of its own, as torchrun's are, whose starter sleeps as well.
NAPS = "subprocess.Popen(['sleep', '61.5'], start_new_session=True); time.sleep(60)"
SKILL = AddWord()
'''
NOISE = "what a skill prints is not its report\n"

SCRIPT = """import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from skills.frame.running import main

sys.exit(main("add-word", sys.argv[1:]))
"""


def make_checkout(root: Path) -> Path:
    """The checkout, committed to git, with one new file that git neither tracks nor ignores."""
    for name in COPIED:
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (root / "pyproject.toml").write_text('[project]\nname = "pith"\n')
    (root / ".gitignore").write_text("runs/\n__pycache__/\n*.log\n")
    (root / "ignored.log").write_text("log\n")
    add_skill(root)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "--quiet", "--message=first")
    (root / "new.txt").write_text("not tracked\n")
    (root / "shortcut").symlink_to("words.txt")
    return root


def add_skill(root: Path) -> None:
    """The toy and the files that it works on."""
    texts = {
        "words.txt": "a\nb\n",
        "old/gone.txt": "old\n",
        "skills/add-word/SKILL.md": PAGE,
        "skills/add-word/scripts/run.py": SCRIPT,
        "skills/add_word.py": SKILL,
        "tests/test_words.py": "def test_words() -> None: ...\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def start(root: Path, *words: str) -> "subprocess.Popen[str]":
    """`pith WORDS...` in the checkout."""
    return start_python(root, "-m", "typer_cli.main", *words)


def start_python(root: Path, *words: str, **options: Any) -> "subprocess.Popen[str]":
    """`python WORDS...` in the checkout, in a session of its own; its temporary files go beside the checkout.

    options: as `Popen` has them; `env` is added to the environment.
    """
    temporary = root.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    ours = {"PYTHONPATH": str(root), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    options["env"] = os.environ | ours | options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    usual = {"cwd": root, "start_new_session": True, **pipes}
    return subprocess.Popen([sys.executable, *words], **(usual | options))


def pith(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return run_python(root, "-m", "typer_cli.main", *words)


def run_python(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    process = start_python(root, *words)
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def left_behind(root: Path) -> list[str]:
    """Copies and journals that a run has left."""
    return [path.name for path in (root.parent / "temporary").iterdir()] + [str(FOLDER)] * (root / FOLDER).exists()


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def napping(root: Path) -> bool:
    """Is a process of the toy's nap left, in this checkout's copy."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            asleep = (folder / "cmdline").read_bytes().startswith(b"sleep\x0061.5")
            if asleep and (folder / "cwd").resolve().is_relative_to(root.parent):
                return True
        except OSError:  # it has just ended
            continue
    return False


def tree(root: Path) -> dict[str, tuple[int, str]]:
    """Every file and link outside .git, runs/ and caches, with its mode and contents."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if name.startswith((".git/", "runs/")) or "__pycache__" in name or (path.is_dir() and not path.is_symlink()):
            continue
        text = os.readlink(path) if path.is_symlink() else path.read_text(errors="surrogateescape")
        found[name] = (path.lstat().st_mode, text)
    return found
