"""The loop: steps, validation and checkpoints, until the run is complete or has to stop.

Whatever decides what happens next is known to every rank alike: the step, the outcome of an update, and a vote.
Stopped after any step, a run that is started again goes on as if it had never been stopped.

B sequences of a global batch, S tokens a sequence, M sparse layers, E experts.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pithtrain.checkpoint import Ranks, TrainState
from pithtrain.config import RunConfig
from pithtrain.data import validation_batches
from pithtrain.layers.balance import Objective
from pithtrain.metrics import (
    Display,
    MetricsWriter,
    expert_load,
    flops_per_token,
    mfu,
    peak_flops,
    peak_memory,
    read_metrics,
)
from pithtrain.ops.host import read_ints
from pithtrain.optim import SGD, AdamW, LearningRate, Optimizer
from pithtrain.parallel.mesh import Axis, make_mesh
from pithtrain.parallel.shard import Shard
from pithtrain.parallel.transport import AllReduce, Transport
from pithtrain.step import Trainee, Update, balanced, build, evaluate, learned, rooms, train_step
from pithtrain.train.checkpoints import Checkpoints
from pithtrain.train.plan import Plan
from pithtrain.train.watch import COMPLETE, FAILED, NONFINITE, STOPPED, Watch, own_address


@dataclass(frozen=True)
class Ending:
    """How the loop ended: an exit code of watch.py, why, after which step, and the last validation loss."""

    exit_code: int
    reason: str
    step: int
    validation_loss: float | None = None


class Report:
    """metrics.jsonl and the display, on rank 0; nothing on other ranks. Use as a context."""

    def __init__(self, cfg: RunConfig, rank: int) -> None:
        self._cfg, self._speaks = cfg, rank == 0
        self._writer: MetricsWriter | None = None
        self._display: Display | None = None
        self.validated: float | None = None  # the validation loss that metrics.jsonl has for the first step

    def open(self, step: int) -> None:
        """From now on records follow those up to `step`."""
        if not self._speaks:
            return
        folder = self._cfg.run.folder
        self._writer = MetricsWriter(folder, step)
        self.validated = next((r["validation_loss"] for r in read_metrics(folder)[::-1] if _validates(r, step)), None)
        self._display = Display(self._cfg.train.steps, step, self._cfg.run.log_interval)
        self._display.__enter__()

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._display is not None:
            self._display.__exit__(None, None, None)

    def record(self, record: dict[str, Any]) -> None:
        if self._writer is not None and self._display is not None:
            self._writer.write(record)
            self._display.update(record)

    def say(self, message: str) -> None:
        if self._display is not None:
            self._display.say(message)
        elif self._speaks:
            print(message, flush=True)


def _validates(record: dict[str, Any], step: int) -> bool:
    return record["step"] == step and "validation_loss" in record


@dataclass(frozen=True, eq=False)
class Run:
    """All that stays the same from step to step. peak: FLOP/s of one device, where known."""

    plan: Plan
    trainee: Trainee
    optimizer: Optimizer
    ranks: Ranks
    watch: Watch
    report: Report
    checkpoints: Checkpoints
    peak: float | None


def train(plan: Plan, device: torch.device, watch: Watch) -> Ending:
    """Trains in the world that is running; every rank calls it."""
    mesh, transport = make_mesh(*plan.shape), Transport()
    with Report(plan.cfg, mesh.rank) as report:
        trainee = build(plan.arch, mesh, transport, plan.cfg.data.sequence_length, device)
        ranks = Ranks(mesh.rank, mesh.world_size, lambda ok: _agree(ok, transport, mesh.world, device, watch))
        watch.look_after(_addresses(transport, mesh.world, device))
        optimizer = make_optimizer(plan.cfg, trainee.shard)
        checkpoints = Checkpoints(plan, trainee.shard, optimizer, ranks, report.say)
        known = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        peak = plan.cfg.run.peak_flops or known
        return _loop(Run(plan, trainee, optimizer, ranks, watch, report, checkpoints, peak))


def _agree(ok: bool, transport: Transport, world: Axis, device: torch.device, watch: Watch) -> bool:
    """Collective. Whether every rank says yes."""
    (refusals,) = transport.run(AllReduce(torch.tensor([int(not ok)], device=device), world))
    watch.moved()
    return read_ints(refusals) == [0]


def _addresses(transport: Transport, world: Axis, device: torch.device) -> list[tuple[int, int]]:
    """Collective. Every rank's machine and process id."""
    table = torch.zeros(world.size, 2, dtype=torch.int64)
    table[world.index] = torch.tensor(own_address())
    (table,) = transport.run(AllReduce(table.to(device), world))
    numbers = read_ints(table.flatten())
    return list(zip(numbers[::2], numbers[1::2], strict=True))


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


def _loop(run: Run) -> Ending:
    cfg, checkpoints = run.plan.cfg, run.checkpoints
    state, bias = checkpoints.restore()
    run.report.open(state.step)
    loss, saved = run.report.validated, state.step
    validated = state.step if state.step == 0 or not run.ranks.agree(loss is None) else -1
    while True:
        ending = _ending(run, state)
        complete = ending is not None and ending.exit_code == COMPLETE
        if state.step != saved and (ending or _is_due(state.step, cfg.checkpoint.interval)):
            checkpoints.save(state, bias)
            saved = state.step
        if state.step != validated and (complete or (not ending and _is_due(state.step, cfg.train.eval_interval))):
            loss = _validate(run, state.step, bias)
            validated = state.step
            ending = _stopped(run, state.step) or ending
        if ending:
            break
        state, bias = _step(run, state, bias)
        checkpoints.poll()
    if problem := checkpoints.finish():
        ending = Ending(FAILED, f"the last checkpoint was not saved: {problem}", state.step)
    return replace(ending, validation_loss=loss)


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
    if run.ranks.agree(not stop):
        return None
    return Ending(STOPPED, f"stopped by {stop or 'a signal to another rank'}; the same command goes on from here", step)


def _step(run: Run, state: TrainState, bias: Tensor | None) -> tuple[TrainState, Tensor | None]:
    """One step: its update, the state after it, its record."""
    cfg, trainee, mesh = run.plan.cfg, run.trainee, run.trainee.mesh
    size, length, n = cfg.batch.global_batch_size, cfg.data.sequence_length, cfg.batch.num_microbatches
    started = time.perf_counter()
    batches = [
        run.plan.train.microbatch(state.data_position, size, n, i, mesh.data_rank, mesh.data_ranks, length)
        for i in range(n)
    ]
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
        choices=balanced(trainee, n) if cfg.train.routing == "balanced" else learned(trainee, n, bias),
    )
    if trainee.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    state = _after(state, update.applied, size, size * length)
    trainee.transport.records.clear()
    run.watch.moved(state.step)
    run.report.record(_record(run, state, update, lr, size * length / seconds))
    return state, update.expert_bias


def _after(state: TrainState, applied: bool, sequences: int, tokens: int) -> TrainState:
    """The state after a step; one that was skipped counts and uses its data up."""
    return replace(
        state,
        step=state.step + 1,
        optimizer_steps=state.optimizer_steps + applied,
        data_position=state.data_position + sequences,
        tokens_seen=state.tokens_seen + tokens * applied,
        nonfinite_in_a_row=0 if applied else state.nonfinite_in_a_row + 1,
        nonfinite_total=state.nonfinite_total + (not applied),
    )


def _record(run: Run, state: TrainState, update: Update, lr: float, tokens_per_second: float) -> dict[str, Any]:
    """A step's line of metrics.jsonl; norms are those before clipping, loads the busiest expert's over the mean."""
    found, trainee = update.gradients, run.trainee
    cost = flops_per_token(trainee.model.arch, run.plan.cfg.data.sequence_length)
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
        "expert_load": expert_load(found.num_tokens_per_expert.tolist()),
        "tokens_per_second": tokens_per_second,
        "mfu": mfu(tokens_per_second, cost, run.peak, trainee.mesh.world_size),
        "peak_memory": peak_memory(trainee.device.type),
    }


def _validate(run: Run, step: int, bias: Tensor | None) -> float | None:
    """Collective. The loss on the validation data, recorded; None without such data or if a signal came meanwhile."""
    cfg, mesh, dataset = run.plan.cfg, run.trainee.mesh, run.plan.validation
    if dataset is None:
        return None
    size, length = cfg.batch.global_batch_size // cfg.batch.num_microbatches, cfg.data.sequence_length
    limit = cfg.train.eval_batches * cfg.batch.global_batch_size or None
    left = dataset.num_samples(length) if limit is None else min(limit, dataset.num_samples(length))
    total, samples = 0.0, left
    for batch in validation_batches(dataset, length, size, limit, mesh.data_rank, mesh.data_ranks):
        total += evaluate(run.trainee, [batch], bias) * min(size, left)
        left -= min(size, left)
        run.trainee.transport.records.clear()
        if not run.ranks.agree(not run.watch.stop_signal):
            return None
    run.report.record({"step": step, "validation_loss": total / samples})
    return total / samples
