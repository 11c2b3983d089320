"""One rank of a measured run: the trainer's own steps, checkpoints and data, with everything in them observed.

The router is timed apart from the attention segment that it belongs to, and where ranks meet after work of their own
(data, reduce, gather, checkpoint) the wait for the last of them is timed apart from what follows.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from pithtrain.checkpoint import Ranks
from pithtrain.config import load
from pithtrain.data import IGNORED_LABEL, Batch
from pithtrain.layers.router import Choice, Router, Routing
from pithtrain.metrics import flops_per_token
from pithtrain.models.decoder import SparseLayer, Stage
from pithtrain.ops.linear import Compute
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.tape import Observe, Phase, Piece
from pithtrain.parallel.transport import AllReduce, Transport
from pithtrain.step import Trainee, build
from pithtrain.timeline import Recorder
from pithtrain.train import loop
from pithtrain.train.checkpoints import Checkpoints
from pithtrain.train.plan import execution, make_plan
from pithtrain.train.watch import Status, Watch
from skills.profile_bottleneck.yardstick import yardstick

WARM_UP = 3  # steps before the first that is measured


@dataclass(frozen=True)
class Job:
    """What to measure. overrides: as `--set` takes them. start: a checkpoint, or "never". folder: for results."""

    run: Path
    overrides: tuple[str, ...]
    start: str
    steps: int
    folder: Path


class _Through(Function):
    """A piece within the graph of a segment, its forward and backward observed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, piece: Piece, observe: Observe) -> tuple[Tensor, ...]:
        ctx.piece, ctx.observe = piece, observe
        outputs = observe(piece.name, "forward", piece.forward)
        ctx.mark_non_differentiable(*(y for y in outputs if not y.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (grad,) = ctx.observe(ctx.piece.name, "backward", lambda: ctx.piece.backward(*grads))
        return grad, None, None


@dataclass(frozen=True, eq=False)
class TimedRouter(Router):
    """A router that an observer sees, inside the attention segment."""

    name: str
    observe: Observe

    def __call__(self, hidden_states: Tensor, length: int, choice: Choice, compute: Compute) -> Routing:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            found = Router.__call__(self, x, length, choice, compute)
            return found.topk_weights, found.topk_expert_ids, found.probs, found.logsumexp

        return Routing(*_Through.apply(hidden_states, Piece(self.name, run, (hidden_states,)), self.observe))


def watched(trainee: Trainee, observe: Observe) -> Trainee:
    """The trainee with its routers observed."""

    def layer_of(layer: Any) -> Any:
        if not isinstance(layer, SparseLayer):
            return layer
        router = TimedRouter(**vars(layer.router), name=f"{layer.name}.router", observe=observe)
        return replace(layer, router=router)

    def stage_of(stage: Stage) -> Stage:
        return replace(stage, layers=tuple(map(layer_of, stage.layers)))

    return replace(trainee, stages={number: stage_of(stage) for number, stage in trainee.stages.items()})


@dataclass(eq=False)
class Eye:
    """Observes a step: times everything, times apart the waits for ranks, and counts what the batches hold."""

    run: loop.Run
    recorder: Recorder
    positions: int = 0
    padding: int = 0
    unlabelled: int = 0

    def __call__(self, name: str, phase: Phase, run: Callable[[], Any], /) -> Any:
        if name in ("reduce", "gather", "checkpoint"):
            self.recorder(f"before {name}", "wait", self._meet)
        result = self.recorder(name, phase, run)
        if name == "data":
            self._count(result)
            self.recorder("behind data", "wait", self._meet)
        return result

    def _meet(self) -> None:
        trainee = self.run.trainee
        trainee.transport.run(AllReduce(torch.zeros(1, device=trainee.device), trainee.mesh.world))

    def _count(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.positions += batch.tokens.numel()
            self.unlabelled += int((batch.labels == IGNORED_LABEL).sum())
            self.padding += 0 if batch.padding is None else int(batch.padding.sum())


def record(job: Job) -> None:
    """Collective, in the world that is running. Writes the job's folder: a timeline, and a file of facts a rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    own = (f"checkpoint.resume={job.start}", f"run.folder={job.folder / 'run'}")
    plan = make_plan(load(job.run, (*job.overrides, *own)), str(job.run), world)
    cfg, mesh, device = plan.cfg, make_mesh(*plan.shape), _device()
    trainee = build(plan.arch, mesh, Transport(), cfg.data.sequence_length, device, execution(cfg), plan.precision)
    watch = Watch(Status(job.folder / "status.json", mesh.rank), cfg.train.hang_timeout)  # not entered: no threads
    run = loop.Run(plan, trainee, loop.make_optimizer(cfg, trainee.shard), watch)
    checkpoints = Checkpoints(plan, trainee.shard, run.optimizer, Ranks(mesh.rank, mesh.world_size, run.agree))
    state, bias = checkpoints.restore()
    interval = cfg.checkpoint.interval if 0 < cfg.checkpoint.interval <= job.steps else job.steps
    lines, eyes = list[dict[str, Any]](), list[Eye]()
    for number in range(1 - WARM_UP, job.steps + 1):
        eye = Eye(run, Recorder(device))
        step = replace(run, trainee=watched(run.trainee, eye))
        one = lambda step=step, state=state, bias=bias, eye=eye: loop.one_step(step, state, bias, eye)  # noqa: E731
        state, bias, line = eye(f"step {number}", "step", one)
        if number > 0 and number % interval == 0:
            save = lambda state=state, bias=bias: checkpoints.save(state, bias)  # noqa: E731
            eye("checkpoint", "step", save)
        checkpoints.poll()
        if number > 0:
            eye.recorder.write(job.folder, number, mesh.rank)
            lines.append(line)
            eyes.append(eye)
    problem = checkpoints.finish()
    facts = {
        "rank": mesh.rank,
        "mesh": plan.shape._asdict(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "steps": job.steps,
        "saves": job.steps // interval,
        "checkpoint_interval": cfg.checkpoint.interval,
        "checkpoint_problem": problem,
        "schedule": [cfg.pipeline.schedule, cfg.batch.num_microbatches, cfg.pipeline.num_chunks],
        "tokens_per_step": cfg.batch.global_batch_size * cfg.data.sequence_length,
        "flops_per_token": flops_per_token(plan.arch, cfg.data.sequence_length),
        "peak_flops": cfg.run.peak_flops,
        "sparse_layers": [i for i, sparse in enumerate(plan.arch.sparse_layers) if sparse],
        "expert_load": [line["expert_load"] for line in lines],
        "positions": sum(eye.positions for eye in eyes),
        "padding": sum(eye.padding for eye in eyes),
        "unlabelled": sum(eye.unlabelled for eye in eyes),
        "yardstick": yardstick(trainee, cfg.batch.global_batch_size, cfg.batch.num_microbatches),
    }
    (job.folder / f"facts-{mesh.rank:05d}.json").write_text(json.dumps(facts))


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", (dist.get_rank() if dist.is_initialized() else 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main(path: str) -> None:
    """`python -m skills.profile_bottleneck.probe JOB.json`, under torchrun."""
    fields = json.loads(Path(path).read_text())
    job = Job(Path(fields["run"]), tuple(fields["overrides"]), fields["start"], fields["steps"], Path(fields["folder"]))
    torch.set_num_threads(load(job.run, job.overrides).train.threads)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("warn" if torch.cuda.is_available() else "error")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    record(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
