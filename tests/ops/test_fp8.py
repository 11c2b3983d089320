"""FP8 quantisation by its reference: scales against exact rational arithmetic, values against every E4M3 number."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from pithtrain.ops.fp8 import (
    BLOCK,
    E4M3,
    Quantised,
    RowBlocks,
    dequantise,
    dequantise_weight,
    quantise,
    quantise_reference,
    quantise_weight,
)
from tests.agreement import randn

CPU = torch.device("cpu")


def as_fp32(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def one_a_block(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each value as the only one of its block: (quantised, scale)."""
    quantised, scales = quantise_reference(values[:, None], (1,))
    return quantised[:, 0], scales[:, 0]


def patterns() -> Tensor:
    """fp32 bits around everything that decides a scale: each exponent, its ends, 448's mantissa; and a sweep."""
    mantissas = torch.tensor([0, 1, 2, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFE, 0x7FFFFF])
    grid = (torch.arange(255)[:, None] << 23) + mantissas
    return torch.cat([grid.flatten(), torch.arange(0, 0x7F800000, 1_048_573)])


def test_a_scale_is_the_smallest_power_of_two_that_fits() -> None:
    _, scales = one_a_block(as_fp32(patterns()))
    least = Fraction(1, 2**126)
    for amax, scale in zip(as_fp32(patterns()).tolist(), scales.tolist(), strict=True):
        exact = Fraction(scale)
        assert exact.numerator == 1 or exact.denominator == 1
        assert Fraction(amax) <= 448 * exact, amax
        assert exact == least or Fraction(amax) > 224 * exact, amax


def test_values_are_the_nearest_e4m3_ties_to_even() -> None:
    """Against all 127 magnitudes of the format, in float64, where every product here is exact."""
    table = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    between = (table[1:] + table[:-1]) / 2
    steps = torch.tensor([-(2.0**-20), 0, 2.0**-20], dtype=torch.float64)
    near = torch.cat([(between[:, None] * (1 + steps)).flatten(), table, torch.rand(5000).double() * 448])
    x = torch.cat([near, -near, torch.full((1,), 448.0)]).float()
    values, scale = quantise_reference(x, (0,))
    assert scale.tolist() == [1.0]
    distance = (table[None] - x.double().abs()[:, None]).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = torch.arange(127) % 2 == 0
    chosen = (nearest & (even | (nearest.sum(1, keepdim=True) == 1))).int().argmax(1).to(torch.uint8)
    sign = x.signbit().to(torch.uint8) << 7
    assert torch.equal(values.view(torch.uint8), chosen | sign)


def test_zero_tiny_and_huge_blocks() -> None:
    tiny, largest = 2.0**-149, torch.finfo(torch.float32).max
    small = [0.0, tiny, 2.0**-136, 2.0**-135, -(2.0**-126), 448 * 2.0**-126]
    values, scales = one_a_block(torch.tensor([*small, largest, -largest]))
    assert scales.tolist() == [2.0**-126] * 6 + [2.0**120] * 2
    assert values.float().tolist() == [0.0, 0.0, 0.0, 2.0**-9, -1.0, 448.0, 256.0, -256.0]
    mixed, scale = quantise_reference(torch.tensor([largest, 1.0, 0.0]), (0,))
    assert scale.tolist() == [2.0**120] and mixed.float().tolist() == [256.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_becomes_nan_and_spoils_nothing_else(bad: float) -> None:
    x = torch.tensor([1.0, bad, 2.0**126, 0.0])
    values, scale = quantise_reference(x, (0,))
    assert values.view(torch.uint8).tolist()[1] == 0x7F, "one NaN on every device"
    assert scale.tolist() == [2.0**120]
    assert values.float()[[0, 2, 3]].tolist() == [0.0, 64.0, 0.0]
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert one_a_block(negative_nan)[0].view(torch.uint8).tolist() == [0x7F]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,features", [(1, 1), (3, 130), (128, 128), (257, 48), (0, 16)])
def test_rows_and_columns(rows: int, features: int, dtype: torch.dtype) -> None:
    x = randn(rows, features).to(dtype)
    blocks = RowBlocks.of((rows,), CPU)
    by_row, by_column = quantise(x, blocks)
    alone, nothing = quantise(x, blocks, columns=False)
    assert torch.equal(alone.values.float(), by_row.values.float()) and torch.equal(alone.scales, by_row.scales)
    assert nothing.values.numel() == nothing.scales.numel() == 0
    check_row_blocks(by_row, x)
    check_row_blocks(by_column, x.T)


def check_row_blocks(got: Quantised, x: Tensor) -> None:
    """Every 1x128 block of got is x's, quantised by itself; the rest is zero."""
    width = -(-x.shape[1] // BLOCK) * BLOCK
    assert got.values.shape == (x.shape[0], width) and got.values.dtype == E4M3 and got.values.is_contiguous()
    assert got.scales.shape == (width // BLOCK, x.shape[0]) and got.scales.is_contiguous()
    for block, start in enumerate(range(0, x.shape[1], BLOCK)):
        values, scales = quantise_reference(x[:, start : start + BLOCK], (1,))
        assert torch.equal(got.values[:, start : start + values.shape[1]].float(), values.float())
        assert torch.equal(got.scales[block], scales[:, 0])
    assert not got.values[:, x.shape[1] :].float().any()


@pytest.mark.parametrize("sizes", [(0, 3, 129, 0, 128), (0, 0), (1, 1, 1), (300,)], ids=str)
def test_columns_begin_a_block_with_each_group(sizes: tuple[int, ...]) -> None:
    x, blocks = randn(sum(sizes), 20), RowBlocks.of(sizes, CPU)
    _, columns = quantise(x, blocks)
    starts = [0, *blocks.ends.tolist()]
    assert columns.values.shape == (20, starts[-1] * BLOCK) and columns.scales.shape == (starts[-1], 20)
    for group, rows in enumerate(x.split(sizes)):
        start, end = starts[group : group + 2]
        part = Quantised(columns.values[:, start * BLOCK : end * BLOCK].contiguous(), columns.scales[start:end])
        check_row_blocks(part, rows.T)


@pytest.mark.parametrize("sizes", [(0, 3, 129, 0, 256), (0,), (1,), (127, 128)], ids=str)
def test_every_row_lies_in_one_block_of_its_group(sizes: tuple[int, ...]) -> None:
    blocks = RowBlocks.of(sizes, CPU)
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    seen = [(group, row) for group, first, rows in blocks.table.tolist() for row in range(first, first + rows)]
    assert seen == list(zip(owner, range(sum(sizes)), strict=True))
    assert all(0 < rows <= BLOCK for _, _, rows in blocks.table.tolist())
    assert blocks.ends.tolist()[-1] == len(blocks.table) and blocks.table.dtype == blocks.ends.dtype == torch.int32


@pytest.mark.parametrize("shape", [(2, 256, 128), (1, 1, 1), (3, 140, 270), (2, 130, 7)], ids=str)
def test_weights_and_their_transposed_copy_share_scales(shape: tuple[int, int, int]) -> None:
    weight = randn(*shape)
    weight *= 2.0 ** (torch.arange(shape[1]) % 60)[:, None]
    copy, transposed = quantise_weight(weight)
    assert copy.values.is_contiguous() and transposed.values.is_contiguous()
    assert copy.values.shape[:2] == shape[:2] and transposed.values.shape[:2] == (shape[0], shape[2])
    plain, turned = dequantise_weight(copy), dequantise_weight(transposed)
    assert torch.equal(plain[..., : shape[2]], turned[..., : shape[1]].mT)
    assert not plain[..., shape[2] :].any() and not turned[..., shape[1] :].any()
    for row in range(0, shape[1], BLOCK):
        for column in range(0, shape[2], BLOCK):
            tile = weight[:, row : row + BLOCK, column : column + BLOCK]
            values, scales = quantise_reference(tile, (1, 2))
            got = copy.values[:, row : row + BLOCK, column : column + BLOCK][..., : tile.shape[2]]
            assert torch.equal(got.float(), values.float())
            assert torch.equal(copy.scales[:, row // BLOCK, column // BLOCK], scales[:, 0, 0])


def test_representable_values_come_back_exactly() -> None:
    x = torch.arange(127, dtype=torch.uint8).view(E4M3).float().repeat(4, 1) * 2.0 ** torch.arange(-60, 60, 30)[:, None]
    rows, columns = quantise(x, RowBlocks.of((4,), CPU))
    assert torch.equal(dequantise(rows)[:, :127], x)
    assert torch.equal(dequantise(quantise(x[:1], RowBlocks.of((1,), CPU))[0])[:, :127], x[:1])
    assert columns.values.shape == (127, BLOCK)


def test_error_on_inputs_with_outliers(record_property: Callable[[str, object], None]) -> None:
    """One value in 1,000 ten thousand times larger: blocks keep the error where the outlier is, one scale does not."""
    x = randn(256, 1024)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 1e-3] *= 10_000
    rows, columns = quantise(x, RowBlocks.of((256,), CPU))
    whole, scale = quantise_reference(x, (0, 1))
    small = x.abs() < 5

    def error(got: Tensor) -> float:
        return float((got - x)[small].norm() / x[small].norm())

    errors = error(dequantise(rows)), error(dequantise(columns).T), error(whole.float() * scale)
    record_property("relative error of rows, columns, one scale", errors)
    assert errors[0] < 0.027 and errors[1] < 0.027 < errors[2], errors
