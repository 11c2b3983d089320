"""RMSNorm against its definition."""

import pytest
import torch

from pithtrain.ops.rms_norm import rms_norm
from spec.reference.norm import rms_norm as reference
from tests.agreement import assert_close, randn
from tests.ops.weights import added, gradients, leaf, new_weight


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4, 6), (1, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_is_the_reference(shape: tuple[int, ...], eps: float) -> None:
    x, weight = randn(*shape).requires_grad_(), new_weight(shape[-1], seed=1)
    output, upstream = rms_norm(x, weight, eps), randn(*shape, seed=2)
    oracle = leaf(x), leaf(weight.value)
    expected = reference(*oracle, eps)
    grad_x, grad_weight = gradients(expected, oracle, upstream)
    assert_close(output, expected)
    assert_close(gradients(output, [x], upstream)[0], grad_x)
    assert_close(added(weight), grad_weight)
    gradients(rms_norm(x, weight, eps), [x], upstream)
    assert_close(added(weight), 2 * grad_weight, "gradients add up")


@pytest.mark.parametrize("view", ["a part of the heads", "transposed", "transposed gradient"])
def test_rms_norm_of_any_strides(view: str) -> None:
    x, weight = randn(2, 3, 5, 6), new_weight(6, seed=1)
    x = {"a part of the heads": x[:, :, 1:4], "transposed": x.transpose(0, 2)}.get(view, x).requires_grad_()
    upstream = randn(*x.shape, seed=2)
    if view == "transposed gradient":
        upstream = upstream.transpose(0, 1).contiguous().transpose(0, 1)
    oracle = leaf(x), leaf(weight.value)
    expected = reference(*oracle, 1e-3)
    grad_x, grad_weight = gradients(expected, oracle, upstream)
    output = rms_norm(x, weight, 1e-3)
    assert_close(output, expected)
    assert_close(gradients(output, [x], upstream)[0], grad_x)
    assert_close(added(weight), grad_weight)


def test_a_row_of_zeros_stays_finite() -> None:
    x, weight = torch.zeros(2, 6, requires_grad=True), new_weight(6)
    output = rms_norm(x, weight, 1e-6)
    (grad,) = gradients(output, [x], randn(2, 6))
    assert not output.any() and grad.isfinite().all() and not added(weight).any()
