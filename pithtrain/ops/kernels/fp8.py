"""Triton kernels of FP8 quantisation: a program takes a tile of 128x128 and writes it both as it lies and transposed.

The scale's arithmetic is that of `pithtrain.ops.fp8`, bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pithtrain.ops.fp8 import BLOCK, E4M3, Quantised, RowBlocks, padded

QUANTISE = {"num_warps": 8, "num_stages": 1}
QUANTISE_WEIGHT = {"num_warps": 8, "num_stages": 1}

SIDE = tl.constexpr(BLOCK)
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _load(source, mask):
    """A tile in fp32, and the bits of its magnitudes."""
    tile = tl.load(source, mask, 0.0).to(tl.float32)
    return tile, tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(largest):
    """Bits of the largest magnitude -> (scale, its inverse)."""
    exponent = tl.maximum(((tl.minimum(largest, INF_BITS) + 0x1FFFFF) >> 23) - 135, -126)
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True), ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantise(tile, bits, inverse):
    return tl.where(bits < INF_BITS, tile * inverse, float("nan")).to(tl.float8e4nv)


@triton.jit
def quantise_kernel(
    x, table, by_row, row_scales, by_column, column_scales, num_rows, features, stride, COLUMNS: tl.constexpr
):
    block, part = tl.program_id(0), tl.program_id(1)
    count = tl.load(table + 3 * block + 2)
    lane = tl.arange(0, SIDE)
    row, feature = (tl.load(table + 3 * block + 1) + lane).to(tl.int64), part * SIDE + lane
    inside, known = lane < count, feature < features
    source, mask = x + row[:, None] * stride + feature[None, :], inside[:, None] & known[None, :]
    tile, bits = _load(source, mask)
    scale, inverse = _scale(tl.max(bits, 1))
    at = by_row + row[:, None] * (tl.num_programs(1) * SIDE) + feature[None, :]
    tl.store(at, _quantise(tile, bits, inverse[:, None]), inside[:, None])
    tl.store(row_scales + part * num_rows + row, scale, inside)
    if COLUMNS:
        tile, bits = _load(source, mask)  # from cache: kept in registers it would halve the programs that run at once
        scale, inverse = _scale(tl.max(bits, 0))
        at = by_column + feature.to(tl.int64)[:, None] * (tl.num_programs(0) * SIDE) + (block * SIDE + lane)[None, :]
        tl.store(at, tl.trans(_quantise(tile, bits, inverse[None, :])), known[:, None])
        tl.store(column_scales + block * features + feature, scale, known)


@triton.jit
def quantise_weight_kernel(weight, plain, transposed, scales, outs, ins):
    matrix, down, across = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, SIDE)
    out, feature = down * SIDE + lane, across * SIDE + lane
    inside, known = out < outs, feature < ins
    source = weight + (matrix * outs + out)[:, None] * ins + feature[None, :]
    tile, bits = _load(source, inside[:, None] & known[None, :])
    scale, inverse = _scale(tl.max(tl.max(bits, 1), 0))
    values = _quantise(tile, bits, inverse)
    at = plain + (matrix * outs + out)[:, None] * (tl.num_programs(2) * SIDE) + feature[None, :]
    tl.store(at, values, inside[:, None])
    at = transposed + (matrix * ins + feature)[:, None] * (tl.num_programs(1) * SIDE) + out[None, :]
    tl.store(at, tl.trans(values), known[:, None])
    tl.store(scales + (matrix * tl.num_programs(1) + down) * tl.num_programs(2) + across, scale)


def quantise_triton(x: Tensor, blocks: RowBlocks, columns: bool) -> tuple[Quantised, Quantised]:
    """`quantise`."""
    assert x.stride(1) == 1, f"x: got strides {x.stride()}, expected contiguous rows"
    (num_rows, features), num_blocks = x.shape, blocks.table.shape[0]
    width = padded(features)
    by_row, by_column = _empty(x, num_rows, width), _empty(x, features if columns else 0, num_blocks * BLOCK)
    if num_blocks:
        grid, shape = (num_blocks, width // BLOCK), (num_rows, features, x.stride(0))
        quantise_kernel[grid](x, blocks.table, *by_row, *by_column, *shape, columns, **QUANTISE)
    return by_row, by_column


def _empty(x: Tensor, rows: int, width: int) -> Quantised:
    values = x.new_empty(rows, width, dtype=E4M3)
    return Quantised(values, x.new_empty(width // BLOCK, rows, dtype=torch.float32))


def quantise_weight_triton(weight: Tensor) -> tuple[Quantised, Quantised]:
    """`quantise_weight`."""
    weight = weight.contiguous()
    size, outs, ins = weight.shape
    plain = weight.new_empty(size, outs, padded(ins), dtype=E4M3)
    transposed = weight.new_empty(size, ins, padded(outs), dtype=E4M3)
    scales = weight.new_empty(size, padded(outs) // BLOCK, padded(ins) // BLOCK, dtype=torch.float32)
    quantise_weight_kernel[scales.shape](weight, plain, transposed, scales, outs, ins, **QUANTISE_WEIGHT)
    return Quantised(plain, scales), Quantised(transposed, scales.mT)
