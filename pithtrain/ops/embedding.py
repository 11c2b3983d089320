"""The embedding table's lookup, its gradient added up in token order."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pithtrain.ops.parameter import Weight


def add_rows(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
    """buffer[index[t]] += rows[t] for every t, in a fixed order: CPU goes one by one, CUDA sorts. Never atomics."""
    if buffer.is_cuda:
        buffer.index_put_((index,), rows, accumulate=True)
    else:
        buffer.index_add_(0, index, rows)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, weight: Weight) -> Tensor:
        ctx.tokens, ctx.weight = tokens, weight
        return weight.value.index_select(0, tokens.flatten()).view(*tokens.shape, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        rows = grad.reshape(-1, grad.shape[-1]).to(ctx.weight.grad.dtype)
        add_rows(ctx.weight.grad, ctx.tokens.flatten(), rows)
        return None, None, None


def embedding(tokens: Tensor, weight: Weight) -> Tensor:
    """tokens [..] int64 through weight [V, D] -> [.., D]. The gradient adds to `weight.grad`."""
    hidden: Tensor = _Embedding.apply(torch.empty(0, requires_grad=True), tokens, weight)
    return hidden
