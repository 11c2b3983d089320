"""Rotary position embedding (arXiv 2104.09864), the half-rotation form: dimension i pairs with i + head_dim / 2."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pithtrain.ops.wide import wide


def rope_tables(num_positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [S, head_dim / 2] fp32, computed in fp64: angle = position / theta^(2i / head_dim)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), theta**-exponents)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x [B, S, H, head_dim] turned by the tables' angles (sign 1) or back (sign -1), computed in fp32."""
    values = wide(x)
    first, second = values.chunk(2, dim=-1)
    turned = torch.empty_like(values)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=sign)
    return turned.to(x.dtype)


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, sin, -1), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, head_dim], tables [S, head_dim / 2] -> x rotated by its position."""
    output: Tensor = _Rope.apply(x, cos, sin)
    return output
