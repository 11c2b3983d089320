"""Dense and grouped products in three parts: forward, input gradient, weight gradient."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pithtrain.ops.linear import (
    Compute,
    Groups,
    add_grouped_weight_gradient,
    grouped_linear,
    grouped_vector,
    linear,
    multiply_by_grouped_mm,
    multiply_by_loop,
)
from pithtrain.ops.parameter import Weight
from pithtrain.ops.permute import permute, plan
from tests.agreement import assert_close, randn
from tests.ops.weights import STARTED, added, gradients, leaf, new_weight

CPU = torch.device("cpu")
SIZES = [(0, 3, 1, 17, 0), (5,), (0, 0, 9), (16, 0, 33), (1, 1, 1), (0, 0), (7, 0)]


def inputs(*shape: int, transposed: bool = False) -> Tensor:
    x = randn(*shape, seed=1)
    return (x.transpose(0, 1).contiguous().transpose(0, 1) if transposed else x).requires_grad_()


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5), (0, 5)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_and_its_gradients(shape: tuple[int, ...], transposed: bool) -> None:
    x, weight = inputs(*shape, transposed=transposed), new_weight(11, 5, seed=2)
    output = linear(x, weight, Compute())
    upstream = randn(*output.shape, seed=3)
    oracle = leaf(x), leaf(weight.value)
    expected = oracle[0] @ oracle[1].T
    grad_x, grad_weight = gradients(expected, oracle, upstream)
    assert_close(output, expected)
    assert_close(gradients(output, [x], upstream)[0], grad_x)
    assert_close(added(weight), grad_weight)

    twice = gradients(linear(x, weight, Compute()), [x], upstream.expand_as(output))
    assert_close(twice[0], grad_x)
    assert_close(added(weight), 2 * grad_weight, "gradients add up")


def test_weight_gradients_add_up_in_fp32() -> None:
    weight = Weight(randn(3, 4), torch.full((3, 4), 1.0))
    x = torch.full((1, 4), 2.0**-20, requires_grad=True)
    for _ in range(4):
        linear(x, weight, Compute()).sum().backward()
    assert torch.equal(weight.grad, torch.full((3, 4), 1 + 4 * 2.0**-20))


def by_group(x: Tensor, value: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The definition, in the inputs' dtype: each group's rows times its matrix."""
    return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(sizes), value, strict=True)])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_products_agree(sizes: tuple[int, ...]) -> None:
    rows, count = sum(sizes), len(sizes)
    x, value, grad = randn(rows, 8), randn(count, 12, 8, seed=1), randn(rows, 12, seed=2)
    groups, oracle = Groups.of(sizes, CPU, Compute()), (leaf(x), leaf(value))
    expected = by_group(*oracle, sizes)
    grad_x, grad_value = gradients(expected, oracle, grad)
    for multiply in (multiply_by_loop, multiply_by_grouped_mm):
        assert_close(multiply(x, value, groups), expected, multiply.__name__)
        assert_close(multiply(grad, value.transpose(-2, -1), groups), grad_x, multiply.__name__)
    weight = Weight(value, torch.full((count, 12, 8), STARTED))
    add_grouped_weight_gradient(weight, x, grad, groups)
    add_grouped_weight_gradient(weight, x, grad, groups)
    assert_close(weight.grad - STARTED, 2 * grad_value)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_linear_and_its_gradients(sizes: tuple[int, ...]) -> None:
    x, weight = inputs(sum(sizes), 5, transposed=True), new_weight(len(sizes), 7, 5, seed=2)
    output = grouped_linear(x, weight, Groups.of(sizes, CPU, Compute()), Compute())
    upstream = randn(7, sum(sizes), seed=3).T  # not contiguous
    oracle = leaf(x), leaf(weight.value)
    expected = by_group(*oracle, sizes)
    grad_x, grad_weight = gradients(expected, oracle, upstream)
    assert_close(output, expected)
    assert_close(gradients(output, [x], upstream)[0], grad_x)
    for slot, expert in enumerate(added(weight)):
        assert_close(expert, grad_weight[slot], f"group {slot}")


def test_idle_experts_have_zero_gradients() -> None:
    sizes = (0, 3, 0, 2, 0)
    groups, x, grad = Groups.of(sizes, CPU, Compute()), randn(5, 8), randn(5, 12, seed=1)
    weight = new_weight(5, 12, 8)
    grouped_linear(x.requires_grad_(), weight, groups, Compute()).backward(grad)
    assert [bool(expert.any()) for expert in added(weight)] == [False, True, False, True, False]
    nothing = torch.zeros(0, 8, requires_grad=True)
    weight = new_weight(5, 12, 8)
    grouped_linear(nothing, weight, Groups.of((0,) * 5, CPU, Compute()), Compute()).sum().backward()
    assert not added(weight).any() and nothing.grad is not None and nothing.grad.shape == (0, 8)


def test_an_idle_expert_spoils_nothing() -> None:
    """Its own weights may be anything: they are not read."""
    sizes, x = (2, 0, 3), inputs(5, 6)
    weight = new_weight(3, 4, 6)
    weight.value[1] = float("nan")
    output = grouped_linear(x, weight, Groups.of(sizes, CPU, Compute()), Compute())
    (grad_x,) = gradients(output, [x], randn(5, 4))
    assert output.isfinite().all() and grad_x.isfinite().all() and added(weight).isfinite().all()


def test_every_row_belongs_to_a_group() -> None:
    with pytest.raises(AssertionError, match="groups hold 4 rows, got 5"):
        grouped_linear(randn(5, 8), new_weight(2, 4, 8), Groups.of((1, 3), CPU, Compute()), Compute())


def test_groups_end_where_the_next_begins() -> None:
    groups = Groups.of((0, 3, 2), CPU, Compute())
    assert groups.sizes == (0, 3, 2)
    assert groups.ends.dtype == torch.int32 and groups.ends.tolist() == [0, 3, 5]


def run_products(compute: Compute) -> tuple[list[Weight], Tensor]:
    """A dense and a grouped product in one graph, forward and backward: their weights and the input's gradient."""
    dense, grouped = new_weight(8, 6, seed=1), new_weight(3, 4, 8, seed=2)
    x = inputs(9, 6)
    hidden = linear(x, dense, compute)
    output = grouped_linear(hidden, grouped, Groups.of((4, 0, 5), CPU, Compute()), compute)
    (grad_x,) = gradients(output, [x], randn(9, 4, seed=3))
    return [dense, grouped], grad_x


def test_deferred_weight_gradients_are_the_same() -> None:
    queue: list[Callable[[], None]] = []
    now, grad_now = run_products(Compute())
    later, grad_later = run_products(Compute(deferred=queue))
    assert torch.equal(grad_now, grad_later)
    assert len(queue) == 2
    assert not any(added(weight).any() for weight in later), "a queued gradient ran before the queue was drained"
    for add in queue:
        add()
    for at_once, drained in zip(now, later, strict=True):
        assert at_once.grad.any() and torch.equal(at_once.grad, drained.grad)
        assert not drained.grad.requires_grad


def test_a_queued_weight_gradient_does_not_keep_the_graph() -> None:
    """What only the graph held (here a permutation, big at real sizes) is freed while the queue waits."""
    queue: list[Callable[[], None]] = []
    compute = Compute(deferred=queue)
    dense, grouped = new_weight(8, 6), new_weight(2, 4, 8)
    for product in (
        lambda x: linear(x, dense, compute),
        lambda x: grouped_linear(linear(x, dense, compute), grouped, Groups.of((1, 3), CPU, Compute()), compute),
    ):
        permutation = plan(torch.tensor([[0, 1], [1, 1]]), 2, 4)
        held = weakref.ref(permutation)
        output = product(permute(inputs(2, 6), permutation))
        output.sum().backward()
        del output, permutation
        gc.collect()
        assert held() is None
    assert len(queue) == 3


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_vectors_and_their_gradient(sizes: tuple[int, ...]) -> None:
    """Each row has its group's vector; a micro-batch's gradient adds to those before it, at once or from the queue."""
    weight, upstream, compute = new_weight(len(sizes), 5), randn(sum(sizes), 5, seed=3), Compute(deferred=[])
    expected = torch.cat([part.sum(0, keepdim=True) for part in upstream.double().split(sizes)])
    for at_work in (Compute(), compute):
        rows = grouped_vector(weight, Groups.of(sizes, CPU, at_work), at_work)
        assert torch.equal(rows, weight.value[torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))])
        rows.backward(upstream)
        assert_close(added(weight), expected)
    compute.drain()
    assert_close(added(weight), 2 * expected)
