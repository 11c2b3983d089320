"""Puts changed files into a checkout, all or none, also when killed: `landing.py FOLDER`, run as a process of its own.

FOLDER holds plan.json and, for every change, what was there under old/ and what will be there under new/. Renaming
plan.json to commit.json is the decision. Before it the checkout has not been touched, and whoever finds the folder
deletes it; after it the rest can only be finished, and whoever finds the folder finishes it. Only where a file cannot
be written it becomes undo.json, and all is put back in the same way. Files are durable before the decision. The process
ignores signals and has a session of its own, so what kills a skill's run does not stop it half-way. Imports the
standard library only.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

FOLDER = Path("runs", "skills", ".landing")
PLAN, COMMIT, UNDO = "plan.json", "commit.json", "undo.json"
NO_FILE = "no file"


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


class Plan(NamedTuple):
    """What is to land in the checkout `root`; `folders` are made for it, the deepest first."""

    root: str
    changes: list[Change]
    folders: list[str]


def state(path: Path) -> str | None:
    """What git would see there: kind, executable or not, and a digest of the contents; None if there is nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    if not stat.S_ISREG(mode):
        return NO_FILE
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
    """Makes a file's contents, or a folder's entries, durable; of a link, which has none, its folder's are enough."""
    if path.is_symlink():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prepare(root: Path, staged: Path, changes: Iterable[Change]) -> Path:
    """Writes the folder for landing `changes`, whose new contents stand in `staged`; the checkout stays as it is.

    Raises OSError, and leaves no folder, where that cannot be written, or a folder of the checkout cannot.
    """
    folder, changes = root / FOLDER, list(changes)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for side, tree in (("old", root), ("new", staged)):
            (folder / side).mkdir(parents=True)
            for number, change in enumerate(changes):
                _keep(tree / change.path, change.before if side == "old" else change.after, folder / side / str(number))
        for parent in {_standing(root / change.path) for change in changes}:
            if not os.access(parent, os.W_OK | os.X_OK):
                raise PermissionError(f"{parent}: cannot be written; make it so, then run this again")
        above = {parent for change in changes for parent in (root / change.path).parents}
        missing = sorted((str(parent) for parent in above if not parent.is_dir()), key=len, reverse=True)
        (folder / PLAN).write_text(json.dumps(Plan(str(root.resolve()), changes, missing)), encoding="utf-8")
        for path in (folder / PLAN, folder / "old", folder / "new", folder, folder.parent):
            sync(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _keep(path: Path, expected: str | None, target: Path) -> None:
    """Copies what is to be put into a place; what is not as expected is a conflict, so that it is never needed."""
    if expected is not None and state(path) == expected:
        copy(path, target)
        sync(target)


def _standing(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    return next(parent for parent in path.parents if parent.is_dir())


def _read(path: Path) -> Plan:
    root, changes, folders = json.loads(path.read_text(encoding="utf-8"))
    return Plan(root, [Change(*row) for row in changes], folders)


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
    """Decides for the plan in `folder` and lands it. Returns why nothing has landed; empty if all has. Raises Stuck."""
    plan = _read(folder / PLAN)
    if found := conflicts(root, plan.changes):
        shutil.rmtree(folder, ignore_errors=True)
        return [f"{path}: changed in the checkout meanwhile" for path in found]
    os.rename(folder / PLAN, folder / COMMIT)
    sync(folder)
    problem = _settle(root, folder, plan)
    return [problem] if problem else []


def _settle(root: Path, folder: Path, plan: Plan) -> str:
    """Finishes what was decided, or undoes it where it cannot be; then drops the decision.

    Returns why it was undone, "" if all has landed. Raises Stuck.
    """
    problem = "an earlier attempt to land it failed"
    if (folder / COMMIT).exists():
        try:
            _bring(root, folder, plan.changes, "new")
            problem = ""
        except OSError as error:
            problem = f"cannot be landed: {error}"
            os.rename(folder / COMMIT, folder / UNDO)
            sync(folder)
    if (folder / UNDO).exists():
        _undo(root, folder, plan)
    for name in (COMMIT, UNDO):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return problem


def _undo(root: Path, folder: Path, plan: Plan) -> None:
    try:
        _bring(root, folder, plan.changes, "old")
    except OSError as error:
        what = f"a landing can be neither finished nor undone: {error}"
        raise Stuck(what, f"mend that, then run `pith skill list`; files as they were: {folder / 'old'}") from error
    for made in plan.folders:
        with contextlib.suppress(OSError):  # it has not been made, or holds a file of somebody else
            os.rmdir(made)


def _bring(root: Path, folder: Path, changes: list[Change], side: Literal["old", "new"]) -> None:
    """Brings every file to its state of one side; what is there already is left."""
    wanted = [change.before if side == "old" else change.after for change in changes]
    for number, change in sorted(enumerate(changes), key=lambda row: wanted[row[0]] is not None):  # removals first
        path = root / change.path
        beside = path.with_name(".pith-landing")
        beside.unlink(missing_ok=True)  # of an attempt that was killed, or failed
        if wanted[number] is None:
            path.unlink(missing_ok=True)
        elif state(path) != wanted[number]:
            path.parent.mkdir(parents=True, exist_ok=True)
            copy(folder / side / str(number), beside)
            sync(beside)
            os.replace(beside, path)
    for parent in {root / parent for change in changes for parent in Path(change.path).parents}:
        if parent.is_dir():
            sync(parent)


def recover(root: Path) -> str:
    """Ends what an interrupted landing left: deletes what was not decided, finishes what was. The caller is locked.

    Returns what it did, in words; "" if there was nothing to finish. Raises Stuck.
    """
    folder = root / FOLDER
    record = next((folder / name for name in (COMMIT, UNDO) if (folder / name).is_file()), None)
    if record is None:
        shutil.rmtree(folder, ignore_errors=True)
        return ""
    plan = _read(record)
    if plan.root != str(root.resolve()):
        raise Stuck(
            f"{folder} holds an interrupted landing of {plan.root}",
            "run `pith skill list` there, or delete it if that is gone",
        )
    if edited := conflicts(root, plan.changes, landed=True):
        raise Stuck(
            f"an interrupted landing of {len(plan.changes)} files cannot end: {', '.join(edited)} changed since",
            f"save those and put back what git has, then run this again; or delete {folder} to leave all as it is",
        )
    if problem := _settle(root, folder, plan):
        return f"undid an interrupted landing: {problem}"
    return f"finished an interrupted landing: {', '.join(change.path for change in plan.changes)}"


def main() -> None:
    """Lands a folder; prints why nothing has landed, as a JSON list of texts, empty if all has."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    try:
        found = commit(folder.parents[len(FOLDER.parts) - 1], folder)
        print(json.dumps(found), flush=True)
    except Stuck as error:
        sys.exit(str(error))
    except BrokenPipeError:  # who asked is gone; the landing is whole
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
