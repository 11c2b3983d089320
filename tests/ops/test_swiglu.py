"""SwiGLU against its definition."""

import pytest
import torch
from torch import Tensor

from pithtrain.ops.swiglu import clamped_swiglu, swiglu
from spec.reference.experts import clamped_swiglu as clamped_reference
from spec.reference.experts import swiglu as reference
from tests.agreement import assert_close, randn
from tests.ops.weights import gradients, leaf


@pytest.mark.parametrize("shape", [(5, 14), (2, 3, 6), (1, 2), (0, 8)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_swiglu_is_the_reference(shape: tuple[int, ...], transposed: bool) -> None:
    gate_up = randn(*shape, std=2.0)
    if transposed:
        gate_up = gate_up.transpose(0, -1).contiguous().transpose(0, -1)
    gate_up.requires_grad_()
    half = shape[-1] // 2
    output, upstream = swiglu(gate_up), randn(*shape[:-1], half, seed=1)
    oracle = leaf(gate_up)
    eye = torch.eye(2 * half, dtype=torch.float64)  # the products on either side, so that only the middle is left
    expected = reference(oracle, eye, eye[:half, :half])
    assert_close(output, expected)
    grad, expected_grad = (gradients(out, [at], upstream)[0] for out, at in ((output, gate_up), (expected, oracle)))
    assert_close(grad[..., :half], expected_grad[..., :half], "gate")
    assert_close(grad[..., half:], expected_grad[..., half:], "up")


@pytest.mark.parametrize("gate", [-200.0, 200.0, 0.0])
def test_extreme_gates_stay_finite(gate: float) -> None:
    gate_up = torch.tensor([[gate, 3.0]], requires_grad=True)
    output: Tensor = swiglu(gate_up)
    output.sum().backward()
    assert output.item() == max(gate, 0.0) * 3.0
    assert gate_up.grad is not None and gate_up.grad.isfinite().all()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)], ids=str)
def test_clamped_swiglu_is_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    """In bf16, rounded once."""
    gate_up, upstream = randn(5, 14, std=2.0).to(dtype).requires_grad_(), randn(5, 7, seed=1).to(dtype)
    oracle = leaf(gate_up)
    output, expected = clamped_swiglu(gate_up, 1.702, 1.5), clamped_reference(oracle, 1.702, 1.5)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=1e-6)
    (grad,), (expected_grad,) = gradients(output, [gate_up], upstream), gradients(expected, [oracle], upstream)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=1e-6)


def test_beyond_the_limit_nothing_changes() -> None:
    gate_up = torch.tensor([[9.0, -9.0, 0.5, 0.5], [7.0, -7.0, 0.5, 0.5]]).flatten(0, 1)[None].requires_grad_()
    output = clamped_swiglu(gate_up, 1.0, 7.0)  # gates 9, -9, 0.5, 0.5; ups 7, -7, 0.5, 0.5
    grad = gradients(output, [gate_up], torch.ones(1, 4))[0][0]
    assert grad[0] == 0 and bool((grad[1:] != 0).all()), grad
    (beyond,) = gradients(clamped_swiglu(gate_up + 0.5, 1.0, 7.0), [gate_up], torch.ones(1, 4))
    assert beyond[0, 4] == 0 and beyond[0, 5] != 0, beyond
