"""Every product of the trainer: dense and grouped linear maps, each in three parts.

The three parts are the forward product, the input gradient and the weight gradient. The weight gradient never
travels through autograd: it is added to the weight's fp32 buffer at once, or queued for later when the caller's
`Compute` holds a queue (zero-bubble schedules fill their gaps with it). Every product adds up in fp32.

T tokens, N copies (tokens times chosen experts), L local experts, I input features, O output features.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pithtrain.ops.fp8 import Quantised, RowBlocks, quantise, quantise_weight
from pithtrain.ops.fp8_gemm import add_weight_gradient, multiply
from pithtrain.ops.parameter import Weight
from pithtrain.ops.wide import wide

Precision = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True, eq=False)
class Compute:
    """How a product is computed: its precision, and where a weight gradient goes (None: into its buffer at once).

    quantised: FP8 copies of weights, made at their first use and good until the weights change: one Compute a step.
    blocks: of dense products, by their number of rows.
    """

    precision: Precision = "fp32"
    deferred: list[Callable[[], None]] | None = None
    quantised: dict[Weight, tuple[Quantised, Quantised]] = field(default_factory=dict)
    blocks: dict[int, RowBlocks] = field(default_factory=dict)

    def uses_fp8(self, weight: Weight) -> bool:
        """Whether products with this weight are in FP8: not those of weights that are fp32 whatever the precision."""
        return self.precision == "fp8" and weight.value.dtype != torch.float32

    def quantise(self, weight: Weight) -> tuple[Quantised, Quantised]:
        """The weight [O, I] or [L, O, I] and its transpose in FP8, as [L, ..]."""
        if weight not in self.quantised:
            self.quantised[weight] = quantise_weight(_matrices(weight.value))
        return self.quantised[weight]

    def one_group(self, rows: Tensor) -> RowBlocks:
        """The blocks of rows [M, I] that are one group."""
        if rows.shape[0] not in self.blocks:
            self.blocks[rows.shape[0]] = RowBlocks.of((rows.shape[0],), rows.device)
        return self.blocks[rows.shape[0]]

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


def dtype_of(precision: Precision) -> torch.dtype:
    """What hidden states and the weights of products are stored in."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def product(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """left [M, K] @ right [K, N], added up in fp32, in `dtype` (None: that of left). bf16 on CPU is multiplied in fp32,
    which is the same up to the order of summation and many times faster there than torch's own.
    """
    dtype = dtype or left.dtype
    if left.dtype == dtype and (left.is_cuda or dtype == torch.float32):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left.float() @ right.float()).to(dtype)


def add_product(buffer: Tensor, left: Tensor, right: Tensor) -> None:
    """buffer [M, N] fp32 += left [M, K] @ right [K, N]."""
    if left.dtype == torch.float32:
        buffer.addmm_(left, right)
    else:
        buffer.add_(product(left, right, torch.float32))


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows sorted by group: `sizes` on the host, `ends` (int32, [L]) their running sum on the device, FP8's blocks."""

    sizes: tuple[int, ...]
    ends: Tensor
    blocks: RowBlocks | None

    @staticmethod
    def of(sizes: tuple[int, ...], device: torch.device, compute: Compute) -> "Groups":
        ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
        blocks = RowBlocks.of(sizes, device) if compute.precision == "fp8" else None
        return Groups(sizes, ends.to(device, non_blocking=True), blocks)


def _matrices(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 3 else tensor[None]


class _FP8Linear(Function):
    """A dense product is one group. What is kept of x for the weight gradient is in FP8 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, blocks: RowBlocks, compute: Compute) -> Tensor:
        rows, columns = quantise(x, blocks, columns=ctx.needs_input_grad[0])
        ctx.save_for_backward(*columns)
        ctx.weight, ctx.blocks, ctx.compute = weight, blocks, compute
        return multiply(rows, compute.quantise(weight)[0], blocks, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight, blocks, compute = ctx.weight, ctx.blocks, ctx.compute
        kept = Quantised(*(tensor.detach() for tensor in ctx.saved_tensors))
        rows, columns = quantise(grad.contiguous(), blocks)
        compute.weight_gradient(lambda: add_weight_gradient(_matrices(weight.grad), columns, kept, blocks))
        return multiply(rows, compute.quantise(weight)[1], blocks, grad.dtype), None, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, compute: Compute) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.compute = weight, compute
        return product(x.flatten(0, -2), weight.value.T).view(*x.shape[:-1], weight.value.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors[0].detach(), ctx.weight  # a queued closure must not keep the graph alive
        ctx.compute.weight_gradient(lambda: add_linear_weight_gradient(weight, x, grad))
        return product(grad.flatten(0, -2), weight.value).view(x.shape), None, None


def linear(x: Tensor, weight: Weight, compute: Compute) -> Tensor:
    """x [.., I] times weight [O, I] transposed: [.., O]. The weight's gradient adds to `weight.grad`."""
    output: Tensor
    if compute.uses_fp8(weight):
        rows = x.flatten(0, -2)
        output = _FP8Linear.apply(rows, weight, compute.one_group(rows), compute)
        return output.view(*x.shape[:-1], weight.value.shape[0])
    output = _Linear.apply(x, weight, compute)
    return output


def add_linear_weight_gradient(weight: Weight, x: Tensor, grad: Tensor) -> None:
    """Adds grad.T @ x to the buffer of weight [O, I]; x [.., I], grad [.., O]."""
    add_product(weight.grad, grad.reshape(-1, grad.shape[-1]).T, x.reshape(-1, x.shape[-1]))


def grouped_mm_is_faster(x: Tensor) -> bool:
    """Whether torch's grouped kernel beats a loop: on CUDA in bf16. On CPU it is itself a loop, and a slower one."""
    return x.is_cuda and x.dtype == torch.bfloat16


def multiply_by_loop(x: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """x [N, I] sorted by group, value [L, O, I]: [N, O], one product a group; empty groups cost nothing."""
    output = x.new_empty(x.shape[0], value.shape[1])
    rows, outs = x.split(groups.sizes), output.split(groups.sizes)
    for row, out, matrix in zip(rows, outs, value.unbind(0), strict=True):
        if row.shape[0] and x.dtype == torch.float32:
            torch.mm(row, matrix.T, out=out)
        elif row.shape[0]:
            out.copy_(product(row, matrix.T))
    return output


def multiply_by_grouped_mm(x: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """The same product by torch's grouped kernel."""
    return F.grouped_mm(x, value.transpose(-2, -1), offs=groups.ends)


def add_grouped_weight_gradient(weight: Weight, x: Tensor, grad: Tensor, groups: Groups) -> None:
    """Adds each group's grad.T @ x to its slice of weight [L, O, I]; x [N, I], grad [N, O]. By a loop on every device:
    torch's grouped kernel would round a micro-batch's gradient to bf16 before it is added.
    """
    parts = zip(weight.grad.unbind(0), x.split(groups.sizes), grad.split(groups.sizes), strict=True)
    for slot, rows, grads in parts:
        if rows.shape[0]:
            add_product(slot, grads.T, rows)


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
    output: Tensor
    if groups.blocks is not None and compute.uses_fp8(weight):
        output = _FP8Linear.apply(x, weight, groups.blocks, compute)
    else:
        output = _GroupedLinear.apply(x, weight, groups, compute)
    return output


class _GroupedVector(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Weight, groups: Groups, compute: Compute) -> Tensor:
        ctx.weight, ctx.groups, ctx.compute = weight, groups, compute
        sizes = groups.ends.diff(prepend=groups.ends.new_zeros(1))
        return wide(weight.value).repeat_interleave(sizes, dim=0, output_size=sum(groups.sizes))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        weight, groups = ctx.weight, ctx.groups
        ctx.compute.weight_gradient(lambda: add_group_sums(weight.grad, grad, groups))
        return None, None, None, None


def add_group_sums(buffer: Tensor, grad: Tensor, groups: Groups) -> None:
    """Adds the sum of each group's rows of grad [N, O], in fp32, to its row of buffer [L, O]."""
    for slot, rows in zip(buffer.unbind(0), grad.split(groups.sizes), strict=True):
        slot.add_(rows.sum(0))


def grouped_vector(weight: Weight, groups: Groups, compute: Compute) -> Tensor:
    """Each row its group's vector of weight [L, O]: [N, O] fp32. The weight's gradient adds to `weight.grad`."""
    rows: Tensor = _GroupedVector.apply(torch.empty(0, requires_grad=True), weight, groups, compute)
    return rows
