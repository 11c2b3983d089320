"""Routed experts and what balance losses need of a layer."""

import pytest
import torch
from torch import Tensor

from pithtrain.layers.experts.gated import SwiGLUExperts
from pithtrain.layers.moe import LocalExperts, chosen_experts, measure_load
from pithtrain.layers.router import Learned, Router, Routing
from pithtrain.ops.linear import Compute
from spec.reference.experts import moe, routed_experts
from spec.reference.router import count_tokens_per_expert
from tests.agreement import assert_close, randn
from tests.ops.weights import added, gradients, leaf, new_weight

T, D, F = 30, 6, 5


def new_experts(num_experts: int) -> LocalExperts:
    experts = SwiGLUExperts(new_weight(num_experts, 2 * F, D, seed=2), new_weight(num_experts, D, F, seed=3))
    return LocalExperts(experts, num_experts)


def sizes_of(ids: Tensor, num_experts: int) -> tuple[int, ...]:
    return tuple(int((ids == expert).sum()) for expert in range(num_experts))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 3), (4, 4), (5, 1), (1, 1)])
def test_moe_is_the_reference(num_experts: int, top_k: int, norm_topk_prob: bool) -> None:
    """Router and experts together, on one rank: the output, and every gradient, expert by expert."""
    router = Router(new_weight(num_experts, D, seed=1), top_k, norm_topk_prob)
    local, x, upstream = new_experts(num_experts), randn(T, D).requires_grad_(), randn(T, D, seed=4)
    routing = router(x, 10, Learned(), Compute())
    ids = routing.topk_expert_ids
    output = local(x, routing.topk_weights, ids, sizes_of(ids, num_experts), Compute())
    weights = [router.weight, local.experts.gate_up, local.experts.down]
    oracle = [leaf(x), *(leaf(weight.value) for weight in weights)]
    expected, expected_routing = moe(oracle[0], oracle[1], oracle[2], oracle[3], top_k, norm_topk_prob)
    assert torch.equal(ids, expected_routing.topk_expert_ids)
    assert_close(output, expected)
    assert output.dtype == torch.float32
    grads = gradients(expected, oracle, upstream)
    assert_close(gradients(output, [x], upstream)[0], grads[0])
    if num_experts == 1 or (top_k == 1 and norm_topk_prob):  # the one weight is 1 whatever the router says
        assert added(router.weight).abs().max() < 1e-5 and grads[1].abs().max() < 1e-12
    else:
        assert_close(added(router.weight), grads[1], "router")
    for weight, grad in zip(weights[1:], grads[2:], strict=True):
        for expert in range(num_experts):
            assert_close(added(weight)[expert], grad[expert], f"expert {expert}")


def test_all_tokens_to_one_expert_drops_none() -> None:
    """The others idle, their weights not read and their gradients exact zeros."""
    local, x = new_experts(4), randn(T, D).requires_grad_()
    ids, weights = torch.full((T, 1), 2), randn(T, 1, seed=5)
    oracle = leaf(x), leaf(local.experts.gate_up.value), leaf(local.experts.down.value)
    expected = routed_experts(oracle[0], weights.double(), ids, oracle[1], oracle[2])
    idle = torch.tensor([0, 1, 3])
    local.experts.gate_up.value[idle] = local.experts.down.value[idle] = float("nan")
    output, upstream = local(x, weights, ids, (0, 0, T, 0), Compute()), randn(T, D, seed=4)
    grads = gradients(expected, oracle, upstream)
    assert_close(output, expected)
    assert_close(gradients(output, [x], upstream)[0], grads[0])
    for weight, grad in zip((local.experts.gate_up, local.experts.down), grads[1:], strict=True):
        assert_close(added(weight)[2], grad[2])
        assert not added(weight)[idle].any()


def test_experts_elsewhere_take_no_row() -> None:
    """Entries of -1, rows with none at all: their weights are not read and get an exact zero."""
    local, x = new_experts(3), randn(5, D).requires_grad_()
    ids = torch.tensor([[-1, 2], [0, -1], [-1, -1], [2, 0], [-1, -1]])
    weights = randn(5, 2, seed=5).masked_fill(ids < 0, float("nan")).requires_grad_()
    output, upstream = local(x, weights, ids, (2, 0, 2), Compute()), randn(5, D, seed=4)
    oracle = leaf(x), leaf(weights), leaf(local.experts.gate_up.value), leaf(local.experts.down.value)
    kept = torch.where(ids < 0, 0.0, oracle[1])
    expected = routed_experts(oracle[0], kept, ids.clamp(min=0), oracle[2], oracle[3])
    grads = gradients(expected, oracle, upstream)
    assert_close(output, expected)
    assert not output[[2, 4]].any()
    grad_x, grad_weights = gradients(output, [x, weights], upstream)
    assert_close(grad_x, grads[0])
    assert not grad_weights[ids < 0].any()
    assert_close(grad_weights, grads[1].masked_fill(ids < 0, 0.0))
    assert_close(added(local.experts.gate_up), grads[2])
    assert_close(added(local.experts.down), grads[3])


def test_no_rows_at_all() -> None:
    local, x = new_experts(3), torch.zeros(0, D, requires_grad=True)
    weights = torch.zeros(0, 2, requires_grad=True)
    output = local(x, weights, torch.zeros(0, 2, dtype=torch.int64), (0, 0, 0), Compute())
    grads = gradients(output, [x, weights], torch.zeros(0, D))
    assert output.shape == grads[0].shape == (0, D) and grads[1].shape == (0, 2)
    assert not added(local.experts.gate_up).any() and not added(local.experts.down).any()


def routed(num_experts: int, top_k: int) -> tuple[Routing, Tensor]:
    router, x = Router(new_weight(num_experts, D, seed=1), top_k, True), randn(T, D).requires_grad_()
    return router(x, 10, Learned(), Compute()), x


@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 3), (4, 4), (1, 1)])
def test_counts_leave_out_padding(num_experts: int, top_k: int) -> None:
    """Three sequences of ten: one whole, one that ends early, one of padding only."""
    routing, _ = routed(num_experts, top_k)
    padding = torch.zeros(3, 10, dtype=torch.bool)
    padding[1, 4:] = padding[2] = True
    load = measure_load(routing, 3, padding)
    ids = routing.topk_expert_ids.view(3, 10, top_k)
    assert load.num_tokens_per_expert.dtype == torch.int64
    for row in range(3):
        expected = count_tokens_per_expert(ids[row], num_experts, padding[row])
        assert torch.equal(load.num_tokens_per_expert[row], expected)
    assert load.num_tokens_per_expert.sum(1).tolist() == [10 * top_k, 4 * top_k, 0]
    everything = measure_load(routing, 3, None).num_tokens_per_expert
    assert torch.equal(everything.sum(0), count_tokens_per_expert(ids, num_experts))


@pytest.mark.parametrize("padded", [False, True])
def test_sums_leave_out_padding(padded: bool) -> None:
    routing, _ = routed(7, 3)
    padding = torch.zeros(3, 10, dtype=torch.bool)
    padding[1, 4:] = padding[2] = padded
    load = measure_load(routing, 3, padding if padded else None)
    kept = ~padding.double().bool()
    assert load.prob_sum.dtype == load.z_sum.dtype == torch.float32
    assert_close(load.prob_sum, (routing.probs.double().view(3, 10, 7) * kept[:, :, None]).sum(1))
    assert_close(load.z_sum, (routing.logsumexp.double().view(3, 10).square() * kept).sum())
    (grad_probs,) = torch.autograd.grad(load.prob_sum.sum(), routing.probs)
    assert torch.equal(grad_probs.view(3, 10, 7), kept[:, :, None].expand(3, 10, 7).float())


def test_chosen_experts_by_hand() -> None:
    assert chosen_experts(torch.tensor([[2, 0], [1, 2]]), 4).tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]
