"""Rotary position embedding in the half-rotation form of the Hugging Face models."""

import torch
from torch import Tensor


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``position * theta ** (-2 i / head_dim)`` for i in [0, head_dim / 2), laid out
    twice.

    positions [S] int64 -> cos [S, head_dim], sin [S, head_dim]. Source: arXiv 2104.09864, section 3.2.2.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions.to(torch.float64)[:, None] * theta ** (-exponents)[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pair (x[i], x[i + head_dim / 2]) of each head by the angle of its position.

    x [..., S, H, head_dim]; cos, sin [S, head_dim] -> as x. Source: transformers, Qwen3
    ``apply_rotary_pos_emb``.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return x * cos[:, None, :] + rotated * sin[:, None, :]
