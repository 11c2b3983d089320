"""Triton kernels of SwiGLU, forward and backward, a part of one row a program. In fp32, rounded once at the end."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

SWIGLU = {"TILE": 1024, "num_warps": 4, "num_stages": 1}


@triton.jit
def _clamp(gate, up, limit):
    """By comparison, since tl.minimum would turn NaN into the limit."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def swiglu_kernel(gate_up, output, features, alpha, limit, shift, TILE: tl.constexpr):
    row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    at, known = gate_up + row * 2 * features + feature, feature < features
    gate, up = _clamp(tl.load(at, known).to(tl.float32), tl.load(at + features, known).to(tl.float32), limit)
    result = gate * tl.sigmoid(alpha * gate) * (up + shift)
    tl.store(output + row * features + feature, result.to(output.dtype.element_ty), known)


@triton.jit
def swiglu_backward_kernel(gate_up, grad, grad_gate_up, features, alpha, limit, shift, TILE: tl.constexpr):
    row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    at, known = row * 2 * features + feature, feature < features
    gate, up = tl.load(gate_up + at, known).to(tl.float32), tl.load(gate_up + at + features, known).to(tl.float32)
    upstream = tl.load(grad + row * features + feature, known).to(tl.float32)
    upstream_gate = tl.where(gate > limit, 0.0, upstream)
    upstream_up = tl.where((up > limit) | (up < -limit), 0.0, upstream)
    gate, up = _clamp(gate, up, limit)
    sigmoid = tl.sigmoid(alpha * gate)
    grad_gate = upstream_gate * (up + shift) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    tl.store(grad_gate_up + at, grad_gate.to(grad_gate_up.dtype.element_ty), known)
    grad_up = upstream_up * gate * sigmoid
    tl.store(grad_gate_up + at + features, grad_up.to(grad_gate_up.dtype.element_ty), known)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, alpha: float, limit: float, shift: float) -> Tensor:
        gate_up, features = gate_up.contiguous(), gate_up.shape[-1] // 2
        ctx.save_for_backward(gate_up)
        output = gate_up.new_empty(*gate_up.shape[:-1], features)
        ctx.grid = output.numel() // features, triton.cdiv(features, SWIGLU["TILE"])
        ctx.scalars = features, alpha, limit, shift
        swiglu_kernel[ctx.grid](gate_up, output, *ctx.scalars, **SWIGLU)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        swiglu_backward_kernel[ctx.grid](gate_up, grad.contiguous(), grad_gate_up, *ctx.scalars, **SWIGLU)
        return grad_gate_up, None, None, None


def swiglu_triton(gate_up: Tensor, alpha: float = 1.0, limit: float = math.inf, shift: float = 0.0) -> Tensor:
    """`swiglu`; with shift 1, `clamped_swiglu`."""
    output: Tensor = _SwiGLU.apply(gate_up, alpha, limit, shift)
    return output
