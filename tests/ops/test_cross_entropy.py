"""The loss fused with the head's product, a chunk at a time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pithtrain.ops.cross_entropy import CHUNK, IGNORED, head_loss
from pithtrain.ops.linear import Compute
from pithtrain.ops.parameter import Weight
from spec.reference.losses import token_mean_cross_entropy
from tests.agreement import assert_close, randn, relative_difference
from tests.ops.weights import added, leaf, new_weight


def labels_of(tokens: int, vocab: int, every: int) -> Tensor:
    """Labels with every `every`-th one ignored."""
    labels = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[::every] = IGNORED
    return labels


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
@pytest.mark.parametrize("every", [2, 3])
def test_head_loss_is_the_reference(tokens: int, every: int) -> None:
    vocab, hidden = 13, randn(tokens, 6, std=2.0)
    head, labels = new_weight(vocab, 6, seed=2), labels_of(tokens, 13, every)
    number = max(int((labels != IGNORED).sum()), 1)
    got = head_loss(hidden, head, labels, 1 / number, Compute())
    oracle = leaf(hidden), leaf(head.value)
    expected = token_mean_cross_entropy(oracle[0] @ oracle[1].T, labels)
    grad_hidden, grad_head = torch.autograd.grad(expected, oracle)
    assert got.grad is not None and got.loss.dtype == torch.float32
    assert_close(got.loss / number, expected, "the sum over labels, not scaled")
    assert_close(got.grad, grad_hidden)
    assert_close(added(head), grad_head)
    assert not got.grad[labels == IGNORED].any()
    head_loss(hidden, head, labels, 1 / number, Compute())
    assert_close(added(head), 2 * grad_head, "gradients add up")


def test_evaluation_leaves_no_gradient() -> None:
    hidden, head, labels = randn(CHUNK + 9, 6), new_weight(13, 6, seed=2), labels_of(CHUNK + 9, 13, 4)
    queue: list[Callable[[], None]] = []
    evaluated = head_loss(hidden, head, labels, None, Compute(deferred=queue))
    trained = head_loss(hidden, head, labels, 1.0, Compute(deferred=queue))
    assert evaluated.grad is None and torch.equal(evaluated.loss, trained.loss)
    assert not added(head).any() and len(queue) == 2


def test_no_label_no_loss_no_gradient() -> None:
    hidden, head = randn(CHUNK + 5, 6), new_weight(13, 6, seed=2)
    got = head_loss(hidden, head, torch.full((CHUNK + 5,), IGNORED), 1.0, Compute())
    assert got.loss.item() == 0.0 and got.grad is not None
    assert not got.grad.any() and not added(head).any()


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits_stay_finite(size: float) -> None:
    hidden, head = torch.tensor([[size]]), new_weight(3, 1)
    head.value.copy_(torch.tensor([[1.0], [-1.0], [0.5]]))
    got = head_loss(hidden, head, torch.tensor([1]), 1.0, Compute())
    assert got.loss.item() == (2e4 if size > 0 else 0.0)
    assert got.grad is not None and got.grad.isfinite().all() and added(head).isfinite().all()


def test_deferred_head_gradients_are_the_same() -> None:
    """Three chunks: each queued product keeps its own rows."""
    hidden, labels = randn(2 * CHUNK + 3, 6), labels_of(2 * CHUNK + 3, 13, 5)
    queue: list[Callable[[], None]] = []
    now, later = new_weight(13, 6, seed=2), new_weight(13, 6, seed=2)
    grad_now = head_loss(hidden, now, labels, 0.01, Compute()).grad
    grad_later = head_loss(hidden, later, labels, 0.01, Compute(deferred=queue)).grad
    assert grad_now is not None and grad_later is not None and torch.equal(grad_now, grad_later)
    assert not added(later).any()
    for add in queue:
        add()
    assert torch.equal(now.grad, later.grad)


def test_in_bf16_logits_and_the_loss_are_fp32() -> None:
    """Only the gradients that go on are rounded to bf16."""
    tokens, vocab = 2 * CHUNK + 77, 13
    hidden, labels = randn(tokens, 6, std=2.0).bfloat16(), labels_of(tokens, vocab, 3)
    head = Weight(randn(vocab, 6, seed=2).bfloat16(), torch.zeros(vocab, 6))
    got = head_loss(hidden, head, labels, 0.01, Compute("bf16"))
    oracle = leaf(hidden), leaf(head.value)
    expected = token_mean_cross_entropy(oracle[0] @ oracle[1].T, labels) * (labels != IGNORED).sum()
    grad_hidden, grad_head = torch.autograd.grad(0.01 * expected, oracle)
    assert_close(got.loss, expected)
    assert got.loss.dtype == torch.float32 and got.grad is not None and got.grad.dtype == torch.bfloat16
    assert relative_difference(got.grad, grad_hidden) < 2**-8
    assert relative_difference(head.grad, grad_head) < 2**-8
