"""Triton kernels of SwiGLU, forward and backward: arithmetic in fp32, one rounding to the output's dtype."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

SWIGLU = {"ROWS": 8, "TILE": 256, "num_warps": 8, "num_stages": 1}


@triton.jit
def _tile(num_rows, features, ROWS: tl.constexpr, TILE: tl.constexpr):
    """This program's rows and features, and which of them exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    feature = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    return row, feature, (row < num_rows) & (feature < features)


@triton.jit
def _clamp(gate, up, limit):
    """By comparison, since tl.minimum would turn NaN into the limit."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def swiglu_kernel(gate_up, output, num_rows, features, alpha, limit, shift, ROWS: tl.constexpr, TILE: tl.constexpr):
    row, feature, mask = _tile(num_rows, features, ROWS, TILE)
    at = gate_up + row * 2 * features + feature
    gate, up = _clamp(tl.load(at, mask).to(tl.float32), tl.load(at + features, mask).to(tl.float32), limit)
    result = gate * tl.sigmoid(alpha * gate) * (up + shift)
    tl.store(output + row * features + feature, result.to(output.dtype.element_ty), mask)


@triton.jit
def swiglu_backward_kernel(
    gate_up, grad, grad_gate_up, num_rows, features, alpha, limit, shift, ROWS: tl.constexpr, TILE: tl.constexpr
):
    row, feature, mask = _tile(num_rows, features, ROWS, TILE)
    at = row * 2 * features + feature
    kind: tl.constexpr = grad_gate_up.dtype.element_ty
    raw_gate, raw_up = tl.load(gate_up + at, mask).to(tl.float32), tl.load(gate_up + at + features, mask).to(tl.float32)
    upstream = tl.load(grad + row * features + feature, mask).to(tl.float32)
    gate, up = _clamp(raw_gate, raw_up, limit)
    sigmoid = tl.sigmoid(alpha * gate)
    grad_gate = upstream * (up + shift) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    tl.store(grad_gate_up + at, tl.where(raw_gate > limit, 0.0, grad_gate).to(kind), mask)
    grad_up = tl.where((raw_up > limit) | (raw_up < -limit), 0.0, upstream * gate * sigmoid)
    tl.store(grad_gate_up + at + features, grad_up.to(kind), mask)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, alpha: float, limit: float, shift: float) -> Tensor:
        gate_up, features = gate_up.contiguous(), gate_up.shape[-1] // 2
        ctx.save_for_backward(gate_up)
        output = gate_up.new_empty(*gate_up.shape[:-1], features)
        ctx.scalars = output.numel() // features, features, alpha, limit, shift
        if output.numel():
            swiglu_kernel[_grid(output)](gate_up, output, *ctx.scalars, **SWIGLU)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gate_up,), grad = ctx.saved_tensors, grad.contiguous()
        grad_gate_up = torch.empty_like(gate_up)
        if grad.numel():
            swiglu_backward_kernel[_grid(grad)](gate_up, grad, grad_gate_up, *ctx.scalars, **SWIGLU)
        return grad_gate_up, None, None, None


def _grid(output: Tensor) -> tuple[int, int]:
    features = output.shape[-1]
    return triton.cdiv(output.numel() // features, SWIGLU["ROWS"]), triton.cdiv(features, SWIGLU["TILE"])


def swiglu_triton(gate_up: Tensor, alpha: float = 1.0, limit: float = math.inf, shift: float = 0.0) -> Tensor:
    """`swiglu`; with shift 1, `clamped_swiglu`."""
    output: Tensor = _SwiGLU.apply(gate_up, alpha, limit, shift)
    return output
