"""FP8 quantisation in blocks: the recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3).

Values are E4M3. Activations and output gradients have one scale for 128 values along the dimension that a product
sums over, weights one for 128x128. A scale is a power of two, the smallest with which no value of its block exceeds
448, and is found from the bits of the largest magnitude, so every device gives the same bytes and scales.

A zero block, or one whose scale would be smaller, has scale 2^-126. NaN and Inf become NaN, so that products show
them; the rest of their block is quantised with scale 2^120, the largest there is. A value that rounds up to 2^128
overflows to Inf when it is dequantised.

M rows, B blocks of up to 128 rows, each of one group; I features; L matrices of [O, I]. Dimensions summed over are
padded with zeros to a multiple of 128.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops.kernels import use_triton

BLOCK = 128
E4M3 = torch.float8_e4m3fn
INF_BITS = 0x7F800000


class Quantised(NamedTuple):
    """values [.., R, C] E4M3, C padded; `scales` fp32, to multiply with.

    Of activations: scales [C / 128, R], so that a tile's scales lie side by side. Of weights: scales
    [L, R / 128 rounded up, C / 128], in the transposed copy a transposed view of the same.
    """

    values: Tensor
    scales: Tensor


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Rows sorted by group (`sizes`, on the host) cut into blocks that lie in one group each.

    table: int32 [B, 3] on the rows' device: each block's group, its first row, its number of rows (1 to 128).
    ends: int32 [L], where each group's blocks end.
    """

    sizes: tuple[int, ...]
    table: Tensor
    ends: Tensor

    @staticmethod
    def of(sizes: tuple[int, ...], device: torch.device) -> "RowBlocks":
        size = torch.tensor(sizes, dtype=torch.int64)
        counts, row_ends = (size + BLOCK - 1) // BLOCK, size.cumsum(0)
        ends = counts.cumsum(0)
        group = torch.arange(len(sizes)).repeat_interleave(counts)
        within = torch.arange(group.shape[0]) - (ends - counts)[group]
        first = (row_ends - size)[group] + within * BLOCK
        table = torch.stack([group, first, (row_ends[group] - first).clamp(max=BLOCK)], 1)
        table, ends = (part.to(torch.int32).to(device, non_blocking=True) for part in (table, ends))
        return RowBlocks(sizes, table, ends)


def padded(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def quantise_reference(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x, fp32 or narrower, whose `dims` span a block -> E4M3 of x's shape, and scales with `dims` of size 1."""
    x = x.float()
    bits = x.view(torch.int32) & 0x7FFFFFFF
    largest = bits.amax(dims, keepdim=True).clamp(max=INF_BITS)  # as integers: NaN above Inf above the finite
    exponent = (((largest + 0x1FFFFF) >> 23) - 127 - 8).clamp(min=-126)  # 448 = 1.75 * 2^8
    scale, inverse = (((sign * exponent + 127) << 23).view(torch.float32) for sign in (1, -1))
    return torch.where(bits < INF_BITS, x * inverse, torch.nan).to(E4M3), scale


def quantise_rows_reference(x: Tensor) -> Quantised:
    """x [M, I] in blocks of 1x128: values [M, I padded]."""
    x = F.pad(x, (0, -x.shape[1] % BLOCK))
    values, scales = quantise_reference(x.unflatten(1, (x.shape[1] // BLOCK, BLOCK)), (2,))
    return Quantised(values.flatten(1).contiguous(), scales.squeeze(2).T.contiguous())


def quantise_columns_reference(x: Tensor, blocks: RowBlocks) -> Quantised:
    """x [M, I] transposed, in blocks of 128 rows of one group: values [I, 128 * B]."""
    rows = torch.cat([F.pad(part, (0, 0, 0, -len(part) % BLOCK)) for part in x.split(blocks.sizes)])
    values, scales = quantise_reference(rows.unflatten(0, (len(rows) // BLOCK, BLOCK)), (1,))
    return Quantised(values.flatten(0, 1).T.contiguous(), scales.squeeze(1))


def quantise(x: Tensor, blocks: RowBlocks, columns: bool = True) -> tuple[Quantised, Quantised]:
    """x [M, I], fp32 or bf16, in one pass for products that sum over I and for those that sum over a group's rows.

    rows: values [M, I padded], 1x128 along I, in their order. columns: values [I, 128 * B], transposed, 128x1 along M,
    each group padded; without `columns` the second copy is of none of the features.
    """
    if not use_triton(x):
        return quantise_rows_reference(x), quantise_columns_reference(x if columns else x[:, :0], blocks)
    from pithtrain.ops.kernels.fp8 import quantise_triton

    return quantise_triton(x, blocks, columns)


def quantise_weight_reference(weight: Tensor) -> tuple[Quantised, Quantised]:
    """`quantise_weight` in torch."""
    outs, ins = weight.shape[1:]
    tiles = F.pad(weight, (0, -ins % BLOCK, 0, -outs % BLOCK)).unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    values, scales = quantise_reference(tiles, (2, 4))
    values, scales = values.flatten(3, 4).flatten(1, 2), scales[:, :, 0, :, 0]
    transposed = Quantised(values.mT[:, :ins].contiguous(), scales.mT)
    return Quantised(values[:, :outs].contiguous(), scales), transposed


def quantise_weight(weight: Tensor) -> tuple[Quantised, Quantised]:
    """weight [L, O, I], fp32 or bf16, in blocks of 128x128, in one pass: [L, O, I padded] and [L, I, O padded]."""
    if not use_triton(weight):
        return quantise_weight_reference(weight)
    from pithtrain.ops.kernels.fp8 import quantise_weight_triton

    return quantise_weight_triton(weight)


def dequantise(x: Quantised) -> Tensor:
    """Activations [R, C] in fp32, exactly (but for overflow)."""
    return x.values.float() * x.scales.T.repeat_interleave(BLOCK, 1)


def dequantise_weight(x: Quantised) -> Tensor:
    """Weights [L, R, C] in fp32, exactly (but for overflow)."""
    scales = x.scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return x.values.float() * scales[:, : x.values.shape[1]]
