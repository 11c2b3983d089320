"""Every product of the trainer: dense and grouped linear maps, each in three parts.

The three parts are the forward product, the input gradient and the weight gradient. The weight gradient never
travels through autograd: it is added to the weight's fp32 buffer at once, or queued for later when the caller's
`Compute` holds a queue (zero-bubble schedules fill their gaps with it).

T tokens, N copies (tokens times chosen experts), L local experts, I input features, O output features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pithtrain.ops.parameter import Weight

Precision = Literal["fp32"]


@dataclass(frozen=True, eq=False)
class Compute:
    """How a product is computed: its precision, and where a weight gradient goes (None: into its buffer at once)."""

    precision: Precision = "fp32"
    deferred: list[Callable[[], None]] | None = None

    def weight_gradient(self, add: Callable[[], None]) -> None:
        """Runs `add`, which adds a weight gradient to its buffer, now or when the queue is drained."""
        if self.deferred is None:
            add()
        else:
            self.deferred.append(add)

    def drain(self) -> None:
        """Runs what is queued, in order, and empties the queue."""
        for add in self.deferred or ():
            add()
        if self.deferred:
            self.deferred.clear()


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows sorted by group: `sizes` on the host, `ends` (int32, [L]) their running sum on the device."""

    sizes: tuple[int, ...]
    ends: Tensor

    @staticmethod
    def of(sizes: tuple[int, ...], device: torch.device) -> "Groups":
        ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
        return Groups(sizes, ends.to(device, non_blocking=True))


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, compute: Compute) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.compute = weight, compute
        return F.linear(x, weight.value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors[0].detach(), ctx.weight  # a queued closure must not keep the graph alive
        ctx.compute.weight_gradient(lambda: add_linear_weight_gradient(weight, x, grad))
        return grad @ weight.value, None, None


def linear(x: Tensor, weight: Weight, compute: Compute) -> Tensor:
    """x [.., I] times weight [O, I] transposed: [.., O]. The weight's gradient adds to `weight.grad`."""
    output: Tensor = _Linear.apply(x, weight, compute)
    return output


def add_linear_weight_gradient(weight: Weight, x: Tensor, grad: Tensor) -> None:
    """Adds grad.T @ x to the buffer of weight [O, I]; x [.., I], grad [.., O]."""
    weight.grad.addmm_(grad.reshape(-1, grad.shape[-1]).T, x.reshape(-1, x.shape[-1]))


def grouped_mm_is_faster(x: Tensor) -> bool:
    """Whether torch's grouped kernel beats a loop: on CUDA in bf16. On CPU it is itself a loop, and a slower one."""
    return x.is_cuda and x.dtype == torch.bfloat16


def multiply_by_loop(x: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """x [N, I] sorted by group, value [L, O, I]: [N, O], one product a group; empty groups cost nothing."""
    output = x.new_empty(x.shape[0], value.shape[1])
    rows, outs = x.split(groups.sizes), output.split(groups.sizes)
    for row, out, matrix in zip(rows, outs, value.unbind(0), strict=True):
        if row.shape[0]:
            torch.mm(row, matrix.T, out=out)
    return output


def multiply_by_grouped_mm(x: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """The same product by torch's grouped kernel."""
    return F.grouped_mm(x, value.transpose(-2, -1), offs=groups.ends)


def add_weight_gradient_by_loop(buffer: Tensor, x: Tensor, grad: Tensor, groups: Groups) -> None:
    """Adds each group's grad.T @ x to its slice of buffer [L, O, I]."""
    parts = zip(buffer.unbind(0), x.split(groups.sizes), grad.split(groups.sizes), strict=True)
    for slot, rows, grads in parts:
        if rows.shape[0]:
            slot.addmm_(grads.T, rows)


def add_weight_gradient_by_grouped_mm(buffer: Tensor, x: Tensor, grad: Tensor, groups: Groups) -> None:
    """The same by torch's grouped kernel. It zeroes the slices of empty groups itself."""
    buffer.add_(F.grouped_mm(grad.T, x, offs=groups.ends))


def add_grouped_weight_gradient(weight: Weight, x: Tensor, grad: Tensor, groups: Groups) -> None:
    """Adds every group's weight gradient to the buffer of weight [L, O, I]; x [N, I], grad [N, O]."""
    if grouped_mm_is_faster(x):
        add_weight_gradient_by_grouped_mm(weight.grad, x, grad, groups)
    else:
        add_weight_gradient_by_loop(weight.grad, x, grad, groups)


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, groups: Groups, compute: Compute) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.groups, ctx.compute = weight, groups, compute
        multiply = multiply_by_grouped_mm if grouped_mm_is_faster(x) else multiply_by_loop
        return multiply(x, weight.value, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight, groups = ctx.saved_tensors[0].detach(), ctx.weight, ctx.groups
        grad = grad.contiguous()
        ctx.compute.weight_gradient(lambda: add_grouped_weight_gradient(weight, x, grad, groups))
        multiply = multiply_by_grouped_mm if grouped_mm_is_faster(grad) else multiply_by_loop
        return multiply(grad, weight.value.transpose(-2, -1), groups), None, None, None


def grouped_linear(x: Tensor, weight: Weight, groups: Groups, compute: Compute) -> Tensor:
    """x [N, I] sorted by group times each group's weight [L, O, I] transposed: [N, O].

    Every row belongs to a group: sum(groups.sizes) == N. A group without rows leaves its gradient as it was (zero).
    """
    assert sum(groups.sizes) == x.shape[0], f"groups hold {sum(groups.sizes)} rows, got {x.shape[0]}"
    output: Tensor = _GroupedLinear.apply(x, weight, groups, compute)
    return output
