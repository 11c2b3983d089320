"""SwiGLU against its definition."""

import pytest
import torch
from torch import Tensor

from pithtrain.ops.swiglu import swiglu
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
