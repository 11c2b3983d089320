"""Products of FP8 blocks, dense and grouped: forward, input gradient and weight gradient.

A dense product is one group. Sums are in fp32: a block of 128 is summed, scaled, and added to the rest (arXiv
2412.19437, section 3.3.2). The references dequantise, which is exact for scales that are powers of two.

M rows, B blocks of up to 128 rows, each of one group; I input, O output features; L groups.
"""

import torch
from torch import Tensor

from pithtrain.ops.fp8 import Quantised, RowBlocks, dequantise, dequantise_weight, padded
from pithtrain.ops.kernels import use_triton


def multiply_reference(x: Quantised, weight: Quantised, blocks: RowBlocks, dtype: torch.dtype) -> Tensor:
    """`multiply` in torch."""
    output = x.scales.new_empty(x.values.shape[0], weight.values.shape[1])
    rows, outs = dequantise(x).split(blocks.sizes), output.split(blocks.sizes)
    for row, out, matrix in zip(rows, outs, dequantise_weight(weight), strict=True):
        torch.mm(row, matrix.T, out=out)
    return output.to(dtype)


def multiply(x: Quantised, weight: Quantised, blocks: RowBlocks, dtype: torch.dtype) -> Tensor:
    """x's rows [M, I] times each group's weight [L, O, I] transposed: [M, O] in `dtype`, rows in their order.

    With a gradient [M, O] and the weight's transposed copy [L, I, O], the input gradient [M, I].
    """
    if not use_triton(x.values):
        return multiply_reference(x, weight, blocks, dtype)
    from pithtrain.ops.kernels.fp8_gemm import multiply_triton

    return multiply_triton(x, weight, blocks, dtype)


def add_weight_gradient_reference(buffer: Tensor, grad: Quantised, x: Quantised, blocks: RowBlocks) -> None:
    """`add_weight_gradient` in torch."""
    widths = [padded(size) for size in blocks.sizes]
    grads, xs = (dequantise(columns).split(widths, 1) for columns in (grad, x))
    for slot, grad_part, x_part in zip(buffer, grads, xs, strict=True):
        if x_part.shape[1]:
            slot.addmm_(grad_part, x_part.T)


def add_weight_gradient(buffer: Tensor, grad: Quantised, x: Quantised, blocks: RowBlocks) -> None:
    """Adds each group's gradient to its slice of buffer [L, O, I], fp32: columns [O, 128 * B] times [I, 128 * B].

    The slice of a group without rows is neither read nor written.
    """
    if use_triton(buffer):
        from pithtrain.ops.kernels.fp8_gemm import add_weight_gradient_triton

        add_weight_gradient_triton(buffer, grad, x, blocks)
    else:
        add_weight_gradient_reference(buffer, grad, x, blocks)
