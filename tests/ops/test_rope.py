"""Rotary positions against their definition."""

import pytest
import torch

from pithtrain.ops.rope import rope, rope_tables
from spec.reference.rope import apply_rope
from spec.reference.rope import rope_tables as reference_tables
from tests.agreement import assert_close, randn
from tests.ops.weights import gradients, leaf

CPU = torch.device("cpu")


@pytest.mark.parametrize("theta", [100.0, 1e6])
@pytest.mark.parametrize("head_dim", [2, 6, 12])
def test_tables_are_the_reference(theta: float, head_dim: int) -> None:
    for got, expected in zip(
        rope_tables(4096, head_dim, theta, CPU), reference_tables(torch.arange(4096), head_dim, theta), strict=True
    ):
        assert got.dtype == torch.float32 and got.shape == (4096, head_dim // 2)
        assert_close(got, expected[:, : head_dim // 2])
        assert_close(got[-1], expected[-1, : head_dim // 2], "the last position")


@pytest.mark.parametrize("view", ["contiguous", "a part of the heads", "transposed"])
@pytest.mark.parametrize("head_dim", [2, 6])
def test_rope_is_the_reference(view: str, head_dim: int) -> None:
    x = randn(2, 9, 5, head_dim)
    if view == "a part of the heads":
        x = x[:, :, 1:4]
    if view == "transposed":
        x = randn(5, 9, 2, head_dim).transpose(0, 2)
    x.requires_grad_()
    output = rope(x, *rope_tables(9, head_dim, 100.0, CPU))
    oracle = leaf(x)
    expected = apply_rope(oracle, *reference_tables(torch.arange(9), head_dim, 100.0))
    upstream = randn(9, 2, *output.shape[2:], seed=1).transpose(0, 1)
    assert_close(output, expected)
    assert_close(gradients(output, [x], upstream)[0], gradients(expected, [oracle], upstream)[0])


def test_bf16_is_fp32_rounded_once() -> None:
    """Angles are not rounded: of far positions a rounded cosine would be of another angle."""
    x, upstream = (randn(2, 300, 3, 6, seed=seed).bfloat16() for seed in range(2))
    tables, results = rope_tables(300, 6, 1e4, CPU), []
    for values in (x, x.float()):
        output = rope(values.requires_grad_(), *tables)
        results.append([output, *gradients(output, [values], upstream)])
    for narrow, wide in zip(*results, strict=True):
        assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide.bfloat16())
