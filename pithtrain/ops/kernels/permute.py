"""Triton kernels of a row's copies: a program sums a part of one row, or does one copy's gradients, and no other."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pithtrain.ops.permute import Permutation

COPIES = {"TILE": 1024, "num_warps": 4, "num_stages": 1}


@triton.jit
def sum_copies_kernel(
    copies, order, starts, weights, output, num_copies, features, WEIGHTED: tl.constexpr, TILE: tl.constexpr
):
    row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    known, total = feature < features, tl.zeros((TILE,), tl.float32)
    end = tl.load(starts + row + 1, row + 1 < tl.num_programs(0), num_copies)
    for at in range(tl.load(starts + row), end):
        copy = tl.load(order + at)
        values = tl.load(copies + copy * features + feature, known).to(tl.float32)
        total += values * tl.load(weights + copy) if WEIGHTED else values
    tl.store(output + row * features + feature, total.to(output.dtype.element_ty), known)


@triton.jit
def spread_kernel(grad, rows, copies, weights, grad_copies, products, features, TILE: tl.constexpr):
    copy, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    row, weight = tl.load(rows + copy), tl.load(weights + copy)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, features, TILE):
        at, known = copy * features + start + lane, start + lane < features
        upstream = tl.load(grad + row * features + start + lane, known, 0.0).to(tl.float32)
        total += upstream * tl.load(copies + at, known, 0.0).to(tl.float32)
        tl.store(grad_copies + at, (upstream * weight).to(grad_copies.dtype.element_ty), known)
    tl.store(products + copy, tl.sum(total, 0))


def sum_copies_triton(copies: Tensor, plan: Permutation, weights: Tensor | None) -> Tensor:
    """`sum_copies`."""
    output = copies.new_empty(plan.starts.shape[0], copies.shape[1])
    tensors = copies.contiguous(), plan.copies, plan.starts, output if weights is None else weights, output
    grid = output.shape[0], triton.cdiv(output.shape[1], COPIES["TILE"])
    sum_copies_kernel[grid](*tensors, *copies.shape, weights is not None, **COPIES)
    return output


def spread_triton(grad: Tensor, plan: Permutation, copies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`spread`."""
    copies = copies.contiguous()
    grad_copies, products = torch.empty_like(copies), torch.empty_like(weights)
    tensors = grad.contiguous(), plan.rows, copies, weights, grad_copies, products
    spread_kernel[copies.shape[:1]](*tensors, copies.shape[1], **COPIES)
    return grad_copies, products
