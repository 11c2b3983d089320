"""The train step as functions: gradients of a global batch, one update, one evaluation.

Training, replay of goldens, mesh tests and skills all come through here. Gradients are those of the global token-mean
loss plus the objective's balance losses, whatever the mesh and the number of micro-batches.

M sparse layers, E experts, n micro-batches. "Global" means summed over every rank that read different data.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pithtrain import passes
from pithtrain.data import IGNORED_LABEL, Batch
from pithtrain.layers.balance import Objective, scope_gradient, sequence_gradient
from pithtrain.layers.router import Balanced, Choice, Learned
from pithtrain.models.architecture import Architecture, parameter_specs
from pithtrain.models.decoder import Decoder, build_decoder
from pithtrain.ops.host import read_floats, read_ints, to_host
from pithtrain.ops.linear import Compute
from pithtrain.ops.rope import rope_tables
from pithtrain.optim import Optimizer, clip, updated_bias
from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.shard import Flat, Shard
from pithtrain.parallel.tape import Pass, drive
from pithtrain.parallel.transport import AllReduce, Request, Transport

Choices = Sequence[Sequence[Choice]]  # [n][M]: how each micro-batch's experts are chosen in each sparse layer


@dataclass(frozen=True, eq=False)
class Trainee:
    """A model on its mesh with everything a step reads. `tables` are RoPE's, one row a position."""

    model: Decoder
    shard: Shard
    mesh: Mesh
    transport: Transport
    tables: tuple[Tensor, Tensor]

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.model.arch.sparse_layers)

    @property
    def device(self) -> torch.device:
        return self.tables[0].device


def build(arch: Architecture, mesh: Mesh, transport: Transport, sequence_length: int, device: torch.device) -> Trainee:
    """The model of this rank, values zero: fill them by `trainee.shard.initialise` or from a checkpoint."""
    shard = Shard.create(parameter_specs(arch), mesh, transport, device)
    model = build_decoder(arch, shard.weights(), arch.num_experts // mesh.ep.size)
    tables = rope_tables(sequence_length, arch.head_dim, arch.rope_theta, device)
    return Trainee(model, shard, mesh, transport, tables)


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
    chosen: [n][M] expert ids of this rank's tokens. gap: the smallest top-k gap this rank saw.
    """

    loss: float
    balance_loss: float
    z_loss: float
    flat: Flat
    square_norms: dict[str, float]
    num_tokens_per_expert: Tensor
    num_labels: int
    chosen: tuple[tuple[Tensor, ...], ...]
    gap: float

    @property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return math.sqrt(sum(self.square_norms.values()))

    @property
    def finite(self) -> bool:
        return all(math.isfinite(x) for x in (self.loss, self.balance_loss, self.z_loss, self.norm))


@dataclass(eq=False)
class _Sums:
    """Sums over the micro-batches of a step, filled as they run, in order."""

    losses: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    global_counts: Tensor | None = None  # [M, E], of slices 0..i over all ranks
    global_tokens: int = 0
    gaps: list[Tensor] = field(default_factory=list)
    chosen: list[tuple[Tensor, ...]] = field(default_factory=list)


def count(trainee: Trainee, batches: Sequence[Batch]) -> Totals:
    """The step's global counts, by one small exchange."""
    labels = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)
    tokens = [batch.tokens.numel() if batch.padding is None else int((~batch.padding).sum()) for batch in batches]
    local = torch.tensor([labels, *tokens], device=trainee.device)
    (summed,) = trainee.transport.run(AllReduce(local, trainee.mesh.dense))
    total_labels, *slice_tokens = read_ints(summed)
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
    trainee: Trainee, batches: Sequence[Batch], objective: Objective, choices: Choices, compute: Compute
) -> Gradients:
    """Forward and backward of this rank's micro-batches of a global batch, and the gradients' reduction.

    Weight gradients that wait in the queue of `compute` are added before it.
    """
    totals, sums = count(trainee, batches), _Sums()
    trainee.shard.zero_grads()
    for index, batch in enumerate(batches):
        inputs = _inputs(trainee, batch, choices[index], 1 / max(totals.labels, 1))
        drive(trainee.transport, _microbatch(trainee, index, inputs, objective, totals, sums, compute))
    compute.drain()
    return _reduce(trainee, totals, sums)


def _inputs(trainee: Trainee, batch: Batch, choices: Sequence[Choice], scale: float | None) -> passes.Inputs:
    length, device = batch.tokens.shape[1], trainee.device
    cos, sin = (table[:length] for table in trainee.tables)
    padding = None if batch.padding is None else batch.padding.to(device)
    return passes.Inputs(batch.tokens.to(device), batch.labels.to(device), padding, (cos, sin), choices, scale)


def _microbatch(
    trainee: Trainee,
    index: int,
    inputs: passes.Inputs,
    objective: Objective,
    totals: Totals,
    sums: _Sums,
    compute: Compute,
) -> Pass[None]:
    """One micro-batch forward and backward, its losses and counts added to `sums`."""
    done = yield from passes.forward(trainee.model, inputs, trainee.mesh, compute)
    loads = done.loads
    sums.losses.append(done.loss)
    sums.gaps += [load.gap for load in loads]
    sums.chosen.append(tuple(load.topk_expert_ids for load in loads))
    grad_prob_sums: list[Tensor | None] = [None] * len(loads)
    grad_z_sum = None
    if loads:
        sums.counts.append(torch.stack([load.num_tokens_per_expert.sum(0) for load in loads]))
    if loads and objective.balance != "none" and objective.balance_coef:
        weighted = yield from _balance_gradient(trainee, index, inputs, loads, objective, totals, sums)
        sums.balance += [(grad * load.prob_sum).sum() for grad, load in zip(weighted, loads, strict=True)]
        grad_prob_sums = [grad.expand_as(load.prob_sum) for grad, load in zip(weighted, loads, strict=True)]
    if loads and objective.z_coef:
        grad_z_sum = loads[0].z_sum.new_tensor(objective.z_coef / max(sum(totals.slice_tokens), 1))
        sums.z += [grad_z_sum * load.z_sum for load in loads]
    yield from passes.backward(trainee.model, done, grad_prob_sums, grad_z_sum)


def _balance_gradient(
    trainee: Trainee,
    index: int,
    inputs: passes.Inputs,
    loads: Sequence[passes.LayerLoad],
    objective: Objective,
    totals: Totals,
    sums: _Sums,
) -> Generator[Request, tuple[Tensor, ...], Tensor]:
    """The gradient of every layer's prob_sum: [M, B, E], or [M, 1, E] where it is the same for every sequence."""
    top_k, n = trainee.model.arch.top_k, len(totals.slice_tokens)
    if objective.balance == "sequence":
        counts = torch.stack([load.num_tokens_per_expert for load in loads])
        batch, length = inputs.tokens.shape
        lengths = torch.full((batch,), length, device=counts.device)
        if inputs.padding is not None:
            lengths = (~inputs.padding).sum(1)
        grad = sequence_gradient(counts, lengths, top_k, totals.num_sequences)
        return grad * objective.balance_coef
    (counts,) = yield AllReduce(sums.counts[-1].clone(), trainee.mesh.dense)
    tokens = totals.slice_tokens[index]
    if objective.balance == "global_batch":
        sums.global_counts = counts = counts if sums.global_counts is None else sums.global_counts + counts
        sums.global_tokens = tokens = sums.global_tokens + tokens
    grad = scope_gradient(counts, tokens, top_k, totals.slice_tokens[index], n)
    return grad * objective.balance_coef


def _reduce(trainee: Trainee, totals: Totals, sums: _Sums) -> Gradients:
    """Gradients to their owners; losses, counts and norms to everyone. One host read of floats, one of counts."""
    flat = trainee.shard.reduce()
    zero = torch.zeros((), dtype=torch.float64, device=trainee.device)
    local = torch.stack([sum((x.double() for x in xs), zero) for xs in (sums.losses, sums.balance, sums.z)])
    (losses,) = trainee.transport.run(AllReduce(local, trainee.mesh.dense))
    counts = torch.zeros(0, trainee.model.arch.num_experts, dtype=torch.int64)
    if sums.counts:
        (counts,) = trainee.transport.run(AllReduce(torch.stack(sums.counts).sum(0), trainee.mesh.dense))
    gap = torch.stack(sums.gaps).min() if sums.gaps else zero + math.inf
    norms = trainee.shard.square_norms(flat)
    loss, balance, z, smallest_gap, *squares = read_floats(torch.cat([losses, gap.double()[None], norms]))
    return Gradients(
        loss=loss / max(totals.labels, 1),
        balance_loss=balance,
        z_loss=z,
        flat=flat,
        square_norms=dict(zip(trainee.shard.placements, squares, strict=True)),
        num_tokens_per_expert=to_host(counts),
        num_labels=totals.labels,
        chosen=tuple(sums.chosen),
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
    result = gradients(trainee, batches, objective, choices, compute or Compute())
    if not result.finite:
        return Update(result, applied=False, expert_bias=expert_bias)
    if clip_norm is not None:
        clip(result.flat, result.norm, clip_norm)
    optimizer.step(result.flat, lr, updates)
    trainee.shard.gather()
    if expert_bias is not None:
        counts = result.num_tokens_per_expert.to(expert_bias.device)
        expert_bias = updated_bias(expert_bias, counts, bias_rate)
    return Update(result, applied=True, expert_bias=expert_bias)


def evaluate(trainee: Trainee, batches: Sequence[Batch], expert_bias: Tensor | None = None) -> float:
    """The token-mean loss, in nats, of every rank's batches together, without gradients."""
    choices = learned(trainee, len(batches), expert_bias)
    loss = torch.zeros((), dtype=torch.float64, device=trainee.device)
    labels = 0
    for batch, layers in zip(batches, choices, strict=True):
        inputs = _inputs(trainee, batch, layers, None)
        (done,) = drive(trainee.transport, passes.forward(trainee.model, inputs, trainee.mesh, Compute()))
        loss += done.loss.double()
        labels += int((batch.labels != IGNORED_LABEL).sum())
    local = torch.stack([loss, loss.new_tensor(float(labels))])
    total, number = read_floats(trainee.transport.run(AllReduce(local, trainee.mesh.dense))[0])
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
