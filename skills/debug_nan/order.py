"""From the parameters and what the run has left to what is replayed."""

from pathlib import Path
from typing import TYPE_CHECKING

from pithtrain.checkpoint import TrainState
from pithtrain.checkpoint.folder import STATE, step_folders
from pithtrain.config import RunConfig, load, smallest_world
from pithtrain.metrics import METRICS_NAME, read_metrics
from pithtrain.train.plan import CHECKPOINTS, RESOLVED
from skills.debug_nan.answer import Order

if TYPE_CHECKING:
    from skills.debug_nan.skill import DebugParams


def run_file(run: Path) -> Path:
    """The run file of a run folder, or the run file itself."""
    return run / RESOLVED if run.is_dir() else run


def make_order(params: "DebugParams") -> Order:
    """Raises ConfigError where the run file is refused."""
    path = run_file(params.run)
    cfg = load(path, params.set)
    own = cfg.checkpoint.resume if isinstance(cfg.checkpoint.resume, Path) else None
    recorded = params.run if (params.run / METRICS_NAME).is_file() else None
    records = [record for record in read_metrics(recorded) if "skipped" in record] if recorded else []
    skipped = [record["step"] for record in records if record["skipped"]]
    last = params.step or min(skipped, default=max((record["step"] for record in records), default=cfg.train.steps))
    folders = [path for path in step_folders(params.run / CHECKPOINTS) if int(path.stem[5:]) < last]
    return Order(
        run=path,
        overrides=tuple(params.set),
        starts=(*folders, own),
        last=last,
        ranks=params.nproc or _ranks(cfg, folders),
        ladder=params.ladder,
        recorded=recorded,
        seconds=params.seconds,
    )


def _ranks(cfg: RunConfig, folders: list[Path]) -> int:
    ranks = smallest_world(cfg.mesh)
    if cfg.mesh.dp == "rest" and folders:
        ranks *= TrainState.read(folders[0] / STATE).mesh.get("dp", 1)
    return ranks
