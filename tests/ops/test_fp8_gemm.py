"""Products of FP8 blocks by their references: against float64, exactly where float64 and fp32 are both exact."""

import pytest
import torch
from torch import Tensor

from pithtrain.ops.fp8 import BLOCK, Quantised, RowBlocks, dequantise, dequantise_weight, quantise, quantise_weight
from pithtrain.ops.fp8_gemm import add_weight_gradient, multiply
from tests.agreement import randn

CPU = torch.device("cpu")
SIZES = [(0, 3, 129, 0), (5,), (0, 0), (1, 1, 1)]


def within_bound(got: Tensor, exact: Tensor, magnitudes: Tensor, terms: int) -> None:
    """|got - exact| at most `terms` roundings of fp32 of the sum of |a||b|."""
    excess = (got.double() - exact).abs() - (terms + 3) * 2.0**-24 * magnitudes
    assert not (excess > 0).any() and got.isfinite().all(), float(excess.max())


def integers(*shape: int, seed: int) -> Tensor:
    """-8 to 8 times a power of two that differs from block to block: exact in E4M3, and their sums are in fp32."""
    values = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()
    group, row, column = (
        torch.arange(size) // step for size, step in zip((1, *shape)[-3:], (1, 128, 128), strict=True)
    )
    powers = (group[:, None, None] + row[:, None] + 2 * column) % 4
    return values * torch.exp2(powers).view(shape)


def by_group(x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(sizes), weight, strict=True)])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_the_three_products(sizes: tuple[int, ...], exact: bool) -> None:
    """Of exact integers to the bit; of others within the bound, against float64 of the same quantised values."""
    make = integers if exact else randn
    outs, ins, blocks = 20, 140, RowBlocks.of(sizes, CPU)
    x, grad = make(sum(sizes), ins, seed=1), make(sum(sizes), outs, seed=2)
    weight = make(len(sizes), outs, ins, seed=3)
    (x8, x_columns), (grad8, grad_columns) = quantise(x, blocks), quantise(grad, blocks)
    copy, transposed = quantise_weight(weight)
    buffer = torch.ones(len(sizes), outs, ins)
    output, grad_x = multiply(x8, copy, blocks, torch.float32), multiply(grad8, transposed, blocks, torch.float32)
    add_weight_gradient(buffer, grad_columns, x_columns, blocks)
    if exact:
        assert torch.equal(output, by_group(x, weight, sizes))
        assert torch.equal(grad_x, by_group(grad, weight.mT, sizes))
        added = [1 + g.T @ r for g, r in zip(grad.split(sizes), x.split(sizes), strict=True)]
        assert torch.equal(buffer, torch.stack(added))
    else:
        for got, rows, matrix in ((output, x8, copy), (grad_x, grad8, transposed)):
            a, b = dequantise(rows).double(), dequantise_weight(matrix).double()
            within_bound(got, by_group(a, b, sizes), by_group(a.abs(), b.abs(), sizes), a.shape[1])
        a, b = dequantise(grad_columns).double(), dequantise(x_columns).double()
        for slot, start, end in zip(buffer, [0, *blocks.ends.tolist()], blocks.ends.tolist(), strict=False):
            part = slice(start * BLOCK, end * BLOCK)
            magnitudes = 1 + a[:, part].abs() @ b[:, part].abs().T
            within_bound(slot, 1 + a[:, part] @ b[:, part].T, magnitudes, BLOCK * (end - start))


def test_outputs_in_bf16_are_rounded_once() -> None:
    blocks = RowBlocks.of((3, 2), CPU)
    x, weight = quantise(randn(5, 32), blocks)[0], quantise_weight(randn(2, 8, 32))[0]
    narrow = multiply(x, weight, blocks, torch.bfloat16)
    assert torch.equal(narrow, multiply(x, weight, blocks, torch.float32).to(torch.bfloat16))


def test_a_group_without_rows_touches_nothing() -> None:
    """Neither its weight nor its slice of the buffer is read."""
    blocks = RowBlocks.of((2, 0, 3), CPU)
    rows, columns = quantise(randn(5, 32), blocks)
    weight = randn(3, 32, 32)
    weight[1] = float("nan")
    buffer = weight.clone()
    add_weight_gradient(buffer, columns, columns, blocks)
    assert buffer[1].isnan().all() and buffer[[0, 2]].isfinite().all()
    assert multiply(rows, quantise_weight(weight)[0], blocks, torch.float32).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_every_product(bad: float) -> None:
    blocks = RowBlocks.of((4,), CPU)
    x, grad, weight = randn(4, 32), randn(4, 16, seed=1), randn(1, 16, 32, seed=2)
    x[2, 5] = bad
    (rows, columns), (_, grads) = quantise(x, blocks), quantise(grad, blocks)
    output = multiply(rows, quantise_weight(weight)[0], blocks, torch.float32)
    assert output[2].isnan().all() and output[[0, 1, 3]].isfinite().all()
    buffer = torch.zeros(1, 16, 32)
    add_weight_gradient(buffer, grads, columns, blocks)
    assert buffer[0, :, 5].isnan().all() and buffer.isnan().sum() == 16


def test_a_huge_and_a_tiny_block_multiply() -> None:
    """Scales of 2^120 and 2^-126: their product is taken in fp32 and is exact."""
    blocks = RowBlocks.of((1,), CPU)
    huge = Quantised(torch.ones(1, BLOCK).to(torch.float8_e4m3fn), torch.full((1, 1), 2.0**120))
    tiny = Quantised(torch.ones(1, 1, BLOCK).to(torch.float8_e4m3fn), torch.full((1, 1, 1), 2.0**-126))
    assert multiply(huge, tiny, blocks, torch.float32).tolist() == [[2.0]]
