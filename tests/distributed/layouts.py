"""One global batch on any mesh: what the ranks of a world measure, so that worlds can be compared.

Everything a case gives is assembled to the whole model and the whole batch, and comes back as numpy arrays from rank 0.
B sequences of the global batch, S positions, n micro-batches, d data ranks, M sparse layers, K experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from golden.synthetic import synthetic_tokens
from pithtrain import step
from pithtrain.data import IGNORED_LABEL, Batch
from pithtrain.layers.balance import Objective
from pithtrain.layers.router import Replayed
from pithtrain.models.architecture import Architecture
from pithtrain.ops.linear import Compute
from pithtrain.optim import SGD, AdamW, Optimizer
from pithtrain.parallel.mesh import Mesh, make_mesh
from pithtrain.parallel.shard import Flat
from pithtrain.parallel.transport import AllReduce, Request, Transport

ARCH = Architecture(
    vocab_size=90,
    hidden_size=20,
    num_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=28,
    moe_intermediate_size=10,
    num_experts=12,
    top_k=3,
    norm_topk_prob=True,
    sparse_layers=(True, False, True),
    tie_word_embeddings=False,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    initializer_range=0.3,
)
DEEP_TIED = replace(
    ARCH,
    hidden_size=16,
    num_layers=9,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=20,
    num_experts=6,
    top_k=2,
    sparse_layers=(True, False, True, True, False, False, True, True, True),
    tie_word_embeddings=True,
)
B, S, SEED = 16, 14, 1


@dataclass(frozen=True)
class Layout:
    """A mesh, what runs on it and how; its name as tests print it."""

    dp: int = 1
    ep: int = 1
    pp: int = 1
    execution: step.Execution = field(default_factory=step.Execution)
    arch: Architecture = ARCH

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.ep

    def make_mesh(self) -> Mesh:
        return make_mesh(pp=self.pp, dp=self.dp, ep=self.ep)

    def __str__(self) -> str:
        mesh, how = f"dp{self.dp} ep{self.ep}", self.execution
        return mesh if self.pp == 1 else f"pp{self.pp} {mesh} {how.schedule} recompute {how.recompute}"


def expert_bias(arch: Architecture) -> Tensor:
    """Small routing biases [M, E], none like its neighbours."""
    layer, expert = torch.arange(sum(arch.sparse_layers))[:, None], torch.arange(arch.num_experts)[None]
    return 0.02 * ((3 * layer + 5 * expert) % 7 - 3)


@dataclass(frozen=True)
class Case:
    """One global batch. labels: which count; padding: sequences end early; idle: every token to the first K experts."""

    objective: Objective
    num_microbatches: int = 1
    labels: bool = True
    padding: bool = False
    bias: bool = False
    idle: bool = False


@dataclass(frozen=True)
class Run:
    """Steps from the initial weights, with the routing bias moving."""

    optimizer: str
    num_microbatches: int = 1
    steps: int = 3
    lr: float = 1e-4


def global_batch(case: Case, vocab_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """tokens, labels, padding of B sequences. Early sequences ignore most labels, late ones none."""
    tokens = torch.from_numpy(synthetic_tokens(np.arange(B), S + 1, vocab_size, SEED))
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    positions, sequences = torch.arange(S)[None], torch.arange(B)[:, None]
    labels[positions < S + 1 - sequences] = IGNORED_LABEL  # the first sequences have no label at all
    if not case.labels:
        labels[:] = IGNORED_LABEL
    if not case.padding:
        return tokens, labels, None
    padding = positions >= S - (5 * sequences) % (S - 2)
    padding[6:8] = True  # sequences that stand for nothing
    labels[padding] = IGNORED_LABEL
    return tokens, labels, padding


def slices(n: int, mesh: Mesh) -> list[slice]:
    """The sequences of each of this rank's micro-batches."""
    size = B // (n * mesh.data_ranks)
    starts = [i * B // n + mesh.data_rank * size for i in range(n)]
    return [slice(start, start + size) for start in starts]


def batches(case: Case, trainee: step.Trainee) -> list[Batch]:
    tokens, labels, padding = global_batch(case, trainee.arch.vocab_size)
    parts = slices(case.num_microbatches, trainee.mesh)
    return [Batch(tokens[part], labels[part], None if padding is None else padding[part]) for part in parts]


def choices(case: Case, trainee: step.Trainee, parts: Sequence[Batch]) -> step.Choices:
    if case.idle:
        first = torch.arange(trainee.arch.top_k)
        return [[Replayed(first.repeat(part.tokens.numel(), 1))] * trainee.num_sparse_layers for part in parts]
    return step.learned(trainee, len(parts), expert_bias(trainee.arch) if case.bias else None)


def new_trainee(layout: Layout, mesh: Mesh) -> step.Trainee:
    trainee = step.build(layout.arch, mesh, Transport(), S, torch.device("cpu"), layout.execution)
    trainee.shard.initialise(SEED)
    return trainee


class Unreduced(Transport):
    """Hands back what it was to sum: many tensors are then summed in one exchange, which is what takes time here."""

    def run(self, request: Request) -> tuple[Tensor, ...]:
        assert isinstance(request, AllReduce)
        return (request.tensor,)


def whole(trainee: step.Trainee, flat: Flat) -> dict[str, Any]:
    """Every parameter's whole tensor out of the owners' slices."""
    shard = replace(trainee.shard, transport=Unreduced())
    parts = {name: shard.whole(flat, name) for name in (spec.name for spec in shard.specs)}
    bits = torch.cat([part.flatten().view(torch.int32) for part in parts.values()])
    if trainee.mesh.world_size > 1:
        dist.all_reduce(bits)  # one owner an element, zeros elsewhere
    pieces = bits.view(torch.float32).split([part.numel() for part in parts.values()])
    return {name: piece.view(part.shape).numpy() for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def chosen_ids(result: step.Gradients, n: int, trainee: step.Trainee) -> Any:
    """Expert ids of the global batch, in its order: [B, S, M, K]."""
    ids = torch.zeros(B, S, trainee.num_sparse_layers, trainee.arch.top_k, dtype=torch.int64)
    for part, rows in zip(slices(n, trainee.mesh), result.chosen, strict=True):
        assert sorted(rows) == sorted(row for stage in trainee.stages.values() for row in stage.rows)
        for row, chosen in rows.items():
            ids[part, :, row] = chosen.view(-1, S, trainee.arch.top_k)
    if trainee.mesh.world_size > 1:
        dist.all_reduce(ids)  # each sequence meets each layer on one rank; others hold zeros
    return ids.numpy()


def figures(result: step.Gradients, mesh: Mesh) -> dict[str, float]:
    """Losses and norm, which must be the same on every rank."""
    found = {name: getattr(result, name) for name in ("loss", "balance_loss", "z_loss", "norm")}
    if mesh.world_size > 1:
        ends = torch.tensor([*found.values(), *(-value for value in found.values())], dtype=torch.float64)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        assert ends[:4].tolist() == (-ends[4:]).tolist(), f"ranks report different figures: {ends}"
    return found


def smallest(value: float, mesh: Mesh) -> float:
    tensor = torch.tensor(value)
    if mesh.world_size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return float(tensor)


def any_rank(here: bool) -> bool:
    found = torch.tensor(int(here))
    dist.all_reduce(found)
    return bool(found)


def measure(case: Case, trainee: step.Trainee) -> dict[str, Any]:
    """Gradients of one global batch, from buffers that hold garbage before it."""
    for bucket in trainee.shard.buckets.values():
        bucket.grads.fill_(float("nan"))
    parts = batches(case, trainee)
    result = step.gradients(trainee, parts, case.objective, choices(case, trainee, parts), Compute())
    return {
        **figures(result, trainee.mesh),
        "square_norms": result.square_norms,
        "num_labels": result.num_labels,
        "counts": result.num_tokens_per_expert.numpy(),
        "ids": chosen_ids(result, case.num_microbatches, trainee),
        "gap": smallest(result.gap, trainee.mesh),
        "grads": whole(trainee, result.flat),
    }


def train(run: Run, trainee: step.Trainee) -> dict[str, Any]:
    optimizer: Optimizer = SGD(trainee.shard, 0.1)
    if run.optimizer == "adamw":
        optimizer = AdamW.create(trainee.shard, 0.9, 0.95, 1e-8, weight_decay=0.1)
    case, bias = Case(Objective("sequence", 0.01, 0.001), run.num_microbatches), expert_bias(trainee.arch)
    losses, gaps = [], []
    for updates in range(run.steps):
        parts = batches(case, trainee)
        update = step.train_step(
            trainee,
            optimizer,
            parts,
            case.objective,
            lr=run.lr,
            updates=updates,
            clip_norm=1.0,
            expert_bias=bias,
            bias_rate=0.001,
        )
        assert update.applied and update.expert_bias is not None
        bias = update.expert_bias
        losses.append(update.gradients.loss)
        gaps.append(smallest(update.gradients.gap, trainee.mesh))
    moments = {kind: whole(trainee, flat) for kind, flat in optimizer.state().items()}
    weights = whole(trainee, trainee.shard.masters())
    for name, weight in trainee.shard.borrowed.items():
        assert weight.value.numpy().tobytes() == weights[name].tobytes(), f"{name}: borrowed, and not as its owner's"
    return {"losses": losses, "bias": bias.numpy(), "gap": min(gaps), "weights": weights, "moments": moments}


def run_layout(layout: Layout, cases: Sequence[Case], runs: Sequence[Run]) -> dict[str, Any] | None:
    """Every case and run on this rank of a world; each from fresh weights. The results, on rank 0."""
    torch.set_deterministic_debug_mode("error")
    mesh = layout.make_mesh()
    trainee = new_trainee(layout, mesh)
    results: dict[str, Any] = {"initial": whole(trainee, trainee.shard.masters())}
    results["cases"] = {case: measure(case, trainee) for case in cases}
    results["again"] = measure(cases[0], trainee)
    results["runs"] = {run: train(run, new_trainee(layout, mesh)) for run in runs}
    results["run again"] = train(runs[0], new_trainee(layout, mesh))
    results["borrowed"] = mesh.world_size > 1 and any_rank(bool(trainee.shard.borrowed))
    return results if mesh.rank == 0 else None
