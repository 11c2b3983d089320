"""The dense feed-forward layer against its definition."""

import pytest

from pithtrain.layers.mlp import DenseMLP
from pithtrain.ops.linear import Compute
from spec.reference.experts import swiglu as reference
from tests.agreement import assert_close, randn
from tests.ops.weights import added, gradients, leaf, new_weight


@pytest.mark.parametrize("shape", [(2, 3, 10), (5, 10)], ids=str)
def test_dense_mlp_is_the_reference(shape: tuple[int, ...]) -> None:
    mlp = DenseMLP(new_weight(2 * 7, 10, seed=1), new_weight(10, 7, seed=2))
    x, upstream = randn(*shape).requires_grad_(), randn(*shape, seed=3)
    oracle = leaf(x), leaf(mlp.gate_up.value), leaf(mlp.down.value)
    output, expected = mlp(x, Compute()), reference(*oracle)
    grad_x, grad_gate_up, grad_down = gradients(expected, oracle, upstream)
    assert_close(output, expected)
    assert_close(gradients(output, [x], upstream)[0], grad_x)
    assert_close(added(mlp.gate_up), grad_gate_up, "gate_up")
    assert_close(added(mlp.down), grad_down, "down")
