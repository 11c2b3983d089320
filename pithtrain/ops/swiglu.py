"""SwiGLU over a fused product: silu(gate) * up (arXiv 2002.05202).

Only the product's output is kept for the backward pass; silu is computed again there. In fp32 whatever the dtype of the
input, which the output has again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pithtrain.ops.kernels import use_triton
from pithtrain.ops.wide import wide


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = wide(gate_up).chunk(2, dim=-1)
        return F.silu(gate).mul_(up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        values, grad = wide(gate_up), wide(grad)
        gate, up = values.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(values)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up.to(gate_up.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [.., 2F], gate first -> silu(gate) * up, [.., F], in the input's dtype."""
    if use_triton(gate_up):
        from pithtrain.ops.kernels.swiglu import swiglu_triton

        return swiglu_triton(gate_up)
    output: Tensor = _SwiGLU.apply(gate_up)
    return output


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate_up [.., 2F], gate first -> (up + 1) * gate * sigmoid(alpha * gate), [.., F], in the input's dtype.

    The gate is at most `limit`, up within +-limit, without gradient beyond (transformers, `GptOssExperts`).
    """
    if use_triton(gate_up):
        from pithtrain.ops.kernels.swiglu import swiglu_triton

        return swiglu_triton(gate_up, alpha, limit, 1.0)
    gate, up = wide(gate_up).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)
