"""A decoder in stages of consecutive layers, each layer a list of segments.

A segment is compute between exchanges, named as profiles, timelines and skills speak of it. A sparse layer is
attention, (dispatch), experts, (combine), aggregate; a dense one is attention alone. Segments take and return tensors
and never communicate. B sequences, S positions, T = B * S tokens, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pithtrain.layers.attention import Attention
from pithtrain.layers.experts.build import expert_class
from pithtrain.layers.mlp import DenseMLP
from pithtrain.layers.moe import LocalExperts, measure_load
from pithtrain.layers.router import Choice, Router
from pithtrain.models.architecture import Architecture, expert_shapes
from pithtrain.ops.embedding import embedding
from pithtrain.ops.linear import Compute
from pithtrain.ops.parameter import Weight
from pithtrain.ops.permute import Permutation, unpermute
from pithtrain.ops.rms_norm import rms_norm

Tables = tuple[Tensor, Tensor]


class Attended(NamedTuple):
    """What a sparse layer's attention gives: what the exchanges carry, then what losses and records need."""

    residual: Tensor  # [B, S, D]
    x: Tensor  # [T, D]
    topk_weights: Tensor  # [T, K]
    topk_expert_ids: Tensor  # [T, K]
    prob_sum: Tensor  # [B, E]
    z_sum: Tensor  # []
    num_tokens_per_expert: Tensor  # [B, E]
    gap: Tensor  # []


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """Attention and a dense feed-forward layer, one segment."""

    name: str
    attention_norm: Weight
    attention: Attention
    mlp_norm: Weight
    mlp: DenseMLP
    eps: float

    def attend(self, hidden_states: Tensor, tables: Tables, compute: Compute) -> tuple[Tensor]:
        """[B, S, D] -> [B, S, D]."""
        normed = rms_norm(hidden_states, self.attention_norm, self.eps)
        hidden_states = hidden_states + self.attention(normed, tables, compute)
        normed = rms_norm(hidden_states, self.mlp_norm, self.eps)
        return (hidden_states + self.mlp(normed, compute),)


@dataclass(frozen=True, eq=False)
class SparseLayer:
    """Attention and a mixture of experts, cut where tokens cross ranks. row: its place among the sparse layers."""

    name: str
    row: int
    attention_norm: Weight
    attention: Attention
    mlp_norm: Weight
    router: Router
    experts: LocalExperts
    eps: float

    def attend(
        self, hidden_states: Tensor, tables: Tables, choice: Choice, padding: Tensor | None, compute: Compute
    ) -> Attended:
        """The attention segment, on hidden_states [B, S, D]."""
        batch, length, hidden = hidden_states.shape
        normed = rms_norm(hidden_states, self.attention_norm, self.eps)
        residual = hidden_states + self.attention(normed, tables, compute)
        x = rms_norm(residual, self.mlp_norm, self.eps).view(-1, hidden)
        routing = self.router(x, length, choice, compute)
        load = measure_load(routing, batch, padding)
        gap = self.router.gap(routing.probs.detach(), choice)
        weights, ids = routing.topk_weights, routing.topk_expert_ids
        return Attended(residual, x, weights, ids, load.prob_sum, load.z_sum, load.num_tokens_per_expert, gap)

    def compute_experts(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, sizes: tuple[int, ...], compute: Compute
    ) -> tuple[Tensor]:
        """The experts segment, on the rows received: see LocalExperts."""
        return (self.experts(x, weights, expert_ids, sizes, compute),)

    def aggregate(self, residual: Tensor, rows: Tensor, sent: Permutation | None) -> tuple[Tensor]:
        """residual [B, S, D] plus each token's rows, summed in rank order; sent None: rows are the tokens."""
        tokens = rows if sent is None else unpermute(rows, sent)
        return (residual + tokens.view_as(residual),)


Layer = DenseLayer | SparseLayer


@dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive layers of the model on one rank: its experts, everything else in full.

    embedding: None but in the first stage. norm, head: None but in the last. One stage may be the whole model.
    """

    arch: Architecture
    embedding: Weight | None
    layers: tuple[Layer, ...]
    norm: Weight | None
    head: Weight | None

    @property
    def rows(self) -> list[int]:
        """The stage's sparse layers, by their place among the model's."""
        return [layer.row for layer in self.layers if isinstance(layer, SparseLayer)]

    def embed(self, tokens: Tensor) -> tuple[Tensor]:
        """tokens [B, S] int64 -> [B, S, D]."""
        assert self.embedding is not None
        return (embedding(tokens, self.embedding),)

    def final_norm(self, hidden_states: Tensor) -> tuple[Tensor]:
        """[B, S, D] -> [T, D], what the head reads."""
        assert self.norm is not None
        normed = rms_norm(hidden_states, self.norm, self.arch.rms_norm_eps)
        return (normed.view(-1, self.arch.hidden_size),)


def build_stage(arch: Architecture, weights: Mapping[str, Weight], layers: range, num_local_experts: int) -> Stage:
    """weights by our global names; expert weights hold this rank's experts only."""
    first, last = layers.start == 0, layers.stop == arch.num_layers
    return Stage(
        arch,
        embedding=weights["embedding"] if first else None,
        layers=tuple(_build_layer(arch, weights, index, num_local_experts) for index in layers),
        norm=weights["norm"] if last else None,
        head=weights["embedding" if arch.tie_word_embeddings else "head"] if last else None,
    )


def _build_layer(arch: Architecture, weights: Mapping[str, Weight], index: int, num_local_experts: int) -> Layer:
    name, eps = f"layers.{index}", arch.rms_norm_eps
    attention = Attention(
        qkv=weights[f"{name}.attention.qkv"],
        o=weights[f"{name}.attention.o"],
        q_norm=weights[f"{name}.attention.q_norm"],
        k_norm=weights[f"{name}.attention.k_norm"],
        num_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        eps=eps,
    )
    attention_norm, mlp_norm = weights[f"{name}.attention_norm"], weights[f"{name}.mlp_norm"]
    if not arch.sparse_layers[index]:
        mlp = DenseMLP(weights[f"{name}.mlp.gate_up"], weights[f"{name}.mlp.down"])
        return DenseLayer(name, attention_norm, attention, mlp_norm, mlp, eps)
    router = Router(weights[f"{name}.router"], arch.top_k, arch.norm_topk_prob)
    own = {part: weights[f"{name}.experts.{part}"] for part in expert_shapes(arch)}
    local = LocalExperts(expert_class(arch.expert_type)(**own), num_local_experts)
    row = sum(arch.sparse_layers[:index])
    return SparseLayer(name, row, attention_norm, attention, mlp_norm, router, local, eps)
