"""The loss kernel against float64, and its gradient in the logits' place."""

import pytest
import torch
from torch import Tensor

from pithtrain.ops import cross_entropy as operator
from pithtrain.ops.cross_entropy import IGNORED, chunk_loss, head_loss
from pithtrain.ops.kernels.cross_entropy import chunk_loss_triton
from pithtrain.ops.linear import Compute
from spec.reference.losses import token_mean_cross_entropy
from tests.agreement import randn
from tests.ops.weights import added, leaf, new_weight

SCALE = 0.125


def inputs(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    labels[1::3] = IGNORED
    labels[-1] = vocabulary - 1
    memory = torch.full((rows + 2, vocabulary), float("nan"))  # on either side
    memory[1:-1] = randn(rows, vocabulary, std=4.0)
    return memory[1:-1], labels


@pytest.mark.parametrize("rows,vocabulary", [(7, 13), (1, 1), (4, 4096), (5, 9001)])
def test_definition(rows: int, vocabulary: int) -> None:
    logits, labels = inputs(rows, vocabulary)
    oracle, number = leaf(logits), int((labels != IGNORED).sum())
    expected = token_mean_cross_entropy(oracle, labels) * number
    (grad,) = torch.autograd.grad(expected * SCALE, oracle)
    evaluated, nothing = chunk_loss_triton(logits, labels, None)
    assert nothing is None and torch.equal(logits.double(), oracle.detach()), "evaluation reads only"
    loss, got = chunk_loss_triton(logits, labels, SCALE)
    assert got is logits and torch.equal(loss, evaluated) and loss.dtype == torch.float32
    error = 2.0**-24 * (24 + 4 * oracle.detach().abs().amax())  # of a logarithm, and so, relative, of a probability
    assert (loss - expected).abs() <= number * error
    probs = SCALE * oracle.detach().softmax(1)
    assert bool(((got - grad).abs() <= error * probs + 2.0**-24 * grad.abs() + 2.0**-126).all())
    assert not got[labels == IGNORED].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38])
def test_extreme_logits(value: float) -> None:
    """The reference's answer: what is not finite shows in its row and in the loss, and nowhere else."""
    logits, labels = randn(3, 5000), torch.tensor([2, 4999, IGNORED])
    logits[1, :4500] = value
    expected_loss, expected = chunk_loss(logits.clone(), labels, SCALE)
    loss, got = chunk_loss_triton(logits, labels, SCALE)
    assert got is not None and expected is not None
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8, equal_nan=True)
    assert bool(got[0].isfinite().all()) and not got[2].any()


def test_the_public_function_chooses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, labels = randn(5, 6), inputs(5, 11)[1]
    monkeypatch.setattr(operator, "CHUNK", 3)

    def run() -> tuple[Tensor, ...]:
        head = new_weight(11, 6, seed=2)
        got = head_loss(hidden, head, labels, SCALE, Compute())
        assert got.grad is not None
        return got.loss, got.grad, added(head)

    by_reference = run()
    asked: list[Tensor] = []
    monkeypatch.setattr(operator, "use_triton", lambda x: asked.append(x) is None)
    for got, expected in zip(run(), by_reference, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert len(asked) == 2, "once a chunk"
