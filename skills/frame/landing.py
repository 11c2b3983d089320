"""Puts changed files into a checkout, all or none, also when killed: `landing.py FOLDER`, run as a process of its own.

FOLDER, on the checkout's file system, holds plan.json and, for every file that will be new, its contents under new/.
Renaming plan.json to commit.json is the decision. Before it the checkout has not been touched, and whoever finds the
folder deletes it; after it the rest can only be finished, and whoever finds the folder finishes it. Files are durable
before the decision. The process ignores signals and has a session of its own, so what kills a skill's run does not
stop it half-way. Imports the standard library only.
"""

import hashlib
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("runs", "skills", ".landing")
CONFLICT = 3


class Stuck(ValueError):
    """An interrupted landing can neither be finished nor undone without overwriting somebody's change."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


class Change(NamedTuple):
    """A path below the checkout, and its state before and after; None where there is nothing."""

    path: str
    before: str | None
    after: str | None

    @property
    def kind(self) -> str:
        return "created" if self.before is None else "removed" if self.after is None else "changed"


def state(path: Path) -> str | None:
    """What git would see there: kind, executable or not, and a digest of the contents; None if there is nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    if not stat.S_ISREG(mode):
        return "no file"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{'program' if mode & stat.S_IXUSR else 'file'} {digest}"


def copy(source: Path, target: Path) -> None:
    """Copies a file with its mode, or a link as a link."""
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
    else:
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def sync(path: Path) -> None:
    """Makes a file's contents, or a folder's entries, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prepare(root: Path, staged: Path, changes: Iterable[Change]) -> Path:
    """Writes the folder for landing `changes`, whose new contents stand in `staged`; the checkout stays as it is.

    Raises ValueError where a file could not be put in its place, so that no decision is made that cannot be kept.
    """
    folder, changes = root / FOLDER, list(changes)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "new").mkdir(parents=True)
    for parent in {_standing(root / change.path) for change in changes}:
        if not os.access(parent, os.W_OK | os.X_OK) or parent.stat().st_dev != folder.stat().st_dev:
            raise ValueError(f"{parent}: cannot be written, or is on another file system than {folder}; nothing landed")
    for number, change in enumerate(changes):
        if change.after is not None:
            copy(staged / change.path, folder / "new" / str(number))
            if not (folder / "new" / str(number)).is_symlink():
                sync(folder / "new" / str(number))
    (folder / "plan.json").write_text(json.dumps(changes), encoding="utf-8")
    for path in (folder / "plan.json", folder / "new", folder, folder.parent):
        sync(path)
    return folder


def _standing(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    return next(parent for parent in path.parents if parent.is_dir())


def _plan(path: Path) -> list[Change]:
    return [Change(*row) for row in json.loads(path.read_text(encoding="utf-8"))]


def conflicts(root: Path, changes: Iterable[Change], *, landed: bool = False) -> list[str]:
    """Paths that cannot be landed: not as they were `before` (or, if `landed`, `after`), or below what is no folder."""
    found = []
    for change in changes:
        allowed = {change.before, change.after} if landed else {change.before}
        above = [root / parent for parent in Path(change.path).parents if parent.name]
        blocked = any(folder.is_symlink() or (folder.exists() and not folder.is_dir()) for folder in above)
        if blocked or state(root / change.path) not in allowed:
            found.append(change.path)
    return found


def commit(root: Path, folder: Path) -> list[str]:
    """Decides for the plan in `folder` and lands it; if files of it were changed meanwhile, names them and does not."""
    changes = _plan(folder / "plan.json")
    found = conflicts(root, changes)
    if not found:
        os.rename(folder / "plan.json", folder / "commit.json")
        sync(folder)
        _finish(root, folder, changes)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _finish(root: Path, folder: Path, changes: list[Change]) -> None:
    """Brings every file to its new state; what is there already is left. Then drops the decision."""
    for number, change in sorted(enumerate(changes), key=lambda row: row[1].after is not None):  # removals first
        path, new = root / change.path, folder / "new" / str(number)
        if change.after is None:
            path.unlink(missing_ok=True)
        elif new.is_symlink() or new.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new, path)
    for parent in {root / parent for change in changes for parent in Path(change.path).parents}:
        if parent.is_dir():
            sync(parent)
    os.unlink(folder / "commit.json")
    sync(folder)


def recover(root: Path) -> list[str] | None:
    """Ends what an interrupted landing left: deletes what was not decided, finishes what was. The caller is locked.

    Returns the paths that it finished, None if there was nothing to finish. Raises Stuck.
    """
    folder = root / FOLDER
    if not (folder / "commit.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        return None
    changes = _plan(folder / "commit.json")
    if edited := conflicts(root, changes, landed=True):
        raise Stuck(
            f"an interrupted landing of {len(changes)} files cannot be finished: {', '.join(edited)} changed since",
            f"save those and put back what git has, then run this again; or delete {folder} to leave all as it is",
        )
    _finish(root, folder, changes)
    shutil.rmtree(folder, ignore_errors=True)
    return [change.path for change in changes]


def main() -> None:
    """Lands a folder; prints the conflicts, one a line, and returns CONFLICT if there are any."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    found = commit(folder.parents[len(FOLDER.parts) - 1], folder)
    try:
        print("\n".join(found), flush=True)
    except BrokenPipeError:  # who asked is gone; the landing is whole
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(CONFLICT if found else 0)


if __name__ == "__main__":
    main()
