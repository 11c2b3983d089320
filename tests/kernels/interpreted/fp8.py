"""The quantisation kernels give the reference's bytes and scales, and read nothing beside their input."""

import pytest
import torch
from torch import Tensor

from pithtrain.ops.fp8 import (
    Quantised,
    RowBlocks,
    quantise_columns_reference,
    quantise_rows_reference,
    quantise_weight_reference,
)
from pithtrain.ops.kernels.fp8 import quantise_triton, quantise_weight_triton
from tests.agreement import randn
from tests.ops.test_fp8 import as_fp32, patterns

CPU = torch.device("cpu")


def assert_same(got: Quantised, expected: Quantised) -> None:
    assert got.values.shape == expected.values.shape and got.scales.shape == expected.scales.shape
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(got.scales.view(torch.int32), expected.scales.view(torch.int32))


def amid_poison(x: Tensor) -> Tensor:
    """x as a view of a larger tensor that is NaN everywhere else."""
    larger = torch.full((x.shape[0] + 200, x.shape[1] + 50), float("nan"), dtype=x.dtype)
    larger[: x.shape[0], : x.shape[1]] = x
    return larger[: x.shape[0], : x.shape[1]]


def awkward(rows: int, features: int) -> Tensor:
    """Magnitudes from subnormal to the largest, zero blocks, outliers, NaN and Inf."""
    x = randn(rows, features) * torch.exp2(torch.randint(-140, 120, (rows, 1)).float())
    x[torch.rand(x.shape) < 0.01] *= 1000
    x[:: max(1, rows // 3)] = 0
    x[torch.rand(x.shape) < 0.02] = 0
    specials = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 2.0**-149, 3.4028235e38])
    x.view(-1)[torch.randperm(x.numel())[:6]] = specials[: x.numel()]
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes,features", [((0, 3, 129, 0, 128), 140), ((1,), 1), ((257,), 48), ((0, 0), 16)], ids=str)
def test_both_copies(sizes: tuple[int, ...], features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = awkward(sum(sizes), features) if sum(sizes) > 5 else randn(sum(sizes), features)
    x, blocks = amid_poison(x.to(dtype)), RowBlocks.of(sizes, CPU)
    rows, columns = quantise_triton(x, blocks, columns=True)
    assert_same(rows, quantise_rows_reference(x))
    assert_same(columns, quantise_columns_reference(x, blocks))
    alone, nothing = quantise_triton(x, blocks, columns=False)
    assert_same(alone, rows)
    assert_same(nothing, quantise_columns_reference(x[:, :0], blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 130, 140), (3, 128, 20), (1, 1, 1)], ids=str)
def test_weights(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = awkward(shape[0] * shape[1], shape[2]) if shape[1] > 1 else randn(1, 1)
    weight = weight.view(shape).to(dtype)
    for got, expected in zip(quantise_weight_triton(weight), quantise_weight_reference(weight), strict=True):
        assert_same(got, expected)


def test_every_scale() -> None:
    """A block for each of the patterns that the reference's scale is held against exact arithmetic with."""
    x = torch.zeros(len(patterns()), 128)
    x[:, 5], x[:, 77] = as_fp32(patterns()), 1.0
    blocks = RowBlocks.of((len(x),), CPU)
    assert_same(quantise_triton(x, blocks, columns=False)[0], quantise_rows_reference(x))


def test_a_block_writes_its_own_rows_only() -> None:
    """So the last to write does not hide another's mistake: blocks run from the last to the first."""
    blocks, x = RowBlocks.of((3, 129, 5), CPU), randn(137, 40)
    turned = RowBlocks(blocks.sizes, blocks.table.flip(0), blocks.ends)
    assert_same(quantise_triton(x, turned, columns=False)[0], quantise_rows_reference(x))
