"""Causal grouped-query attention with normed queries and keys (Qwen3's).

B sequences, S positions, D hidden, H query heads, G key/value heads.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops.linear import Compute, linear
from pithtrain.ops.parameter import Weight
from pithtrain.ops.rms_norm import rms_norm
from pithtrain.ops.rope import rope


@dataclass(frozen=True, eq=False)
class Attention:
    """qkv: [(H + 2G) * head_dim, D], queries first, then keys, then values. o: [D, H * head_dim]."""

    qkv: Weight
    o: Weight
    q_norm: Weight
    k_norm: Weight
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    eps: float

    def __call__(self, hidden_states: Tensor, tables: tuple[Tensor, Tensor], compute: Compute) -> Tensor:
        """hidden_states [B, S, D] -> [B, S, D]; tables are RoPE's cos and sin, [S, head_dim / 2]."""
        batch, length, _ = hidden_states.shape
        qkv = linear(hidden_states, self.qkv, compute).view(batch, length, -1, self.head_dim)
        groups = self.num_key_value_heads
        query, key, value = qkv.split([self.num_heads, groups, groups], dim=2)
        query = rope(rms_norm(query, self.q_norm, self.eps), *tables)
        key = rope(rms_norm(key, self.k_norm, self.eps), *tables)
        context = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=groups != self.num_heads,
        )
        return linear(context.transpose(1, 2).reshape(batch, length, -1), self.o, compute)
