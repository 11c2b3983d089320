"""Triton kernels of products of FP8 blocks: tiles by tensor descriptors (TMA), each block scaled, then added in fp32.

MXFP8 (blocks of 32, scales E8M0; OCP Microscaling Formats v1.0) is for Blackwell's tensor cores; no recipe uses it yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pithtrain.ops.fp8 import BLOCK, Quantised, RowBlocks

MULTIPLY = {"num_warps": 8, "num_stages": 3}
ADD_WEIGHT_GRADIENT = {"TILE": 64, "num_warps": 8, "num_stages": 3}
MULTIPLY_MX = {"num_warps": 8, "num_stages": 3}

SIDE = tl.constexpr(BLOCK)


@triton.jit
def multiply_kernel(
    x, x_scales, weight, weight_scales, table, output, num_rows, outs, depth, matrix_stride, out_stride, in_stride
):
    part, block = tl.program_id(0), tl.program_id(1)
    matrix, first, count = tl.load(table + 3 * block), tl.load(table + 3 * block + 1), tl.load(table + 3 * block + 2)
    lane = tl.arange(0, SIDE)
    row, out, inside = first + lane, part * SIDE + lane, lane < count
    weight_scales += matrix * matrix_stride + part * out_stride
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(depth):
        product = tl.dot(x.load([first, k * SIDE]), weight.load([matrix * outs + part * SIDE, k * SIDE]).T)
        scale = tl.load(x_scales + k * num_rows + row, inside, 0.0) * tl.load(weight_scales + k * in_stride)
        total += product * scale[:, None]
    at = output + row.to(tl.int64)[:, None] * outs + out[None, :]
    tl.store(at, total.to(output.dtype.element_ty), inside[:, None] & (out < outs)[None, :])


@triton.jit
def add_weight_gradient_kernel(grad, grad_scales, x, x_scales, ends, buffer, outs, ins, TILE: tl.constexpr):
    across, down, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(ends + matrix - 1, matrix > 0, 0), tl.load(ends + matrix)
    out, feature = down * SIDE + tl.arange(0, SIDE), across * TILE + tl.arange(0, TILE)
    if start < end:
        total = tl.zeros((SIDE, TILE), tl.float32)
        for block in range(start, end):
            product = tl.dot(grad.load([down * SIDE, block * SIDE]), x.load([across * TILE, block * SIDE]).T)
            grad_scale = tl.load(grad_scales + block * outs + out, out < outs, 0.0)
            x_scale = tl.load(x_scales + block * ins + feature, feature < ins, 0.0)
            total += product * grad_scale[:, None] * x_scale[None, :]
        at = buffer + (matrix.to(tl.int64) * outs + out)[:, None] * ins + feature[None, :]
        known = (out < outs)[:, None] & (feature < ins)[None, :]
        tl.store(at, tl.load(at, known) + total, known)


@triton.jit
def multiply_mx_kernel(x, x_scales, weight, weight_scales, output, num_rows, outs, depth):
    lane, four = tl.arange(0, SIDE), tl.arange(0, 4)
    row, out = tl.program_id(1) * SIDE + lane, tl.program_id(0) * SIDE + lane
    x_scales += row[:, None] * depth * 4 + four[None, :]
    weight_scales += out[:, None] * depth * 4 + four[None, :]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(depth):
        x_scale = tl.load(x_scales + 4 * k, row[:, None] < num_rows, 0)
        weight_scale = tl.load(weight_scales + 4 * k, out[:, None] < outs, 0)
        a, b = x.load([tl.program_id(1) * SIDE, k * SIDE]), weight.load([tl.program_id(0) * SIDE, k * SIDE]).T
        total = tl.dot_scaled(a, x_scale, "e4m3", b, weight_scale, "e4m3", total)
    at = output + row.to(tl.int64)[:, None] * outs + out[None, :]
    tl.store(at, total.to(output.dtype.element_ty), (row < num_rows)[:, None] & (out < outs)[None, :])


def _tiles(values: Tensor, rows: int = BLOCK) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(values, [rows, BLOCK])


def multiply_triton(x: Quantised, weight: Quantised, blocks: RowBlocks, dtype: torch.dtype) -> Tensor:
    """`multiply`."""
    (num_rows, width), outs = x.values.shape, weight.values.shape[1]
    assert weight.values.shape[2] == width, f"weight: got {weight.values.shape[2]} features, expected x's {width}"
    output = x.scales.new_empty(num_rows, outs, dtype=dtype)
    if num_rows:
        grid, shape = (triton.cdiv(outs, BLOCK), blocks.table.shape[0]), (num_rows, outs, width // BLOCK)
        operands = _tiles(x.values), x.scales, _tiles(weight.values.flatten(0, 1)), weight.scales
        multiply_kernel[grid](*operands, blocks.table, output, *shape, *weight.scales.stride(), **MULTIPLY)
    return output


def add_weight_gradient_triton(buffer: Tensor, grad: Quantised, x: Quantised, blocks: RowBlocks) -> None:
    """`add_weight_gradient`."""
    size, outs, ins = buffer.shape
    assert buffer.is_contiguous() and buffer.dtype == torch.float32, "buffer: expected contiguous fp32"
    if grad.values.shape[1]:
        tile = ADD_WEIGHT_GRADIENT["TILE"]
        grid = triton.cdiv(ins, tile), triton.cdiv(outs, BLOCK), size
        operands = _tiles(grad.values), grad.scales, _tiles(x.values, tile), x.scales
        add_weight_gradient_kernel[grid](*operands, blocks.ends, buffer, outs, ins, **ADD_WEIGHT_GRADIENT)


def multiply_mx_triton(x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """x [M, I] times weight [O, I] transposed: [M, O]. Scales [M or O, I / 32] are uint8 (E8M0), I whole blocks."""
    (num_rows, width), outs = x.values.shape, weight.values.shape[0]
    output = x.values.new_empty(num_rows, outs, dtype=dtype)
    grid, shape = (triton.cdiv(outs, BLOCK), triton.cdiv(num_rows, BLOCK)), (num_rows, outs, width // BLOCK)
    operands = _tiles(x.values), x.scales, _tiles(weight.values), weight.scales
    multiply_mx_kernel[grid](*operands, output, *shape, **MULTIPLY_MX)
    return output
