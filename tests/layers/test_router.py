"""Which experts a token goes to, and with what weight."""

import pytest
import torch
from torch import Tensor

from pithtrain.layers.router import Balanced, Learned, Replayed, Router, Routing, topk_gap, topk_lowest_index
from pithtrain.ops.linear import Compute
from spec.reference.router import Routing as Expected
from spec.reference.router import count_tokens_per_expert, route
from tests.agreement import assert_close, randn
from tests.ops.weights import added, gradients, leaf, new_weight

T, D = 40, 9
SIZES = [(8, 2), (7, 3), (6, 6), (1, 1), (5, 1), (12, 5), (48, 11)]


def new_router(num_experts: int, top_k: int, norm_topk_prob: bool = True, seed: int = 1) -> Router:
    return Router(new_weight(num_experts, D, seed=seed), top_k, norm_topk_prob)


def tokens() -> Tensor:
    return randn(T, D).requires_grad_()


def assert_routed(got: Routing, expected: Expected) -> None:
    assert torch.equal(got.topk_expert_ids, expected.topk_expert_ids)
    assert_close(got.topk_weights, expected.topk_weights, "weights")
    assert_close(got.probs, expected.probs, "probabilities")
    assert_close(got.logsumexp, expected.logsumexp, "logsumexp")


def assert_gradients(
    router: Router, x: Tensor, got: Routing, expected: Expected, oracle: tuple[Tensor, Tensor]
) -> None:
    """Through the weights, the probabilities and the logsumexp at once, each by its own upstream gradient."""

    def scalar(routing: Routing | Expected) -> Tensor:
        dtype = routing.probs.dtype
        parts = (routing.topk_weights, routing.probs, routing.logsumexp)
        return sum(
            ((part * randn(*part.shape, seed=i).to(dtype)).sum() for i, part in enumerate(parts)), x.new_zeros(())
        )

    grad_x, grad_weight = torch.autograd.grad(scalar(expected), oracle)
    assert_close(torch.autograd.grad(scalar(got), x)[0], grad_x)
    assert_close(added(router.weight), grad_weight)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (7, 3)])
def test_router_is_the_reference(num_experts: int, top_k: int, norm_topk_prob: bool) -> None:
    router, x = new_router(num_experts, top_k, norm_topk_prob), tokens()
    oracle = leaf(x), leaf(router.weight.value)
    got, expected = router(x, 10, Learned(), Compute()), route(*oracle, top_k, norm_topk_prob)
    assert_routed(got, expected)
    if norm_topk_prob:
        assert_close(got.topk_weights.sum(-1), torch.ones(T))
    assert_gradients(router, x, got, expected, oracle)


@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
def test_any_number_of_experts(num_experts: int, top_k: int) -> None:
    router, x = new_router(num_experts, top_k, norm_topk_prob=False), tokens()
    oracle = leaf(x), leaf(router.weight.value)
    bias = randn(num_experts, std=0.1)
    for choice, reference_bias in ((Learned(), None), (Learned(bias), bias.double())):
        got = router(x, 10, choice, Compute())
        assert_routed(got, route(*oracle, top_k, False, reference_bias))
        assert_distinct(got.topk_expert_ids, num_experts)


def assert_distinct(ids: Tensor, num_experts: int) -> None:
    assert ids.dtype == torch.int64 and bool(((ids >= 0) & (ids < num_experts)).all())
    assert all(len(set(row)) == ids.shape[1] for row in ids.tolist()), "an expert was chosen twice"


def test_ties_go_to_the_lowest_expert() -> None:
    scores = torch.tensor(
        [
            [0.2, 0.2, 0.2, 0.2, 0.2],
            [0.1, 0.3, 0.1, 0.3, 0.2],
            [0.0, 0.0, 0.5, 0.0, 0.5],
            [0.0, 1.0, 0.0, 0.0, 0.0],
        ]
    )
    expected = [[0, 1, 2], [1, 3, 4], [2, 4, 0], [1, 0, 2]]
    assert topk_lowest_index(scores, 3).tolist() == expected
    assert topk_lowest_index(scores.repeat(60, 1), 3).tolist() == expected * 60
    coarse = torch.randint(3, (500, 37), generator=torch.Generator().manual_seed(0)).tolist()
    ranked = [sorted(range(37), key=lambda expert: (-row[expert], expert))[:9] for row in coarse]
    assert topk_lowest_index(torch.tensor(coarse, dtype=torch.float32), 9).tolist() == ranked
    nothing_left = torch.tensor([[-torch.inf, -1.0, -torch.inf], [torch.nan, -0.0, 0.0]])
    assert topk_lowest_index(nothing_left, 3).tolist() == [[1, 0, 2], [0, 1, 2]]

    router, x = new_router(6, 2), tokens()
    router.weight.value.zero_()  # every expert is as probable as every other
    assert router(x, 10, Learned(), Compute()).topk_expert_ids.tolist() == [[0, 1]] * T
    router.weight.value.copy_(randn(3, D).repeat_interleave(2, 0))  # experts in equal pairs: the lower first
    even_then_odd = router(x, 10, Learned(), Compute()).topk_expert_ids
    assert torch.equal(even_then_odd[:, 1], even_then_odd[:, 0] + 1) and not (even_then_odd[:, 0] % 2).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 3), (8, 8)])
def test_a_spoilt_row_still_names_distinct_experts(value: float, num_experts: int, top_k: int) -> None:
    """So that exchanges stay whole until the step is found not finite and skipped. Other rows are as they were."""
    router, x = new_router(num_experts, top_k), tokens().detach()
    clean = router(x, 10, Learned(), Compute())
    x[[0, 17, T - 1]] = value
    spoilt = router(x, 10, Learned(), Compute())
    assert_distinct(spoilt.topk_expert_ids, num_experts)
    kept = torch.tensor([row not in (0, 17, T - 1) for row in range(T)])
    assert torch.equal(spoilt.topk_expert_ids[kept], clean.topk_expert_ids[kept])
    assert torch.equal(spoilt.topk_weights[kept], clean.topk_weights[kept])


@pytest.mark.parametrize(("num_experts", "top_k", "length"), [(8, 2, 12), (7, 3, 10), (6, 6, 5), (5, 1, 20)])
def test_forced_balance(num_experts: int, top_k: int, length: int) -> None:
    router, x = new_router(num_experts, top_k), tokens()[: 40 // length * length].detach().requires_grad_()
    got = router(x, length, Balanced(), Compute())
    oracle = leaf(x), leaf(router.weight.value)
    expected = route(*oracle, top_k, True, None, got.topk_expert_ids)
    assert_routed(got, expected)
    assert_gradients(router, x, got, expected, oracle)
    assert_distinct(got.topk_expert_ids, num_experts)
    ids = got.topk_expert_ids.view(-1, length, top_k)
    assert torch.equal(ids, ids[:1].expand_as(ids)), "the choice depends on the position alone"
    counts = count_tokens_per_expert(ids[0], num_experts)
    assert counts.max() - counts.min() <= 1
    router.weight.value.neg_()
    assert torch.equal(router(x, length, Balanced(), Compute()).topk_expert_ids, got.topk_expert_ids)


def test_replayed_routing() -> None:
    router, x = new_router(7, 3), tokens()
    ids = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(i))[:3] for i in range(T)])
    got = router(x, 10, Replayed(ids), Compute())
    oracle = leaf(x), leaf(router.weight.value)
    expected = route(*oracle, 3, True, None, ids)
    assert torch.equal(got.topk_expert_ids, ids)
    assert not torch.equal(router(x, 10, Learned(), Compute()).topk_expert_ids, ids)
    assert_routed(got, expected)
    assert_gradients(router, x, got, expected, oracle)


def test_bias_takes_part_in_the_choice_only() -> None:
    router, x = new_router(7, 3), tokens()
    bias = torch.tensor([0.0, 0.3, -0.2, 0.0, 0.5, -0.9, 0.1]).requires_grad_()
    oracle = leaf(x), leaf(router.weight.value)
    got, expected = router(x, 10, Learned(bias), Compute()), route(*oracle, 3, True, bias.detach().double())
    assert_routed(got, expected)
    plain = router(x, 10, Learned(), Compute())
    assert not torch.equal(got.topk_expert_ids, plain.topk_expert_ids), "the bias never mattered"
    assert torch.equal(got.probs, plain.probs)
    assert_gradients(router, x, got, expected, oracle)
    router(x, 10, Learned(bias), Compute()).topk_weights.square().sum().backward()
    assert bias.grad is None
    same = router(x, 10, Learned(torch.full((7,), 0.25)), Compute())
    assert torch.equal(same.topk_weights, plain.topk_weights), "a bias common to all changes nothing"


def test_a_bias_smaller_than_bf16_can_hold_still_matters() -> None:
    router, x = new_router(4, 1), torch.zeros(1, D)
    bias = torch.tensor([0.25, 0.25, 0.25 + 2.0**-12, 0.25])
    assert router(x, 1, Learned(bias), Compute()).topk_expert_ids.tolist() == [[2]]


def test_router_is_fp32() -> None:
    """bf16 hidden states: the product and all after it is in fp32, as if they had been fp32."""
    router, x = new_router(7, 3), randn(T, D).bfloat16().requires_grad_()
    got = router(x, 10, Learned(torch.zeros(7)), Compute())
    for tensor in (got.topk_weights, got.probs, got.logsumexp):
        assert tensor.dtype == torch.float32
    oracle = leaf(x), leaf(router.weight.value)
    expected = route(*oracle, 3, True)
    assert_routed(got, expected)
    assert_gradients_of_weight(router, got, expected, oracle[1])


def assert_gradients_of_weight(router: Router, got: Routing, expected: Expected, oracle: Tensor) -> None:
    upstream = randn(T, 3, seed=8)
    (grad,) = gradients(expected.topk_weights, [oracle], upstream)
    got.topk_weights.backward(upstream)
    assert_close(added(router.weight), grad)


def test_gap_is_the_smallest_distance_to_the_best_left_out() -> None:
    scores = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.125]])
    assert topk_gap(scores, 1).item() == pytest.approx(0.2)
    assert topk_gap(scores, 2).item() == pytest.approx(0.025)
    assert topk_gap(scores, 3).item() == float("inf")


def test_gap_is_that_of_the_scores_that_choose() -> None:
    """With a bias, of the biased scores; without a choice to make, infinite."""
    router, probs = new_router(3, 1), torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]])
    bias = torch.tensor([0.0, 0.25, 0.0])
    assert router.gap(probs, Learned()).item() == pytest.approx(0.2)
    assert router.gap(probs, Learned(bias)).item() == pytest.approx(0.05)
    assert router.gap(probs, Balanced()).item() == float("inf")
    assert router.gap(probs, Replayed(torch.zeros(2, 1, dtype=torch.int64))).item() == float("inf")
