"""Rows to slots and back: the one data movement behind expert grouping and rank dispatch.

Every row names up to K slots (experts, or ranks); -1 names none. `permute` copies a row once for each slot it names,
sorted by slot and stable in row order; `unpermute` sums a row's copies again, weighted or not, in the order of its K
entries. Each is the other's transpose, so each is the other's gradient. No atomics: the sum reads, it never scatters.

Sums are taken in fp32 whatever the dtype of the rows, which the result has again.

R rows, K entries a row, N copies (entries that are not -1), D features.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pithtrain.ops.kernels import use_triton
from pithtrain.ops.wide import wide


@dataclass(frozen=True, eq=False)
class Permutation:
    """Where copies come from and go to. All int64 on the rows' device.

    entries [N]: for each copy, the flat index (row * K + k) of the entry that asked for it.
    rows [N]: for each copy, its row.
    copies [N]: the copies again, listed row by row.
    starts [R]: where each row's copies start in `copies`.
    """

    entries: Tensor
    rows: Tensor
    copies: Tensor
    starts: Tensor


def plan(slots: Tensor, num_slots: int, num_copies: int) -> Permutation:
    """slots [R, K] int64 with -1 for none; num_copies N is known to the host, so nothing waits for the device."""
    flat = slots.flatten()
    key = torch.where(flat < 0, num_slots, flat)
    entries = torch.argsort(key, stable=True)[:num_copies]
    copies = torch.argsort(entries)  # entries ascend row by row, so this lists copies row by row
    per_row = (slots >= 0).sum(1)
    return Permutation(entries, entries // slots.shape[1], copies, per_row.cumsum(0) - per_row)


def gather_rows(x: Tensor, plan: Permutation) -> Tensor:
    """x [R, D] -> copies [N, D]."""
    return x.index_select(0, plan.rows)


def sum_copies(copies: Tensor, plan: Permutation, weights: Tensor | None = None) -> Tensor:
    """copies [N, D] -> rows [R, D]: each row the sum of its copies, times weights [N] where given; none gives 0."""
    if use_triton(copies):
        from pithtrain.ops.kernels.permute import sum_copies_triton

        return sum_copies_triton(copies, plan, weights)
    if copies.shape[0] == 0:
        return copies.new_zeros(plan.starts.shape[0], copies.shape[1])
    per_sample = None if weights is None else weights.index_select(0, plan.copies)
    summed = F.embedding_bag(plan.copies, wide(copies), plan.starts, mode="sum", per_sample_weights=per_sample)
    return summed.to(copies.dtype)


def spread(grad: Tensor, plan: Permutation, copies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of rows [R, D] that are sums of copies [N, D] times weights [N] -> those of copies and of weights."""
    if use_triton(grad):
        from pithtrain.ops.kernels.permute import spread_triton

        return spread_triton(grad, plan, copies, weights)
    grads = wide(gather_rows(grad, plan))
    weight_grads = torch.linalg.vecdot(wide(copies), grads)
    return grads.mul_(weights[:, None]).to(copies.dtype), weight_grads


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Permutation) -> Tensor:
        ctx.plan = plan
        return gather_rows(x, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_copies(grad.contiguous(), ctx.plan), None


def permute(x: Tensor, plan: Permutation) -> Tensor:
    """x [R, D] -> [N, D], sorted by slot, stable in row order."""
    output: Tensor = _Permute.apply(x, plan)
    return output


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, plan: Permutation) -> Tensor:
        ctx.plan = plan
        return sum_copies(copies, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_rows(grad, ctx.plan), None


def unpermute(copies: Tensor, plan: Permutation) -> Tensor:
    """copies [N, D] -> [R, D], each row the sum of its copies in the order of its entries."""
    output: Tensor = _Unpermute.apply(copies, plan)
    return output


class _WeightedUnpermute(Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, weights: Tensor, plan: Permutation) -> Tensor:
        per_copy = weights.flatten().index_select(0, plan.entries)
        ctx.save_for_backward(copies, per_copy)
        ctx.plan, ctx.shape = plan, weights.shape
        return sum_copies(copies, plan, per_copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        copies, per_copy = ctx.saved_tensors
        grad_copies, weight_grads = spread(grad, ctx.plan, copies, per_copy)
        grad_weights = weight_grads.new_zeros(ctx.shape).flatten()
        grad_weights.index_copy_(0, ctx.plan.entries, weight_grads)  # entries are distinct
        return grad_copies, grad_weights.view(ctx.shape), None


def weighted_unpermute(copies: Tensor, weights: Tensor, plan: Permutation) -> Tensor:
    """copies [N, D], weights [R, K] -> [R, D]: each row its copies' weighted sum; absent entries' gradient is 0."""
    output: Tensor = _WeightedUnpermute.apply(copies, weights, plan)
    return output
