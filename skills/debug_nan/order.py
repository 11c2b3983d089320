"""From the parameters and what the run has left to what is replayed, and from where."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pithtrain.checkpoint import TrainState
from pithtrain.checkpoint.folder import STATE, read_manifest, step_folders
from pithtrain.config import ConfigError, RunConfig, fingerprint, load, smallest_world
from pithtrain.metrics import METRICS_NAME, read_metrics
from pithtrain.train.loop import make_schedule
from pithtrain.train.plan import CHECKPOINTS, RESOLVED
from skills.debug_nan.answer import Order
from skills.debug_nan.record import LIBRARIES, relative
from skills.debug_nan.words import REMEDY
from skills.frame import Missing

if TYPE_CHECKING:
    from skills.debug_nan.skill import DebugParams


def run_file(run: Path) -> Path:
    """The run file of a run folder, or the run file itself."""
    return run / RESOLVED if run.is_dir() else run


def make_order(params: "DebugParams") -> Order:
    """Raises ConfigError where the run file is refused, or nothing to start from is before the step."""
    path = run_file(params.run)
    base, cfg = load(path), load(path, params.set)
    recorded = params.run if (params.run / METRICS_NAME).is_file() else None
    records = steps_of(recorded)
    skipped = [record["step"] for record in records if record["skipped"]]
    last = params.step or min(skipped, default=max((record["step"] for record in records), default=cfg.train.steps))
    found = [_own(cfg)] if cfg.checkpoint.resume != base.checkpoint.resume else _starts(params.run, cfg)
    starts = [start for start in found if start.step < last]
    if not starts:
        raise ConfigError(f"--step {last}: {found[-1].folder} is of step {found[-1].step}; give a later step")
    return Order(
        run=path,
        overrides=tuple(params.set),
        starts=tuple(start.folder for start in starts),
        first=starts[0].step,
        last=last,
        ranks=params.nproc or _ranks(cfg, found),
        ladder=params.ladder,
        recorded=recorded,
        changed=fingerprint(cfg) != fingerprint(base),
        seconds=params.seconds,
        notes=tuple(_notes(params.run, cfg, found, starts[0], last)) if params.run.is_dir() else (),
    )


def steps_of(run: Path | None) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    return [record for record in read_metrics(run) if "skipped" in record] if run else []


class Start(NamedTuple):
    """What a run can start from: a checkpoint, or None, its beginning."""

    step: int
    folder: Path | None
    fingerprint: str = ""
    dp: int = 1


def _start(folder: Path) -> Start:
    """Raises ValueError where it is no whole checkpoint."""
    read_manifest(folder)
    state = TrainState.read(folder / STATE)
    return Start(state.step, folder, state.config_fingerprint, state.mesh.get("dp", 1))


def _own(cfg: RunConfig) -> Start:
    """What the config has the run start from."""
    resume = cfg.checkpoint.resume
    return _start(resume) if isinstance(resume, Path) else Start(0, None)


def _starts(run: Path, cfg: RunConfig) -> list[Start]:
    """All that there is, the newest first; as `pith train` does, a checkpoint that is not whole is passed over."""
    own, found = cfg.checkpoint.resume, list[Start]()
    for folder in [*step_folders(run / CHECKPOINTS), *([own] if isinstance(own, Path) else [])]:
        with contextlib.suppress(ValueError, OSError):
            found.append(_start(folder))
    found += [] if found and isinstance(own, Path) else [_own(cfg)]
    return sorted(found, key=lambda start: start.step, reverse=True)


def _notes(run: Path, cfg: RunConfig, found: list[Start], start: Start, last: int) -> Iterator[str]:
    """Why the replay starts where it does, if a nearer checkpoint was to be expected."""
    interval = cfg.checkpoint.interval
    nearest = (last - 1) // interval * interval if interval else 0
    if start.step < nearest:
        left = ", ".join(other.folder.name for other in found if other.folder) or "none"
        yield (
            f"no {run / CHECKPOINTS}/step-{nearest:08d} (checkpoint.keep = {cfg.checkpoint.keep}; left: {left}): "
            f"the replay starts from {start.folder.name if start.folder else 'the beginning'}"
        )
    if len({other.fingerprint for other in found if other.folder}) > 1:
        yield "the run was resumed with another config: the fingerprints of its checkpoints are not all the same"


def other_run(order: Order) -> Iterator[Missing]:
    """What shows, before anything runs, that the replay would be another run than the one recorded."""
    rates = make_schedule(load(order.run, order.overrides))
    records = [record for record in steps_of(order.recorded) if order.first < record["step"] <= order.last]
    for record in [] if order.changed else records:
        now, was = rates.at(record["step"] - 1), record["learning_rate"]
        if relative(now, was) > LIBRARIES:
            what = f"a start from which the run is repeated: {order.run} has the learning rate {now} for step"
            what += f" {record['step']}, recorded is {was}"
            yield Missing("\n  ".join((what, *order.notes)), REMEDY)
            return


def _ranks(cfg: RunConfig, found: list[Start]) -> int:
    """As many as the mesh asks for, where it does; else as a checkpoint says."""
    ranks = smallest_world(cfg.mesh)
    return ranks * next((start.dp for start in found if start.folder), 1) if cfg.mesh.dp == "rest" else ranks
