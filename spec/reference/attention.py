"""Causal grouped-query attention with RMSNorm on queries and keys, written out."""

import torch
from torch import Tensor

from spec.reference.norm import rms_norm
from spec.reference.rope import apply_rope, rope_tables


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention in which a position sees itself and earlier ones, and query head h reads
    key-value head ``h // (H / KV)``.

    q [b, S, H, head_dim]; k, v [b, S, KV, head_dim] -> [b, S, H, head_dim].
    Source: arXiv 1706.03762, section 3.2.1; grouping arXiv 2305.13245, section 2.2.
    """
    seq_len, num_heads, head_dim = q.shape[1:]
    group = num_heads // k.shape[2]
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    heads = []
    for h in range(num_heads):
        scores = q[:, :, h] @ k[:, :, h // group].transpose(1, 2) / head_dim**0.5
        scores = scores.masked_fill(~causal, float("-inf"))
        heads.append(scores.softmax(dim=-1) @ v[:, :, h // group])
    return torch.stack(heads, dim=2)


def attention(
    hidden_states: Tensor,
    qkv: Tensor,
    o: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    num_attention_heads: int,
    num_key_value_heads: int,
    rope_theta: float,
    rms_norm_eps: float,
) -> Tensor:
    """The whole attention block: project, norm each head of q and k, rotate, attend, project back.

    hidden_states [b, S, D]; qkv [(H + 2 KV) head_dim, D]; o [D, H head_dim]; q_norm, k_norm [head_dim] or
    None -> [b, S, D]. Positions are 0..S-1. Source: transformers, ``Qwen3MoeAttention``.
    """
    batch, seq_len = hidden_states.shape[:2]
    head_dim = o.shape[1] // num_attention_heads
    kv_dim = num_key_value_heads * head_dim
    projected = hidden_states @ qkv.T
    q, k, v = torch.split(projected, [num_attention_heads * head_dim, kv_dim, kv_dim], dim=-1)
    q = q.reshape(batch, seq_len, num_attention_heads, head_dim)
    k = k.reshape(batch, seq_len, num_key_value_heads, head_dim)
    v = v.reshape(batch, seq_len, num_key_value_heads, head_dim)
    if q_norm is not None:
        q = rms_norm(q, q_norm, rms_norm_eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, rms_norm_eps)
    cos, sin = rope_tables(torch.arange(seq_len), head_dim, rope_theta)
    context = causal_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
    return context.reshape(batch, seq_len, num_attention_heads * head_dim) @ o.T
