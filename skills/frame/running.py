"""Runs a skill: parameters, preconditions, steps, postconditions, landing. Every way it can end has one exit code."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from skills.frame import landing, staging
from skills.frame import page as pages
from skills.frame.arguments import BadParameters, Order, read
from skills.frame.contract import Failed, Missing, Skill
from skills.frame.landing import Change
from skills.frame.report import Report, shortened
from skills.frame.staging import Stage
from skills.frame.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
_BUSY = Missing("another skill is changing this checkout", "wait for it to end, then run this again")
_TROUBLE = (Failed, ValueError, OSError, subprocess.SubprocessError)  # of a run; their words are shown as failures


def main(name: str, words: Sequence[str], root: Path = ROOT) -> int:
    """`pith skill run NAME WORDS...`: 0 done, 1 failed and rolled back, 2 precondition missing, 3 bad parameters.

    A summary goes to stdout, with --json the whole report; progress and what went wrong to stderr. 130: interrupted.
    """
    start, report, helped = time.monotonic(), Report(skill=name), False
    with _interrupts(report):
        try:
            return _run(name, words, root, report)
        except KeyboardInterrupt:
            staging.ignore_signals()
            return report.end("interrupted", "Nothing was changed.")
        except BadParameters as error:
            return report.end("bad parameters", str(error))
        except landing.Stuck as error:
            return report.miss([Missing(error.what, error.remedy)])
        except staging.Busy:
            return report.miss([_BUSY])
        except _TROUBLE as error:
            return report.end("failed", str(error) or repr(error), "Nothing was changed.")
        except SystemExit:  # --help has printed what was asked for
            helped = True
            raise
        finally:
            if not helped:
                report.show("--json" in takewhile("--".__ne__, words), start)


@contextmanager
def _interrupts(report: Report) -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does. The report keeps it, since a library may catch what is raised in its midst."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        report.status = "interrupted"
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is interrupt:  # else it is ignored from here to the process's end
                signal.signal(signum, handler)


def _run(name: str, words: Sequence[str], root: Path, report: Report) -> int:
    """Parameters and preconditions, then the work."""
    if told := staging.recover(root):
        print(told, file=sys.stderr)
    try:
        page = pages.find(root, name)
    except pages.Unknown as error:
        raise BadParameters(str(error)) from error
    with _contained():
        skill = pages.load(page)
    try:
        order = read(name, page.description, skill.params, words)
        report.params = order.params.model_dump(mode="json")
        with _contained():
            missing = _missing(skill, order.params, root)
    except ValueError as error:
        raise BadParameters(str(error)) from error
    _go_on(report)
    if missing:
        return report.miss(missing)
    with _contained():
        return _transaction(skill, order, root, report) if skill.writes else _read_only(skill, order, root, report)


def _go_on(report: Report) -> None:
    """Raises KeyboardInterrupt once more where one was lost."""
    if report.status == "interrupted":
        raise KeyboardInterrupt


@contextmanager
def _contained() -> Iterator[None]:
    """For a skill's own code: stdout is the report's, so what it prints goes to stderr; and it ends no process."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise Failed(f"the skill called exit with {error.code!r}; expected that it returns or raises Failed") from error


def _missing(skill: Skill[Any, Any], params: Any, root: Path) -> list[Missing]:
    """The skill's own preconditions, and those of the frame."""
    try:
        missing = skill.preconditions(params, root)
    except OSError as error:
        missing = [Missing(str(error), "make it readable, or name another")]
    if skill.writes and shutil.which("git") is None:
        missing.append(Missing("the program git, which lists a checkout's files", "install git"))
    return missing


def results_folder(root: Path, name: str) -> Path:
    """A new folder for results, of this run alone."""
    stem = root / "runs" / "skills" / name / time.strftime("%Y%m%d-%H%M%S")
    stem.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def _read_only(skill: Skill[Any, Any], order: Order[Any], root: Path, report: Report) -> int:
    """Works in the checkout itself and changes nothing there; a dry run ends before the steps."""
    if order.dry_run:
        return report.end("dry run")
    report.out = results_folder(root, report.skill)
    workspace = Workspace(root, report.out)
    result = skill.steps(order.params, workspace)
    report.take(result)
    failures = skill.postconditions(order.params, result, workspace)
    _go_on(report)
    return report.end("failed", *failures) if failures else report.end("done")


def _transaction(skill: Skill[Any, Any], order: Order[Any], root: Path, report: Report) -> int:
    """Works in a copy of the checkout, and lands what changed there once it is proven."""
    with staging.locked(root) as lock:
        landing.recover(root)
        report.out = results_folder(root, report.skill)
        try:
            stage = Stage(root)
            workspace = Workspace(stage.root, report.out, held=(lock,))
            result = skill.steps(order.params, workspace)
            report.take(result, dry_run=order.dry_run)
            changes = _changes(order, stage, report)
            if order.dry_run:
                return report.end("dry run")
            failures = skill.postconditions(order.params, result, workspace)
            if stage.changes() != changes:  # so that what lands is what is proven
                failures = [*failures, "the postconditions themselves changed files"]
            _go_on(report)
            if not failures:
                workspace.say(f"landing {len(changes)} files")
                failures = stage.land(changes, lock)
            return report.end("failed", *failures, "Nothing was changed.") if failures else report.end("done")
        finally:
            staging.ignore_signals()
            staging.remove_stage(root)


def _changes(order: Order[Any], stage: Stage, report: Report) -> list[Change]:
    """What the steps changed in the copy, which is also written as change.diff."""
    assert report.out is not None, "a run that writes has a folder for results"
    changes, diff = stage.changes(), stage.diff()
    report.changes = {change.path: change.kind for change in changes}
    report.diff = shortened(diff) if order.dry_run else ""
    (report.out / "change.diff").write_text(diff, encoding="utf-8", errors="surrogateescape")
    return changes
