"""The loop: steps, validation and checkpoints, until the run is complete or has to stop.

Whatever decides what happens next is known to every rank alike: the step, the outcome of an update, and a vote.
Stopped after any step, a run that is started again goes on as if it had never been stopped.

B sequences of a global batch, S tokens a sequence, M sparse layers, E experts.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pithtrain import metrics
from pithtrain.checkpoint import Ranks, TrainState
from pithtrain.config import RunConfig
from pithtrain.data import validation_batches
from pithtrain.layers.balance import Objective
from pithtrain.ops.host import read_ints
from pithtrain.optim import SGD, AdamW, LearningRate, Optimizer
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.shard import Shard
from pithtrain.parallel.tape import Observe, unobserved
from pithtrain.parallel.transport import AllReduce, Transport
from pithtrain.step import Trainee, Update, balanced, build, evaluate, rooms, train_step
from pithtrain.timeline import TIMELINE, Recorder
from pithtrain.train.checkpoints import Checkpoints
from pithtrain.train.plan import Plan, execution
from pithtrain.train.watch import COMPLETE, FAILED, NONFINITE, STOPPED, Watch

Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Ending:
    """How the loop ended: an exit code of watch.py, why, after which step, the last validation loss, and how many steps
    of the whole run were skipped as not finite.
    """

    exit_code: int
    reason: str
    step: int
    validation_loss: float | None = None
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Run:
    """All that stays the same from step to step."""

    plan: Plan
    trainee: Trainee
    optimizer: Optimizer
    watch: Watch

    def total(self, numbers: list[int]) -> list[int]:
        """Collective. The sums over all ranks."""
        ours = torch.tensor(numbers, device=self.trainee.device)
        (summed,) = self.trainee.transport.run(AllReduce(ours, self.trainee.mesh.world))
        self.watch.moved()
        return read_ints(summed)

    def agree(self, ok: bool) -> bool:
        """Collective. Whether every rank says yes."""
        return self.total([int(not ok)]) == [0]


def train(plan: Plan, device: torch.device, watch: Watch, local_ranks: range) -> Ending:
    """Trains in the world that is running; every rank calls it. local_ranks: those of this machine."""
    mesh = make_mesh(*plan.shape)
    trainee = build(
        plan.arch, mesh, Transport(), plan.cfg.data.sequence_length, device, execution(plan.cfg), plan.precision
    )
    run = Run(plan, trainee, make_optimizer(plan.cfg, trainee.shard), watch)
    pids = run.total([os.getpid() if rank == mesh.rank else 0 for rank in range(mesh.world_size)])
    watch.peers = {rank: pids[rank] for rank in local_ranks if rank != mesh.rank}
    checkpoints = Checkpoints(plan, trainee.shard, run.optimizer, Ranks(mesh.rank, mesh.world_size, run.agree))
    state, bias = checkpoints.restore()
    if mesh.rank == 0 and (note := trainee.schedule(plan.cfg.batch.num_microbatches).note):
        print(f"pipeline: {note}", flush=True)
    with _reporting(plan.cfg, mesh.rank, state.step) as record:
        return _loop(run, checkpoints, record, state, bias)


@contextmanager
def _reporting(cfg: RunConfig, rank: int, step: int) -> Iterator[Record]:
    """What writes a record to metrics.jsonl, behind those up to `step`, and shows it; on rank 0 alone."""
    if rank:
        yield lambda record: None
        return
    display = metrics.Display(cfg.train.steps, step, cfg.run.log_interval)
    with closing(metrics.MetricsWriter(cfg.run.folder, step)) as writer, display:

        def report(record: dict[str, Any]) -> None:
            writer.write(record)
            display.update(record)

        yield report


def _validated(run: Run, step: int) -> float | None:
    """The validation loss that metrics.jsonl has for `step`, on rank 0."""
    if run.trainee.mesh.rank:
        return None
    records = metrics.read_metrics(run.plan.cfg.run.folder)
    found = [record["validation_loss"] for record in records if record["step"] == step and "validation_loss" in record]
    return found[-1] if found else None


def make_optimizer(cfg: RunConfig, shard: Shard) -> Optimizer:
    """The optimizer over this rank's master shards, its state zero."""
    optim = cfg.optim
    match optim.optimizer:
        case "adamw":
            return AdamW.create(shard, optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
        case "sgd":
            return SGD(shard, optim.weight_decay)


def make_schedule(cfg: RunConfig) -> LearningRate:
    """The learning rate of every step of the run."""
    s = cfg.schedule
    return LearningRate(s.kind, cfg.optim.lr, cfg.train.steps, s.warmup_steps, s.decay_steps, s.min_lr_ratio)


def _loop(run: Run, checkpoints: Checkpoints, record: Record, state: TrainState, bias: Tensor | None) -> Ending:
    cfg, saved = run.plan.cfg, state.step
    loss = _validated(run, state.step)
    validated = state.step if state.step == 0 or not run.agree(loss is None) else -1
    first, rank = state.step, run.trainee.mesh.rank
    if cfg.run.timeline_steps and rank == 0:  # what an earlier start recorded
        shutil.rmtree(cfg.run.folder / TIMELINE, ignore_errors=True)
    while True:
        recorder = Recorder(run.trainee.device) if 0 < state.step - first <= cfg.run.timeline_steps else None
        observe = recorder or unobserved
        ending = _ending(run, state)
        complete = ending is not None and ending.exit_code == COMPLETE
        if state.step != saved and (ending or _is_due(state.step, cfg.checkpoint.interval)):
            observe("checkpoint", "step", partial(checkpoints.save, state, bias))
            saved = state.step
        if state.step != validated and (complete or (not ending and _is_due(state.step, cfg.train.eval_interval))):
            validated = state.step
            loss = observe("validation", "step", partial(_validate, run, bias))
            if loss is not None:
                record({"step": state.step, "validation_loss": loss})
            ending = _stopped(run, state.step) or ending
        if ending:
            break
        name = f"step {state.step + 1}"
        state, bias, line = observe(name, "step", partial(one_step, run, state, bias, observe))
        if recorder:
            recorder.write(cfg.run.folder, state.step, rank)
        record(line)
        checkpoints.poll()
    if problem := checkpoints.finish():
        ending = Ending(FAILED, f"the last checkpoint was not saved: {problem}", state.step)
    return replace(ending, validation_loss=loss, skipped=state.nonfinite_total)


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step > 0 and step % interval == 0


def _ending(run: Run, state: TrainState) -> Ending | None:
    """Collective. Why the run ends after this step, if it does."""
    cfg = run.plan.cfg
    if state.step >= cfg.train.steps:
        return Ending(COMPLETE, "complete", state.step)
    if state.nonfinite_in_a_row >= cfg.train.max_nonfinite_steps:
        reason = (
            f"{state.nonfinite_in_a_row} steps in a row had a non-finite loss or gradient norm and were skipped "
            "(train.max_nonfinite_steps); the weights saved are those of the last good step: lower optim.lr, "
            "or resume from an earlier checkpoint"
        )
        return Ending(NONFINITE, reason, state.step)
    return _stopped(run, state.step)


def _stopped(run: Run, step: int) -> Ending | None:
    """Collective. Every rank stops once any got a signal."""
    stop = run.watch.stop_signal
    if run.agree(not stop):
        return None
    return Ending(STOPPED, f"stopped by {stop or 'a signal to another rank'}; the same command goes on from here", step)


def one_step(
    run: Run, state: TrainState, bias: Tensor | None, observe: Observe
) -> tuple[TrainState, Tensor | None, dict[str, Any]]:
    """One step: the state and the biases after it, and its line of metrics.jsonl."""
    cfg, trainee, mesh = run.plan.cfg, replace(run.trainee, observe=observe), run.trainee.mesh
    size, length, n = cfg.batch.global_batch_size, cfg.data.sequence_length, cfg.batch.num_microbatches
    started = time.perf_counter()
    read, ours = run.plan.train.microbatch, (mesh.data_rank, mesh.data_ranks, length)
    batches = observe("data", "step", lambda: [read(state.data_position, size, n, i, *ours) for i in range(n)])
    lr = make_schedule(cfg).at(state.step)
    update = train_step(
        trainee,
        run.optimizer,
        batches,
        Objective(cfg.balance.loss, cfg.balance.coef, cfg.balance.z_loss),
        lr=lr,
        updates=state.optimizer_steps,
        clip_norm=cfg.optim.clip_norm or None,
        expert_bias=bias,
        bias_rate=cfg.balance.bias_update_rate,
        choices=balanced(trainee, n) if cfg.train.routing == "balanced" else None,
    )
    if trainee.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    trainee.transport.records.clear()
    state = replace(
        state,
        step=state.step + 1,
        optimizer_steps=state.optimizer_steps + update.applied,
        data_position=state.data_position + size,
        tokens_seen=state.tokens_seen + size * length * update.applied,
        nonfinite_in_a_row=0 if update.applied else state.nonfinite_in_a_row + 1,
        nonfinite_total=state.nonfinite_total + (not update.applied),
    )
    run.watch.step = state.step
    return state, update.expert_bias, _line(run, state, update, lr, size * length / seconds)


def _line(run: Run, state: TrainState, update: Update, lr: float, tokens_per_second: float) -> dict[str, Any]:
    """Collective. A step's line of metrics.jsonl; norms are those before clipping, loads the busiest expert's over the
    mean, memory the fullest rank's.
    """
    cfg, found, trainee = run.plan.cfg, update.gradients, run.trainee
    device, world_size = trainee.device, trainee.mesh.world_size
    cost = metrics.flops_per_token(run.plan.arch, cfg.data.sequence_length)
    known = metrics.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = metrics.peak_memory(device.type)
    return {
        "step": state.step,
        "loss": found.loss,
        "balance_loss": found.balance_loss,
        "z_loss": found.z_loss,
        "grad_norm": found.norm,
        "grad_norms": rooms(found.square_norms),
        "learning_rate": lr,
        "skipped": not update.applied,
        "nonfinite_total": state.nonfinite_total,
        "tokens_seen": state.tokens_seen,
        "expert_load": metrics.expert_load(found.num_tokens_per_expert.tolist()),
        "tokens_per_second": tokens_per_second,
        "mfu": metrics.mfu(tokens_per_second, cost, cfg.run.peak_flops or known, world_size),
        "peak_memory": max(run.total([peak if rank == trainee.mesh.rank else 0 for rank in range(world_size)])),
    }


def _validate(run: Run, bias: Tensor | None) -> float | None:
    """Collective. The loss on the validation data; None without such data or if a signal came meanwhile."""
    cfg, mesh, dataset = run.plan.cfg, run.trainee.mesh, run.plan.validation
    if dataset is None:
        return None
    n, length = cfg.batch.num_microbatches, cfg.data.sequence_length
    size = cfg.batch.global_batch_size // n
    samples = dataset.num_samples(length)
    if cfg.train.eval_batches:
        samples = min(samples, cfg.train.eval_batches * cfg.batch.global_batch_size)
    total = 0.0
    batches = validation_batches(dataset, length, size, samples, mesh.data_rank, mesh.data_ranks)
    for first in range(0, samples, size * n):
        total += evaluate(run.trainee, list(islice(batches, n)), bias) * min(size * n, samples - first)
        run.trainee.transport.records.clear()
        if not run.agree(not run.watch.stop_signal):
            return None
    return total / samples
