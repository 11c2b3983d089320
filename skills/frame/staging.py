"""A copy of the checkout to work in, what was changed there, and bringing it back: the transaction of a skill."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skills.frame import landing
from skills.frame.landing import Change

LOCK = Path("runs", "skills", ".lock")
PATIENCE = 2.0  # seconds to wait for another run; one that was killed needs a moment to end its processes
# For the copy's own repository, whatever the user's settings say.
_OWN = "user.name=pith user.email=pith@localhost commit.gpgsign=false core.hooksPath=/dev/null core.autocrlf=false"
_SETTINGS = tuple(word for setting in _OWN.split() for word in ("-c", setting))


class Busy(Exception):
    """Another run holds the checkout."""


@contextmanager
def locked(root: Path, patience: float = PATIENCE) -> Iterator[int]:
    """Holds the checkout against other writing skills; yields the lock's descriptor. Raises Busy.

    Processes that inherit the descriptor hold the lock too: it is free when the last of a run is gone.
    """
    (root / LOCK).parent.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a") as file:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy from None
                time.sleep(0.05)
        yield file.fileno()


def recover(root: Path) -> str:
    """Ends what an interrupted landing left, unless a run is under way; see `landing.recover`. Raises landing.Stuck."""
    if not (root / landing.FOLDER).exists():
        return ""
    try:
        with locked(root):
            return landing.recover(root)
    except Busy:
        return ""


def git(root: Path, *words: str) -> str:
    """What git prints, whatever repository the caller's environment names. Raises OSError if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *words], cwd=root, env=environment, check=False, capture_output=True)
    if done.returncode:
        raise OSError(f"git {' '.join(words)} in {root}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def listed(root: Path) -> list[str]:
    """Files and links below `root` that git tracks or does not ignore; also where `root` is in no repository."""
    words = ("ls-files", "-z", "--others", "--exclude-standard")
    try:
        names = git(root, *words, "--cached").split("\0")
    except OSError:
        names = []
    if "pyproject.toml" not in names:  # unpacked from an archive, or below what another repository ignores
        with tempfile.TemporaryDirectory() as empty:
            git(root, "init", "--quiet", "--bare", empty)
            names = git(root, f"--git-dir={empty}", "--work-tree=.", *words).split("\0")
    return [name for name in dict.fromkeys(names) if name]


def stage_folder(root: Path) -> Path:
    """Where a run's copy of the checkout lies: one place for each user and checkout, so that a leftover is found."""
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:12]
    return Path(tempfile.gettempdir()).resolve() / f"pith-skill-{os.getuid()}-{name}"


class Stage:
    """A copy of the checkout as it was when made, in a git repository with one commit of it."""

    def __init__(self, checkout: Path) -> None:
        """Copies what git tracks or does not ignore. The caller holds the lock; an earlier run's copy is removed."""
        self.checkout, self.root = checkout, stage_folder(checkout)
        remove_stage(checkout)
        self.root.mkdir(mode=0o700)
        self.base = {name: copied for name in listed(checkout) if (copied := self._copy(name)) is not None}
        git(self.root, "init", "--quiet")
        git(self.root, *_SETTINGS, "add", "--all", "--force")
        git(self.root, *_SETTINGS, "commit", "--quiet", "--no-verify", "--allow-empty", "--message=The checkout")
        self._commit = git(self.root, "rev-parse", "HEAD").strip()

    def _copy(self, name: str) -> str | None:
        """Copies one file; its state in the copy, None if it is gone or no file."""
        source, target = self.checkout / name, self.root / name
        if not (source.is_symlink() or source.is_file()):
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        landing.copy(source, target)
        return landing.state(target)

    def changes(self) -> list[Change]:
        """What differs from the checkout as it was copied, by path. Raises ValueError where that is no file."""
        names = sorted({*self.base, *listed(self.root)})
        rows = [Change(name, self.base.get(name), landing.state(self.root / name)) for name in names]
        for row in rows:
            there = landing.state(self.checkout / row.path) if row.before is None else None
            if landing.NO_FILE in (row.after, there):
                raise ValueError(f"{row.path}: a file in one tree, a folder or the like in the other; rename the file")
        return [row for row in rows if row.before != row.after]

    def diff(self) -> str:
        """The changes as `git apply` takes them."""
        git(self.root, *_SETTINGS, "add", "--all")
        words = ("--no-color", "--no-ext-diff", "--binary", "--src-prefix=a/", "--dst-prefix=b/")
        return git(self.root, *_SETTINGS, "diff", "--cached", *words, self._commit)

    def land(self, changes: list[Change], lock: int) -> list[str]:
        """Brings the changes into the checkout, all of them; or none, if one was changed there or cannot be written.

        Returns why none was. It cannot be interrupted: a process with a session of its own does it, and from here on
        this process ignores SIGINT and SIGTERM. Raises OSError before anything has landed; landing.Stuck.
        """
        folder = landing.prepare(self.checkout, self.root, changes)
        ignore_signals()
        command = [sys.executable, "-I", landing.__file__, str(folder)]
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, pass_fds=(lock,), start_new_session=True
        )
        if done.returncode:
            remedy = "run `pith skill list`, which finishes or undoes it"
            raise landing.Stuck(f"landing ended with {done.returncode}: {done.stderr.strip()[-500:]}", remedy)
        failures: list[str] = json.loads(done.stdout)
        return failures


def ignore_signals() -> None:
    """From here on SIGINT and SIGTERM do not disturb this process: what is left to do is short, and better done."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def remove_stage(checkout: Path) -> None:
    """Removes the copy, also where a skill has made folders of it read-only."""
    for parent, names, _ in os.walk(stage_folder(checkout)):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(stage_folder(checkout), ignore_errors=True)
