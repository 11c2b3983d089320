"""The kernels of a row's copies: the reference's bits, or within a bound where sums round in another order."""

import pytest
import torch
from torch import Tensor

from pithtrain.ops import permute as operator
from pithtrain.ops.kernels.permute import spread_triton, sum_copies_triton
from pithtrain.ops.permute import plan, spread, sum_copies, unpermute, weighted_unpermute
from tests.agreement import randn
from tests.ops.test_permute import SLOTS, planned
from tests.ops.weights import gradients

MANY = torch.randint(-1, 5, (9, 3), generator=torch.Generator().manual_seed(0)).tolist()
CASES = [*SLOTS.values(), MANY, [[-1, 4]]]


def amid_nan(x: Tensor) -> Tensor:
    """x with NaN before and after it in memory."""
    nan = torch.full((2048,), float("nan"), dtype=x.dtype)
    return torch.cat([nan, x.flatten(), nan])[2048:-2048].view(x.shape)


def within(got: Tensor, terms: Tensor) -> None:
    """Of a sum of terms [.., n]: at most n * 2^-23 of the sum of their magnitudes from it."""
    excess = (got - terms.sum(-1)).abs() - terms.shape[-1] * 2.0**-23 * terms.abs().sum(-1)
    assert got.dtype == torch.float32 and not bool((~(excess <= 0)).any()), excess.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", CASES, ids=lambda slots: f"{len(slots)}x{len(slots[0])}")
@pytest.mark.parametrize("features", [5, 1031])
def test_sums_and_gradients(slots: list[list[int]], features: int, dtype: torch.dtype) -> None:
    permutation = planned(torch.tensor(slots))
    num_copies = permutation.rows.shape[0]
    copies, weights = amid_nan(randn(num_copies, features).to(dtype)), amid_nan(randn(num_copies, seed=1))
    for factors in (None, torch.exp2(weights.round())):
        expected = sum_copies(copies, permutation, factors)
        assert torch.equal(sum_copies_triton(copies, permutation, factors), expected)
    grad = amid_nan(randn(len(slots), features, seed=2).to(dtype))
    got, got_weights = spread_triton(grad, permutation, copies, weights)
    assert torch.equal(got, spread(grad, permutation, copies, weights)[0]) and got.dtype == dtype
    within(got_weights, copies.double() * grad[permutation.rows].double())


def test_weights_that_round() -> None:
    permutation = planned(torch.tensor([[0, 1, 2, 3, 4]] * 3))
    copies, weights = randn(15, 7), randn(15, seed=1)
    terms = (copies.double() * weights.double()[:, None])[permutation.copies].view(3, 5, 7).mT
    within(sum_copies_triton(copies, permutation, weights), terms)


def test_no_rows() -> None:
    nothing = plan(torch.zeros(0, 2, dtype=torch.int64), 5, 0)
    assert sum_copies_triton(randn(0, 5), nothing, None).shape == (0, 5)


def test_strides_do_not_matter() -> None:
    permutation = planned(torch.tensor(MANY))
    copies, grad = randn(7, permutation.rows.shape[0]), randn(7, len(MANY), seed=1)
    weights = randn(copies.shape[1], seed=2)
    across, plain = (copies.T, grad.T), (copies.T.contiguous(), grad.T.contiguous())
    assert torch.equal(*(sum_copies_triton(c, permutation, weights) for c, _ in (across, plain)))
    one, other = (spread_triton(g, permutation, c, weights) for c, g in (across, plain))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_copies_add_in_the_order_of_the_entries() -> None:
    """2^24 + 1 - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is 1; in bf16 only the result is rounded."""
    big = 2.0**24
    permutation = planned(torch.tensor([[0, 1, 2], [2, 1, 0]]))
    values = torch.tensor([[big, 1.0, -big], [big, -big, 1.0]]).flatten()[permutation.entries]
    ones = torch.ones(6, 3, dtype=torch.bfloat16)
    assert sum_copies_triton(values[:, None].contiguous(), permutation, None)[:, 0].tolist() == [0.0, 1.0]
    assert sum_copies_triton(ones, permutation, values)[:, 2].tolist() == [0.0, 1.0]


def test_the_public_functions_choose_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    permutation = planned(torch.tensor(MANY))
    copies, weights, upstream = randn(permutation.rows.shape[0], 6), randn(9, 3, seed=1), randn(9, 6, seed=2)

    def run() -> list[Tensor]:
        given = copies.clone().requires_grad_(), weights.clone().requires_grad_()
        output = weighted_unpermute(*given, permutation)
        return [unpermute(copies, permutation), output, *gradients(output, given, upstream)]

    by_reference = run()
    asked: list[Tensor] = []
    monkeypatch.setattr(operator, "use_triton", lambda x: asked.append(x) is None)
    for got, expected in zip(run(), by_reference, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert len(asked) == 3
