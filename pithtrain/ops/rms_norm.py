"""RMSNorm (arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

Written out in both directions because torch's backward takes ten times its forward on CPU. In fp32 whatever the dtype
of its input, which its output has again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pithtrain.ops.parameter import Weight
from pithtrain.ops.wide import wide


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, eps: float) -> Tensor:
        values = wide(x)
        scale = torch.linalg.vecdot(values, values).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        normed: Tensor = values * scale
        return normed.mul_(weight.value).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        normed, grad = wide(x) * scale, wide(grad)
        flat_grad, flat_normed = grad.reshape(-1, grad.shape[-1]), normed.reshape(-1, x.shape[-1])
        ctx.weight.grad.add_((flat_grad * flat_normed).sum(0))
        grad_normed = grad * ctx.weight.value
        along = torch.linalg.vecdot(grad_normed, normed).div_(-x.shape[-1]).unsqueeze(-1)
        return grad_normed.addcmul_(normed, along).mul_(scale).to(x.dtype), None, None


def rms_norm(x: Tensor, weight: Weight, eps: float) -> Tensor:
    """x [.., D], weight [D] fp32 -> [.., D]. The weight's gradient adds to `weight.grad`."""
    output: Tensor = _RMSNorm.apply(x, weight, eps)
    return output
