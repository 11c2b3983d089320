"""Balance losses and the z-loss through a whole step on one rank: values, and every parameter's gradient.

Labels are all ignored, so that nothing hides the gradients; the oracle differentiates the losses' definitions.
"""

from dataclasses import replace

import pytest
import torch

from pithtrain import step
from pithtrain.data import Batch
from pithtrain.layers.balance import BalanceKind, Objective, load_fraction, scope_gradient, sequence_gradient
from pithtrain.ops.linear import Compute
from tests.agreement import assert_agree, assert_close
from tests.whole_model import expect, grads_of, new_batch, new_trainee, split

B, S = 4, 9


def batch_of(padded: bool) -> Batch:
    """Sequences of unequal lengths, the third of padding alone; no labels."""
    batch = new_batch(B, S)
    batch.labels.fill_(-100)
    if not padded:
        return batch
    padding = torch.arange(S)[None] >= torch.tensor([S, 4, 0, 7])[:, None]
    return replace(batch, padding=padding)


def check(objective: Objective, n: int, padded: bool) -> step.Gradients:
    trainee, batch = new_trainee(S), batch_of(padded)
    choices = step.learned(trainee, n, None)
    result = step.gradients(trainee, split(batch, n), objective, choices, Compute())
    expected = expect(trainee, batch, objective, n)
    assert torch.equal(result.num_tokens_per_expert, expected.counts)
    assert result.loss == 0.0
    assert result.balance_loss == pytest.approx(expected.balance_loss.item(), rel=1e-5, abs=0)
    assert result.z_loss == pytest.approx(expected.z_loss.item(), rel=1e-5, abs=0)
    assert_agree(grads_of(trainee, result), expected.grads, f"{objective}, {n} micro-batches")
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_sequence_loss_is_the_reference(n: int, padded: bool) -> None:
    assert check(Objective("sequence", 0.7), n, padded).balance_loss > 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_micro_batch_loss_is_the_reference(n: int, padded: bool) -> None:
    assert check(Objective("micro_batch", 0.7), n, padded).balance_loss > 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_global_batch_loss_is_the_reference(n: int, padded: bool) -> None:
    assert check(Objective("global_batch", 0.7), n, padded).balance_loss > 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_z_loss_is_the_reference(n: int, padded: bool) -> None:
    result = check(Objective(z_coef=0.3), n, padded)
    assert result.z_loss > 0 and result.balance_loss == 0.0


@pytest.mark.parametrize("kind", ["sequence", "micro_batch", "global_batch"])
def test_balance_and_z_loss_add_up(kind: BalanceKind) -> None:
    check(Objective(kind, 0.7, 0.3), 2, padded=True)


@pytest.mark.parametrize("objective", [Objective("none", 0.5, 0.0), Objective("sequence", 0.0, 0.0)])
def test_a_coefficient_of_zero_leaves_its_loss_out(objective: Objective) -> None:
    result = check(objective, 2, padded=False)
    assert result.balance_loss == 0.0 and result.norm == 0.0


def test_perfect_balance_gives_the_coefficient() -> None:
    """Whatever the probabilities: they add up to one. In each of the two sparse layers."""
    trainee, batch = new_trainee(10), new_batch(4, 10)
    for kind in ("sequence", "micro_batch", "global_batch"):
        choices = step.balanced(trainee, 2)
        result = step.gradients(trainee, split(batch, 2), Objective(kind, 0.25), choices, Compute())
        assert result.num_tokens_per_expert.tolist() == [[20] * 6] * 2
        assert result.balance_loss == pytest.approx(2 * 0.25, rel=1e-6)


def test_load_fraction_by_hand() -> None:
    counts, tokens = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 0]]), torch.tensor([2, 0])
    fraction = load_fraction(counts, tokens, top_k=2)
    assert fraction.dtype == torch.float64
    assert fraction.tolist() == [[3.0, 1.0, 0.0, 0.0], [0.0] * 4]


def test_gradients_by_hand() -> None:
    """Two sequences of 2 and 1 tokens of a batch of 5; then a scope of 4 tokens whose slice has 2, of 3 slices."""
    counts = torch.tensor([[[2, 0], [0, 1]]])
    got = sequence_gradient(counts, torch.tensor([2, 1]), top_k=1, num_sequences=5)
    assert got.dtype == torch.float32
    assert_close(got, torch.tensor([[[2 / 2 / 5, 0.0], [0.0, 2 / 1 / 5]]]))
    got = scope_gradient(torch.tensor([[3, 1]]), tokens=4, top_k=1, slice_tokens=2, num_microbatches=3)
    assert got.dtype == torch.float32
    assert_close(got, torch.tensor([[[1.5 / 2 / 3, 0.5 / 2 / 3]]]))
