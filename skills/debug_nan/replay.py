"""A run rebuilt from its config and replayed, step by step, up to the first one that is not finite.

Every rank of a world calls `replay` with the same job. The steps are the trainer's own: its plan, its checkpoints, its
batches, its function for one step. Files only below the job's folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.checkpoint import Ranks, TrainState
from pithtrain.config import load
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.tape import unobserved
from pithtrain.parallel.transport import Transport
from pithtrain.step import build
from pithtrain.train import loop
from pithtrain.train.checkpoints import Checkpoints
from pithtrain.train.plan import execution, make_plan
from pithtrain.train.watch import Status, Watch
from skills.debug_nan.finding import Origin, is_finite
from skills.debug_nan.locate import origins
from skills.debug_nan.watcher import Watcher

T = TypeVar("T")

TIMES = 2  # a step is run again, watched


@dataclass(frozen=True)
class Job:
    """What to replay. run, overrides: as for training. starts: checkpoints to start from, the first one that holds
    only finite values; None for the run's own beginning. last: the last step. folder: where files go. save: keep the
    state before the step that is not finite, as a checkpoint in the folder. watched: look for origins.
    """

    run: Path
    overrides: tuple[str, ...]
    starts: tuple[Path | None, ...]
    last: int
    folder: Path
    save: bool = False
    watched: bool = True


@dataclass(frozen=True, eq=False)
class Replayed:
    """What came of it, equal on every rank. start: the checkpoint. bad: the step that is not finite, None if all are.
    lines: the records of the steps replayed, the bad one's last. largest_weights: the largest absolute value at the
    start, and before the last step. again: the bad step's figures when it was run again. found: the origins of each of
    those runs. state: what was not finite in checkpoints that were passed over.
    """

    start: Path | None
    first: int
    bad: int | None
    lines: list[dict[str, Any]]
    largest_weights: tuple[float, float]
    again: list[tuple[bool, float, float]] = field(default_factory=list)
    found: list[list[Origin]] = field(default_factory=list)
    state: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Moment:
    """A run between two steps."""

    run: loop.Run
    state: TrainState
    bias: Tensor | None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the next step goes on from, on this rank."""
        shard = self.run.trainee.shard
        flats = {"weights": {name: bucket.values for name, bucket in shard.buckets.items()}, "masters": shard.masters()}
        for kind, flat in (flats | self.run.optimizer.state()).items():
            for tensor in flat.values():
                yield kind, tensor
        if self.bias is not None:
            yield "expert_bias", self.bias

    def is_finite(self) -> bool:
        """Collective."""
        return self.run.agree(all(is_finite(tensor) for _, tensor in self.tensors()))

    def largest_weight(self) -> float:
        """Collective. The largest absolute value of a weight on any rank."""
        weights = [tensor for kind, tensor in self.tensors() if kind == "weights"]
        return max(_gathered(self.run, max(float(tensor.abs().max()) for tensor in weights)))

    def copy(self) -> list[Tensor]:
        return [tensor.clone() for _, tensor in self.tensors()]

    def put_back(self, copies: list[Tensor]) -> None:
        """Collective: what other pipeline ranks lent is fetched again."""
        for (_, tensor), copied in zip(self.tensors(), copies, strict=True):
            tensor.copy_(copied)
        self.run.trainee.shard.gather()


def begin(job: Job, start: Path | None) -> tuple[Moment, Checkpoints]:
    """The run at a checkpoint, or at its beginning. Raises ConfigError if it cannot be."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    resume = "never" if start is None else str(start)
    own = (f"checkpoint.resume={resume}", f"run.folder={job.folder}", "checkpoint.background=false")
    plan = make_plan(load(job.run, (*job.overrides, *own)), str(job.run), world)
    mesh = make_mesh(*plan.shape)
    length = plan.cfg.data.sequence_length
    device = torch.device("cpu")
    trainee = build(plan.arch, mesh, Transport(), length, device, execution(plan.cfg), plan.precision)
    watch = Watch(Status(job.folder / "status.json", mesh.rank), plan.cfg.train.hang_timeout)  # not entered: no threads
    run = loop.Run(plan, trainee, loop.make_optimizer(plan.cfg, trainee.shard), watch)
    checkpoints = Checkpoints(plan, trainee.shard, run.optimizer, Ranks(mesh.rank, mesh.world_size, run.agree))
    state, bias = checkpoints.restore()
    return Moment(run, state, bias), checkpoints


def replay(job: Job) -> Replayed:
    """Collective. Steps from the start to the job's last, or to the first that is not finite."""
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    state = list[str]()
    for start in job.starts:
        moment, checkpoints = begin(job, start)
        if moment.is_finite():
            break
        state.append(f"{start or 'the weights that the run starts from'}: holds values that are not finite")
    first, lines, finite = moment.state.step, list[dict[str, Any]](), moment.is_finite()
    largest = moment.largest_weight()
    while finite and moment.state.step < job.last:
        before, copies = moment, moment.copy()
        run_state, bias, line = loop.one_step(moment.run, moment.state, moment.bias, unobserved)
        moment = Moment(moment.run, run_state, bias)
        lines.append(line)
        finite = not line["skipped"] and moment.is_finite()
        if not finite:
            before.put_back(copies)
            moment = before
    largest_weights = largest, moment.largest_weight()
    if finite:
        return Replayed(start, first, None, lines, largest_weights, state=state)
    if job.save:
        checkpoints.save(moment.state, moment.bias)
        if problem := checkpoints.finish():
            raise OSError(f"the state before the step was not saved: {problem}")
    again, found = list[tuple[bool, float, float]](), list[list[Origin]]()
    copies = moment.copy()
    for _ in range(TIMES if job.watched else 0):
        figures, seen = _watched(moment)
        again.append(figures)
        found.append(seen)
        moment.put_back(copies)
    return Replayed(start, first, moment.state.step + 1, lines, largest_weights, again, found, state)


def _watched(moment: Moment) -> tuple[tuple[bool, float, float], list[Origin]]:
    """The next step once more: whether it is finite, its loss and gradient norm; and its origins over all ranks."""
    run = moment.run
    watcher = Watcher(run.trainee.mesh)
    trainee = watcher.where.watched(run.trainee)
    for kind, flat in {"master": trainee.shard.masters(), **run.optimizer.state()}.items():
        watcher.where.own(kind, flat, trainee)
    watcher.before(moment.tensors())
    watched = replace(run, trainee=trainee)
    with watcher:
        state, bias, line = loop.one_step(watched, moment.state, moment.bias, watcher.observe)
    finite = not line["skipped"] and Moment(run, state, bias).is_finite()
    found = origins(_gathered(run, watcher.seen()), trainee.arch.num_experts, trainee.mesh.ep.size)
    return (finite, line["loss"], line["grad_norm"]), found


def _gathered(run: loop.Run, ours: T) -> list[T]:
    """Collective. What every rank gives, by rank."""
    seen: list[Any] = [ours] * run.trainee.mesh.world_size
    if len(seen) > 1:
        dist.all_gather_object(seen, ours)
    return seen
