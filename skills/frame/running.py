"""Runs a skill: parameters, preconditions, steps, postconditions, landing. Every way it can end has one exit code."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    start, report = time.monotonic(), Report(skill=name)
    try:
        with _interrupts():
            return _run(name, words, root, report)
    except KeyboardInterrupt:
        return report.end("interrupted", "Nothing was changed.")
    except BadParameters as error:
        return report.end("bad parameters", str(error))
    except landing.Stuck as error:
        return report.miss([Missing(error.what, error.remedy)])
    except staging.Busy:
        return report.miss([_BUSY])
    except _TROUBLE as error:
        return report.end("failed", str(error), "Nothing was changed.")
    except SystemExit:  # --help has printed what was asked for
        report.skill = ""
        raise
    finally:
        if report.skill:
            report.show("--json" in words, start)


@contextmanager
def _interrupts() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _run(name: str, words: Sequence[str], root: Path, report: Report) -> int:
    """Parameters and preconditions, then the work."""
    staging.recover(root)
    try:
        page = pages.find(root, name)
    except ValueError as error:
        raise BadParameters(str(error)) from error
    skill = pages.load(page)
    try:
        order = read(name, page.description, skill.params, words)
        report.params = order.params.model_dump(mode="json")
        missing = skill.preconditions(order.params, root)
    except ValueError as error:
        raise BadParameters(str(error)) from error
    if skill.writes and shutil.which("git") is None:
        missing.append(Missing("the program git, which lists a checkout's files", "install git"))
    if missing:
        return report.miss(missing)
    return _transaction(skill, order, root, report) if skill.writes else _read_only(skill, order, root, report)


def _out(root: Path, name: str) -> Path:
    """A new folder for results."""
    stem = root / "runs" / "skills" / name / time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while (folder := stem if number == 1 else stem.with_name(f"{stem.name}-{number}")).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def _read_only(skill: Skill[Any, Any], order: Order[Any], root: Path, report: Report) -> int:
    """Works in the checkout itself and changes nothing there; a dry run ends before the steps."""
    if order.dry_run:
        return report.end("dry run")
    report.out = _out(root, report.skill)
    workspace = Workspace(root, report.out)
    report.result = skill.steps(order.params, workspace)
    failures = skill.postconditions(order.params, report.result, workspace)
    return report.end("failed", *failures) if failures else report.end("done")


def _transaction(skill: Skill[Any, Any], order: Order[Any], root: Path, report: Report) -> int:
    """Works in a copy of the checkout, and lands what changed there once it is proven."""
    with staging.locked(root) as lock:
        landing.recover(root)
        report.out = _out(root, report.skill)
        stage = Stage(root)
        try:
            workspace = Workspace(stage.root, report.out, held=(lock,))
            changes = _changes(skill, order, stage, workspace, report)
            if order.dry_run:
                return report.end("dry run")
            failures = _prove(skill, order.params, stage, changes, workspace, report)
            if not failures:
                workspace.say(f"landing {len(changes)} files")
                failures = [f"{path}: changed in the checkout meanwhile" for path in stage.land(changes, lock)]
            return report.end("failed", *failures, "Nothing was changed.") if failures else report.end("done")
        finally:
            stage.remove()


def _changes(
    skill: Skill[Any, Any], order: Order[Any], stage: Stage, workspace: Workspace, report: Report
) -> list[Change]:
    """Takes the steps; what they changed in the copy, which is also written as change.diff."""
    report.result = skill.steps(order.params, workspace)
    changes, diff = stage.changes(), stage.diff()
    report.changes = {change.path: change.kind for change in changes}
    report.diff = shortened(diff) if order.dry_run else ""
    (workspace.out / "change.diff").write_text(diff, encoding="utf-8", errors="surrogateescape")
    return changes


def _prove(
    skill: Skill[Any, Any], params: Any, stage: Stage, changes: list[Change], workspace: Workspace, report: Report
) -> list[str]:
    """What the postconditions find; and that they left the files as they were, so that what lands is what is proven."""
    assert report.result is not None, "steps come before postconditions"
    failures = skill.postconditions(params, report.result, workspace)
    return failures if stage.changes() == changes else [*failures, "the postconditions themselves changed files"]
