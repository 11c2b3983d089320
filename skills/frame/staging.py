"""A copy of the checkout to work in, what was changed there, and bringing it back: the transaction of a skill."""

import fcntl
import hashlib
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
_AUTHOR = ("-c", "user.name=pith", "-c", "user.email=pith@localhost", "-c", "commit.gpgsign=false")


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


def recover(root: Path) -> list[str] | None:
    """Ends what an interrupted landing left, unless a run is under way; see `landing.recover`. Raises landing.Stuck."""
    if not (root / landing.FOLDER).exists():
        return None
    try:
        with locked(root):
            return landing.recover(root)
    except Busy:
        return None


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
        self.remove()
        self.root.mkdir(mode=0o700)
        self.base = {name: copied for name in listed(checkout) if (copied := self._copy(name)) is not None}
        git(self.root, "init", "--quiet", "--initial-branch=main")
        git(self.root, "add", "--all", "--force")
        git(self.root, *_AUTHOR, "commit", "--quiet", "--no-verify", "--allow-empty", "--message=The checkout")
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
        """What differs from the checkout as it was copied, by path."""
        names = sorted({*self.base, *listed(self.root)})
        rows = [Change(name, self.base.get(name), landing.state(self.root / name)) for name in names]
        return [row for row in rows if row.before != row.after]

    def diff(self) -> str:
        """The changes as `git apply` takes them."""
        git(self.root, "add", "--all")
        return git(self.root, "diff", "--cached", "--no-color", "--no-ext-diff", "--binary", self._commit)

    def land(self, changes: list[Change], lock: int) -> list[str]:
        """Brings the changes into the checkout, all of them; or none if a file of theirs was changed there meanwhile.

        Returns the paths of such files. It cannot be interrupted: a process with a session of its own does it, and from
        here on this process ignores SIGINT and SIGTERM. Raises ValueError where files cannot be written.
        """
        folder = landing.prepare(self.checkout, self.root, changes)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        command = [sys.executable, "-I", landing.__file__, str(folder)]
        done = subprocess.run(
            command, cwd="/", stdout=subprocess.PIPE, text=True, pass_fds=(lock,), start_new_session=True
        )
        if done.returncode not in (0, landing.CONFLICT):
            raise OSError(f"landing ended with {done.returncode}; `pith skill list` finishes or undoes it")
        return done.stdout.split("\n")[:-1] if done.returncode else []

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
