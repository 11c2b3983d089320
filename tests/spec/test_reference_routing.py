"""Routing, counts, the bias update and the balance losses by hand, and what each loss is invariant to."""

import math

import pytest
import torch
from torch import Tensor

from spec.reference.losses import (
    global_batch_balance_loss,
    micro_batch_balance_loss,
    sequence_balance_loss,
    token_mean_cross_entropy,
    z_loss,
)
from spec.reference.router import Routing, count_tokens_per_expert, route, update_expert_bias


def f64(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def log_probs_as_weight(*probs: float) -> Tensor:
    """A router weight that gives these probabilities to the token [1.0]."""
    return torch.tensor(probs, dtype=torch.float64).log()[:, None]


def routed_batch(sequences: int = 4, length: int = 6, num_experts: int = 5, top_k: int = 2) -> Routing:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(sequences * length, 3, dtype=torch.float64, generator=generator)
    weight = torch.randn(num_experts, 3, dtype=torch.float64, generator=generator)
    flat = route(hidden, weight, top_k, norm_topk_prob=True)
    return Routing(*(t.reshape(sequences, length, *t.shape[1:]) for t in flat))


def test_route_takes_the_largest_and_renormalises() -> None:
    weight = log_probs_as_weight(0.1, 0.2, 0.4, 0.3)
    plain = route(f64([1.0]), weight, 2, norm_topk_prob=False)
    renormalised = route(f64([1.0]), weight, 2, norm_topk_prob=True)
    assert plain.topk_expert_ids.tolist() == [[2, 3]]
    assert torch.allclose(plain.topk_weights, f64([0.4, 0.3]))
    assert torch.allclose(renormalised.topk_weights, f64([4 / 7, 3 / 7]))
    assert torch.allclose(plain.probs, f64([0.1, 0.2, 0.4, 0.3]))


def test_equal_scores_go_to_the_lowest_expert() -> None:
    assert route(f64([1.0]), log_probs_as_weight(*[1 / 6] * 6), 3, True).topk_expert_ids.tolist() == [[0, 1, 2]]
    uneven = route(f64([1.0]), log_probs_as_weight(0.2, 0.1, 0.3, 0.1, 0.3), 4, True)
    assert uneven.topk_expert_ids.tolist() == [[2, 4, 0, 1]]


def test_bias_takes_part_in_the_choice_only() -> None:
    weight = log_probs_as_weight(0.5, 0.3, 0.2)
    biased = route(f64([1.0]), weight, 2, norm_topk_prob=False, expert_bias=torch.tensor([-0.4, 0.0, 0.15]).double())
    assert biased.topk_expert_ids.tolist() == [[2, 1]]
    assert torch.allclose(biased.topk_weights, f64([0.2, 0.3]))


def test_given_choice_keeps_its_own_probabilities() -> None:
    given = route(f64([1.0]), log_probs_as_weight(0.5, 0.3, 0.2), 2, True, topk_expert_ids=torch.tensor([[2, 0]]))
    assert torch.allclose(given.topk_weights, f64([2 / 7, 5 / 7]))


def test_logsumexp_is_of_the_logits() -> None:
    routing = route(f64([2.0]), f64([1.0], [0.5]), 1, True)
    assert routing.logsumexp.item() == pytest.approx(math.log(math.exp(2) + math.exp(1)))


def test_counts_leave_out_padding() -> None:
    ids = torch.tensor([[[0, 3], [3, 1]], [[3, 0], [2, 0]]])
    padding = torch.tensor([[False, False], [False, True]])
    assert count_tokens_per_expert(ids, 5).tolist() == [3, 1, 1, 3, 0]
    assert count_tokens_per_expert(ids, 5, padding).tolist() == [2, 1, 0, 3, 0]


def test_bias_moves_by_the_rate_towards_the_mean_load() -> None:
    bias = f64(0.5, 0.5, 0.5)
    moved = update_expert_bias(bias, torch.tensor([1, 3, 2]), 0.01)
    assert torch.allclose(moved, f64(0.51, 0.49, 0.5))


def test_sequence_balance_by_hand() -> None:
    probs = f64([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]], [[0.3, 0.4, 0.3], [0.2, 0.6, 0.2]])
    ids = torch.tensor([[[0], [0]], [[1], [1]]])
    # sequence 0: f = (3, 0, 0), P = (.6, .15, .25); sequence 1: f = (0, 3, 0), P_1 = .5
    assert sequence_balance_loss(probs, ids, 0.1).item() == pytest.approx(0.1 * (1.8 + 1.5) / 2)
    # without the second token of sequence 1: P_1 = .4
    padding = torch.tensor([[False, False], [False, True]])
    assert sequence_balance_loss(probs, ids, 0.1, padding).item() == pytest.approx(0.1 * (1.8 + 1.2) / 2)
    # one scope for the whole batch: f = (1.5, 1.5, 0), P = (.425, .325, .25)
    assert micro_batch_balance_loss(probs, ids, 0.1, 1).item() == pytest.approx(0.1 * 1.5 * 0.75)


def test_global_batch_balance_gathers_counts_over_slices() -> None:
    probs = f64([[0.7, 0.2, 0.1]], [[0.3, 0.4, 0.3]])
    ids = torch.tensor([[[0]], [[1]]])
    # slice 0: f = (3, 0, 0); slice 1: counts and tokens of both, f = (1.5, 1.5, 0), P of slice 1 only
    expected = (3 * 0.7 + 1.5 * 0.3 + 1.5 * 0.4) / 2
    assert global_batch_balance_loss(probs, ids, 1.0, 2).item() == pytest.approx(expected)


def test_balance_losses_agree_where_their_scopes_do() -> None:
    routing = routed_batch()
    whole = micro_batch_balance_loss(routing.probs, routing.topk_expert_ids, 1.0, 1)
    assert torch.equal(global_batch_balance_loss(routing.probs, routing.topk_expert_ids, 1.0, 1), whole)
    one_each = micro_batch_balance_loss(routing.probs, routing.topk_expert_ids, 1.0, 4)
    assert torch.allclose(one_each, sequence_balance_loss(routing.probs, routing.topk_expert_ids, 1.0))
    assert abs(one_each - whole) > 1e-3
    gathered = global_batch_balance_loss(routing.probs, routing.topk_expert_ids, 1.0, 2)
    assert abs(gathered - whole) > 1e-4


def test_balance_loss_of_an_even_load_is_its_coefficient() -> None:
    probs = torch.full((2, 4, 4), 0.25, dtype=torch.float64)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]]).expand(2, 4, 2)
    for loss in (
        sequence_balance_loss(probs, ids, 0.3),
        micro_batch_balance_loss(probs, ids, 0.3, 2),
        global_batch_balance_loss(probs, ids, 0.3, 2),
    ):
        assert loss.item() == pytest.approx(0.3)


def test_balance_gradient_is_the_load_of_each_expert_over_its_tokens() -> None:
    routing = routed_batch()
    probs = routing.probs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(micro_batch_balance_loss(probs, routing.topk_expert_ids, 1.0, 1), probs)
    counts = count_tokens_per_expert(routing.topk_expert_ids, 5).double()
    load = 5 * counts / (2 * 24)
    assert torch.allclose(grad, (load / 24).expand_as(grad))


def test_a_sequence_of_padding_adds_nothing() -> None:
    routing = routed_batch(sequences=2)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1] = True
    halved = sequence_balance_loss(routing.probs, routing.topk_expert_ids, 1.0, padding)
    first = sequence_balance_loss(routing.probs[:1], routing.topk_expert_ids[:1], 1.0)
    assert torch.allclose(halved, first / 2)


def test_z_loss_by_hand() -> None:
    logsumexp = f64([1.0, 2.0], [3.0, 4.0])
    assert z_loss(logsumexp, 0.1).item() == pytest.approx(0.1 * 30 / 4)
    padding = torch.tensor([[False, True], [False, False]])
    assert z_loss(logsumexp, 0.1, padding).item() == pytest.approx(0.1 * 26 / 3)


def test_cross_entropy_is_that_of_torch_with_ignored_labels() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, 6, 0], [-100, -100, 3, -100, 5]])
    logits.requires_grad_()
    ours = token_mean_cross_entropy(logits, labels)
    theirs = torch.nn.functional.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1))
    assert torch.allclose(ours, theirs, rtol=1e-14, atol=0)
    assert torch.allclose(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)), rtol=1e-12, atol=0)


def test_cross_entropy_of_ignored_labels_only_is_zero_with_zero_gradient() -> None:
    logits = torch.ones(1, 3, 4, dtype=torch.float64, requires_grad=True)
    loss = token_mean_cross_entropy(logits, torch.full((1, 3), -100))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logits)[0].abs().max() == 0
