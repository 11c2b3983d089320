"""The train step as functions: gradients of a global batch, one update, one evaluation.

Training, replay of goldens, mesh tests and skills all come through here. Gradients are those of the global token-mean
loss plus the objective's balance losses, whatever the mesh and the number of micro-batches.

M sparse layers, E experts, n micro-batches. "Global" means summed over every rank that read different data.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pithtrain import passes
from pithtrain.data import IGNORED_LABEL, Batch
from pithtrain.layers.balance import Objective, scope_gradient, sequence_gradient
from pithtrain.layers.router import Balanced, Choice, Learned
from pithtrain.models.architecture import Architecture, parameter_specs, split_layers, stage_specs
from pithtrain.models.decoder import Stage, build_stage
from pithtrain.ops.host import read_floats, read_ints, to_host
from pithtrain.ops.linear import Compute, Precision, dtype_of
from pithtrain.ops.rope import rope_tables
from pithtrain.optim import Optimizer, clip, updated_bias
from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.pipeline.executor import connect, execute
from pithtrain.parallel.pipeline.schedule import Schedule, ScheduleKind, make_schedule
from pithtrain.parallel.shard import Flat, Loan, Shard
from pithtrain.parallel.tape import Observe, Pass, unobserved
from pithtrain.parallel.transport import AllReduce, Request, Transport

Choices = Sequence[Sequence[Choice]]  # [n][M]: how each micro-batch's experts are chosen in each sparse layer


@dataclass(frozen=True)
class Execution:
    """How a step's work is laid out; it changes the order of summation and nothing else.

    chunks: stages a pipeline rank, None for the schedule's own number. recompute: see passes.Setting.
    """

    schedule: ScheduleKind = "1f1b"
    chunks: int | None = None
    recompute: passes.Recompute = "none"


@dataclass(frozen=True, eq=False)
class Trainee:
    """A model on its mesh with everything a step reads. stages: this rank's, by their place in the model.

    tables: RoPE's, one row a position. observe: what sees the step as it runs.
    """

    arch: Architecture
    stages: dict[int, Stage]
    shard: Shard
    mesh: Mesh
    transport: Transport
    tables: tuple[Tensor, Tensor]
    execution: Execution
    precision: Precision = "fp32"
    observe: Observe = unobserved

    @property
    def num_sparse_layers(self) -> int:
        """Of the whole model."""
        return sum(self.arch.sparse_layers)

    @property
    def device(self) -> torch.device:
        return self.tables[0].device

    def schedule(self, num_microbatches: int) -> Schedule:
        execution = self.execution
        return make_schedule(execution.schedule, self.mesh.pp.size, num_microbatches, execution.chunks)


def build(
    arch: Architecture,
    mesh: Mesh,
    transport: Transport,
    sequence_length: int,
    device: torch.device,
    execution: Execution | None = None,
    precision: Precision = "fp32",
) -> Trainee:
    """The stages of this rank, values zero: fill them by `trainee.shard.initialise` or from a checkpoint."""
    execution = execution or Execution()
    layers, shard = place(arch, mesh, transport, device, execution, dtype_of(precision))
    weights, local = shard.weights(), arch.num_experts // mesh.ep.size
    stages = {stage: build_stage(arch, weights, layers[stage], local) for stage in layers}
    tables = rope_tables(sequence_length, arch.head_dim, arch.rope_theta, device)
    trainee = Trainee(arch, stages, shard, mesh, transport, tables, execution, precision)
    connect(trainee.schedule(1).rank_of, mesh, device)
    return trainee


def place(
    arch: Architecture,
    mesh: Mesh,
    transport: Transport,
    device: torch.device,
    execution: Execution,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[int, range], Shard]:
    """The layers of each stage of this rank, and storage for their parameters."""
    rank_of = make_schedule(execution.schedule, mesh.pp.size, 1, execution.chunks).rank_of
    split = split_layers(arch, len(rank_of))
    layers = {stage: split[stage] for stage, rank in enumerate(rank_of) if rank == mesh.pp.index}
    held = {spec.name for stage in layers.values() for spec in stage_specs(arch, stage)}
    lent = arch.tie_word_embeddings and rank_of[0] != rank_of[-1]
    loan = Loan("embedding", owner=rank_of[0], borrower=rank_of[-1]) if lent else None
    return layers, Shard.create(parameter_specs(arch), mesh, transport, device, held, loan, dtype)


@dataclass(frozen=True, eq=False)
class Totals:
    """Global counts of a step, known before it starts: labels in the batch, tokens and sequences a slice."""

    labels: int
    slice_tokens: tuple[int, ...]
    num_sequences: int


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a global batch gives, equal on every rank but for `flat`, `chosen` and `gap`.

    loss: cross-entropy, nats a label. balance_loss, z_loss: as added to it. flat: this rank's reduced gradients.
    square_norms: of each parameter's gradient, by name. num_tokens_per_expert: [M, E] int64 on CPU, no padding.
    chosen: for each micro-batch the expert ids of this rank's tokens, by sparse layer. gap: the smallest top-k gap this
    rank saw.
    """

    loss: float
    balance_loss: float
    z_loss: float
    flat: Flat
    square_norms: dict[str, float]
    num_tokens_per_expert: Tensor
    num_labels: int
    chosen: tuple[dict[int, Tensor], ...]
    gap: float

    @property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return math.sqrt(sum(self.square_norms.values()))

    @property
    def finite(self) -> bool:
        return all(math.isfinite(x) for x in (self.loss, self.balance_loss, self.z_loss, self.norm))


def count(trainee: Trainee, batches: Sequence[Batch]) -> Totals:
    """The step's global counts, by one small exchange."""
    labels = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)
    tokens = [batch.tokens.numel() if batch.padding is None else int((~batch.padding).sum()) for batch in batches]
    local = torch.tensor([labels, *tokens], device=trainee.device)
    (summed,) = trainee.transport.run(AllReduce(local, trainee.mesh.dense))
    total_labels, *slice_tokens = trainee.observe("labels", "host", lambda: read_ints(summed))
    sequences = sum(batch.tokens.shape[0] for batch in batches) * trainee.mesh.data_ranks
    return Totals(total_labels, tuple(slice_tokens), sequences)


def learned(trainee: Trainee, num_microbatches: int, expert_bias: Tensor | None) -> Choices:
    """Routing by score, plus expert_bias [M, E] where given."""
    layers: list[Choice] = [
        Learned(None if expert_bias is None else expert_bias[layer]) for layer in range(trainee.num_sparse_layers)
    ]
    return [layers] * num_microbatches


def balanced(trainee: Trainee, num_microbatches: int) -> Choices:
    """Forced-balance routing, for measuring."""
    return [[Balanced()] * trainee.num_sparse_layers] * num_microbatches


def gradients(
    trainee: Trainee,
    batches: Sequence[Batch],
    objective: Objective,
    choices: Choices,
    compute: Compute,
) -> Gradients:
    """Forward and backward of this rank's micro-batches of a global batch, and the gradients' reduction."""
    assert compute.deferred is None, "the schedule says which weight gradients wait"
    work = _Work(trainee, batches, choices, compute, objective, count(trainee, batches))
    trainee.shard.zero_grads()
    work.execute(trainee.schedule(len(batches)))
    return trainee.observe("reduce", "step", work.reduce)


@dataclass(eq=False)
class _Work:
    """The actions of one step's schedule, and the sums over its micro-batches, filled as they run.

    Every stage takes its micro-batches in ascending order. totals None: evaluation, forwards only.
    """

    trainee: Trainee
    batches: Sequence[Batch]
    choices: Choices
    compute: Compute
    objective: Objective
    totals: Totals | None
    losses: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        trainee = self.trainee
        shape = trainee.num_sparse_layers, trainee.arch.num_experts
        self.counts = torch.zeros(shape, dtype=torch.int64, device=trainee.device)  # of this rank's tokens and stages
        self.global_counts = torch.zeros_like(self.counts)  # of every rank's, where the balance loss asks for them
        self.chosen: list[dict[int, Tensor]] = [{} for _ in self.batches]
        self.queues: dict[tuple[int, int], Compute] = {}  # weight gradients that wait, by stage and micro-batch
        self.live: dict[tuple[int, int], Callable[[Tensor | None], Pass[Tensor | None]]] = {}  # backward passes to come

    def execute(self, schedule: Schedule) -> None:
        trainee, batch = self.trainee, self.batches[0]
        assert all(other.tokens.shape == batch.tokens.shape for other in self.batches), "micro-batches of one shape"
        self.schedule = schedule
        shape = *batch.tokens.shape, trainee.arch.hidden_size
        like = torch.empty((), dtype=dtype_of(trainee.precision), device=trainee.device).expand(shape)  # no storage
        execute(schedule, self, trainee.mesh, trainee.transport, like, trainee.observe)

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Pass[Tensor | None]:
        trainee, model, compute, head = self.trainee, self.trainee.stages[stage], self.compute, self.compute
        if self.schedule.splits(stage, microbatch):
            compute = head = self.queues[stage, microbatch] = replace(compute, deferred=[])
        elif trainee.mesh.ep.size > 1 and self.schedule.pairs(stage, microbatch):  # behind its own exchanges
            compute = self.queues[stage, microbatch] = replace(compute, deferred=[])
        setting = passes.Setting(trainee.mesh, compute, head, trainee.execution.recompute, trainee.observe)
        inputs = self.inputs(microbatch)
        done = yield from passes.forward(model, inputs, hidden, setting)
        if done.head is not None:
            self.losses.append(done.head.loss)
        if self.totals is None:
            return done.hidden
        grad_prob_sums, grad_z_sum = yield from self.balance_gradients(microbatch, inputs, done.loads, self.totals)
        kept = replace(done, hidden=None)
        self.live[stage, microbatch] = lambda grad: passes.backward(model, kept, grad, grad_prob_sums, grad_z_sum)
        return done.hidden

    def backward(self, stage: int, microbatch: int, grad: Tensor | None) -> Pass[Tensor | None]:
        return self.live.pop((stage, microbatch))(grad)

    def weight_gradients(self, stage: int, microbatch: int) -> None:
        if queue := self.queues.get((stage, microbatch)):
            self.trainee.observe("weight gradients", "backward", queue.drain)

    def inputs(self, microbatch: int) -> passes.Inputs:
        batch, device = self.batches[microbatch], self.trainee.device
        cos, sin = (table[: batch.tokens.shape[1]] for table in self.trainee.tables)
        padding = None if batch.padding is None else batch.padding.to(device)
        scale = None if self.totals is None else 1 / max(self.totals.labels, 1)
        choices = self.choices[microbatch]
        return passes.Inputs(batch.tokens.to(device), batch.labels.to(device), padding, (cos, sin), choices, scale)

    def balance_gradients(
        self, microbatch: int, inputs: passes.Inputs, loads: Mapping[int, passes.LayerLoad], totals: Totals
    ) -> Generator[Request, tuple[Tensor, ...], tuple[dict[int, Tensor], Tensor | None]]:
        """Notes a stage's loads; gives the gradients of each prob_sum, by row, and of every z_sum."""
        self.gaps += [load.gap for load in loads.values()]
        self.chosen[microbatch] |= {row: load.topk_expert_ids for row, load in loads.items()}
        grad_prob_sums, grad_z_sum = dict[int, Tensor](), None
        for row, load in loads.items():
            self.counts[row] += load.num_tokens_per_expert.sum(0)
        if loads and self.objective.balance != "none" and self.objective.balance_coef:
            weighted = yield from self.balance_gradient(microbatch, inputs, loads, totals)
            for grad, (row, load) in zip(weighted, loads.items(), strict=True):
                self.balance.append((grad * load.prob_sum).sum())
                grad_prob_sums[row] = grad.expand_as(load.prob_sum)
        if loads and self.objective.z_coef:
            grad_z_sum = torch.tensor(
                self.objective.z_coef / max(sum(totals.slice_tokens), 1), device=self.counts.device
            )
            self.z += [grad_z_sum * load.z_sum for load in loads.values()]
        return grad_prob_sums, grad_z_sum

    def balance_gradient(
        self, microbatch: int, inputs: passes.Inputs, loads: Mapping[int, passes.LayerLoad], totals: Totals
    ) -> Generator[Request, tuple[Tensor, ...], Tensor]:
        """The gradient of the prob_sum of a stage's m layers: [m, B, E], or [m, 1, E] if one for all sequences."""
        arch, objective, n = self.trainee.arch, self.objective, len(totals.slice_tokens)
        counts = torch.stack([load.num_tokens_per_expert for load in loads.values()])
        if objective.balance == "sequence":
            batch, length = inputs.tokens.shape
            lengths = torch.full((batch,), length, device=counts.device)
            if inputs.padding is not None:
                lengths = (~inputs.padding).sum(1)
            grad = sequence_gradient(counts, lengths, arch.top_k, totals.num_sequences)
            return grad * objective.balance_coef
        (counts,) = yield AllReduce(counts.sum(1), self.trainee.mesh.dense, "balance_counts")
        tokens = totals.slice_tokens[microbatch]
        if objective.balance == "global_batch":
            rows = slice(min(loads), max(loads) + 1)
            self.global_counts[rows] += counts
            counts, tokens = self.global_counts[rows].clone(), sum(totals.slice_tokens[: microbatch + 1])
        grad = scope_gradient(counts, tokens, arch.top_k, totals.slice_tokens[microbatch], n)
        return grad * objective.balance_coef

    def reduce(self) -> Gradients:
        """Gradients to their owners; losses, counts and norms to everyone. One host read of floats, one of counts."""
        trainee, totals = self.trainee, self.totals
        assert totals is not None and not self.live, "every backward pass ran"
        assert not any(queue.deferred for queue in self.queues.values()), "every weight gradient was added"
        flat = trainee.shard.reduce()
        zero = torch.zeros((), dtype=torch.float64, device=trainee.device)
        local = torch.stack([sum((x.double() for x in xs), zero) for xs in (self.losses, self.balance, self.z)])
        (losses,) = trainee.transport.run(AllReduce(local, trainee.mesh.world))
        counts = self.counts
        if counts.shape[0]:
            (counts,) = trainee.transport.run(AllReduce(counts, trainee.mesh.world))
        gap = torch.stack(self.gaps).min() if self.gaps else zero + math.inf
        norms = trainee.shard.square_norms(flat)
        figures = torch.cat([losses, gap.double()[None], norms])
        loss, balance, z, smallest_gap, *squares = trainee.observe("figures", "host", lambda: read_floats(figures))
        return Gradients(
            loss=loss / max(totals.labels, 1),
            balance_loss=balance,
            z_loss=z,
            flat=flat,
            square_norms={spec.name: square for spec, square in zip(trainee.shard.specs, squares, strict=True)},
            num_tokens_per_expert=trainee.observe("loads", "host", lambda: to_host(counts)),
            num_labels=totals.labels,
            chosen=tuple(self.chosen),
            gap=smallest_gap,
        )


@dataclass(frozen=True, eq=False)
class Update:
    """One step's outcome: its gradients' figures (norm before clipping), whether the weights moved, the new biases."""

    gradients: Gradients
    applied: bool
    expert_bias: Tensor | None


def train_step(
    trainee: Trainee,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    objective: Objective,
    *,
    lr: float,
    updates: int,
    clip_norm: float | None,
    expert_bias: Tensor | None = None,
    bias_rate: float = 0.0,
    choices: Choices | None = None,
    compute: Compute | None = None,
) -> Update:
    """One update on this rank's micro-batches of a global batch.

    A non-finite loss or norm leaves weights, moments and biases as they were: `applied` is False. expert_bias: [M, E]
    fp32, None without bias balancing. choices: learned routing where not given.
    """
    choices = learned(trainee, len(batches), expert_bias) if choices is None else choices
    result = gradients(trainee, batches, objective, choices, compute or Compute(trainee.precision))
    if not result.finite:
        return Update(result, applied=False, expert_bias=expert_bias)
    if clip_norm is not None:
        clip(result.flat, result.norm, clip_norm)
    trainee.observe("optimizer", "step", lambda: optimizer.step(result.flat, lr, updates))
    trainee.observe("gather", "step", trainee.shard.gather)
    if expert_bias is not None:
        counts = result.num_tokens_per_expert.to(expert_bias.device)
        expert_bias = updated_bias(expert_bias, counts, bias_rate)
    return Update(result, applied=True, expert_bias=expert_bias)


def evaluate(trainee: Trainee, batches: Sequence[Batch], expert_bias: Tensor | None = None) -> float:
    """The token-mean loss, in nats, of every rank's batches together, without gradients. Batches have one shape."""
    choices = learned(trainee, len(batches), expert_bias)
    work = _Work(trainee, batches, choices, Compute(trainee.precision), Objective(), None)
    work.execute(trainee.schedule(len(batches)).forwards())
    loss = sum((loss.double() for loss in work.losses), torch.zeros((), dtype=torch.float64, device=trainee.device))
    labels = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches) if work.losses else 0
    local = torch.stack([loss, loss.new_tensor(float(labels))])
    total, number = read_floats(trainee.transport.run(AllReduce(local, trainee.mesh.world))[0])
    return total / max(number, 1.0)


def rooms(square_norms: dict[str, float]) -> dict[str, float]:
    """Gradient norms by room of the model: embedding, attention, router, experts, mlp, norm, head."""
    totals: dict[str, float] = {}
    for name, square in square_norms.items():
        totals[room_of(name)] = totals.get(room_of(name), 0.0) + square
    return {room: math.sqrt(square) for room, square in totals.items()}


def room_of(name: str) -> str:
    """The room a parameter belongs to."""
    part = name.split(".")[2] if name.startswith("layers.") else name
    return "norm" if part.endswith("norm") else part
