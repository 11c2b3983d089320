"""Rows to slots and back."""

import pytest
import torch
from torch import Tensor

from pithtrain.ops.permute import Permutation, permute, plan, sum_copies, unpermute, weighted_unpermute
from tests.agreement import assert_close, randn
from tests.ops.weights import gradients, leaf

SLOTS = {
    "every entry names a slot": [[2, 0], [1, 2], [0, 1], [2, 1]],
    "entries name none": [[2, -1], [-1, 0], [-1, 2], [0, 2]],
    "rows without copies": [[-1, -1], [3, 1], [-1, -1], [-1, 1], [-1, -1]],
    "one slot": [[0], [0], [0]],
    "three of five": [[4, 0, 2], [1, 4, 3], [2, 1, -1]],
    "none before the last slot": [[-1, 4], [4, -1], [0, -1], [-1, 4]],
    "no copies": [[-1, -1], [-1, -1]],
}
FIVE = 5


def slots_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows)


def planned(slots: Tensor) -> Permutation:
    return plan(slots, FIVE, int((slots >= 0).sum()))


def copies_in_order(slots: Tensor) -> list[tuple[int, int]]:
    """The definition: (row, entry) of every copy, by slot, then row."""
    rows = slots.tolist()
    named = [(slot, row, k) for row, entries in enumerate(rows) for k, slot in enumerate(entries) if slot >= 0]
    return [(row, k) for _, row, k in sorted(named)]


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_permute_sorts_by_expert_stably(slots: list[list[int]]) -> None:
    ids = slots_of(slots)
    copies, permutation = copies_in_order(ids), planned(ids)
    assert permutation.entries.tolist() == [row * ids.shape[1] + k for row, k in copies]
    x = randn(ids.shape[0], 3)
    output = permute(x, permutation)
    assert output.shape == (len(copies), 3)
    for at, (row, _) in enumerate(copies):
        assert torch.equal(output[at], x[row])


@pytest.mark.parametrize("slots", [slots_of([[0, 1]] * 500), torch.full((700, 1), 3)], ids=["two", "one"])
def test_many_equal_slots_stay_in_row_order(slots: Tensor) -> None:
    rows = permute(torch.arange(float(slots.shape[0]))[:, None], planned(slots))
    assert rows[:, 0].tolist() == list(range(slots.shape[0])) * slots.shape[1]


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_move(rows: int) -> None:
    slots, x = torch.full((rows, 2), -1), randn(rows, 4).requires_grad_()
    permutation = planned(slots)
    copies = permute(x, permutation)
    weights = torch.ones(rows, 2, requires_grad=True)
    output = weighted_unpermute(copies, weights, permutation)
    assert copies.shape == (0, 4) and torch.equal(unpermute(copies, permutation), torch.zeros(rows, 4))
    assert torch.equal(output, torch.zeros(rows, 4))
    grads = gradients(output, [x, weights], torch.ones(rows, 4))
    assert torch.equal(grads[0], torch.zeros(rows, 4)) and torch.equal(grads[1], torch.zeros(rows, 2))


def selection(slots: Tensor) -> Tensor:
    """permute as a matrix in float64, [N, R]."""
    copies = copies_in_order(slots)
    matrix = torch.zeros(len(copies), slots.shape[0], dtype=torch.float64)
    for at, (row, _) in enumerate(copies):
        matrix[at, row] = 1
    return matrix


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_unpermute_is_the_transpose(slots: list[list[int]]) -> None:
    """Each is a matrix, the other's transpose; and so are their gradients."""
    ids = slots_of(slots)
    matrix, permutation = selection(ids), planned(ids)
    x, copies = randn(ids.shape[0], 3).requires_grad_(), randn(matrix.shape[0], 3, seed=1).requires_grad_()
    grad_copies, grad_x = randn(3, matrix.shape[0], seed=2).T, randn(3, ids.shape[0], seed=3).T
    assert_close(permute(x, permutation), matrix @ x.double())
    assert_close(gradients(permute(x, permutation), [x], grad_copies)[0], matrix.T @ grad_copies.double())
    assert_close(unpermute(copies, permutation), matrix.T @ copies.double())
    assert_close(gradients(unpermute(copies, permutation), [copies], grad_x)[0], matrix @ grad_x.double())


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_weighted_unpermute_and_its_gradients(slots: list[list[int]]) -> None:
    """Weights of entries that name no slot are never read, and get an exact zero."""
    ids = slots_of(slots)
    order, permutation = copies_in_order(ids), planned(ids)
    weights = randn(*ids.shape, seed=1).masked_fill(ids < 0, float("nan")).requires_grad_()
    copies = randn(len(order), 3, seed=2).requires_grad_()
    upstream = randn(3, ids.shape[0], seed=3).T
    oracle_copies, oracle_weights = leaf(copies), leaf(weights)
    expected = torch.zeros(ids.shape[0], 3, dtype=torch.float64)
    for at, (row, k) in enumerate(order):
        index = torch.tensor([row])
        expected = expected.index_add(0, index, (oracle_weights[row, k] * oracle_copies[at])[None])
    output = weighted_unpermute(copies, weights, permutation)
    grads = gradients(output, [copies, weights], upstream)
    assert_close(output, expected)
    assert not grads[1][ids < 0].any()
    if order:
        oracle = gradients(expected, [oracle_copies, oracle_weights], upstream)
        assert_close(grads[0], oracle[0])
        assert_close(grads[1], oracle[1])


def test_copies_add_in_the_order_of_the_entries() -> None:
    """Whatever order the slots have: 2^24 + 1 - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is 1."""
    big = 2.0**24
    slots = slots_of([[0, 1, 2], [2, 1, 0], [1, 2, 0]])
    values = torch.tensor([[big, 1.0, -big], [big, -big, 1.0], [1.0, big, -big]])
    permutation = planned(slots)
    copies = values.flatten()[permutation.entries][:, None].expand(9, 8).contiguous()
    assert unpermute(copies, permutation)[:, 0].tolist() == [0.0, 1.0, 0.0]
    weighted = weighted_unpermute(torch.ones(9, 8), values, permutation)
    assert weighted[:, 0].tolist() == [0.0, 1.0, 0.0]


def test_sums_are_fp32() -> None:
    """The last bit of an fp32 mantissa survives the sum; in bf16 or fp16 it would not."""
    slots = slots_of([[0, 1], [1, -1]])
    permutation = planned(slots)
    small = 2.0**-23
    values = torch.tensor([[1.0, small], [1.0 + small, 0.0]])
    copies = values.flatten()[permutation.entries][:, None].expand(3, 4).contiguous()
    for rows in (
        sum_copies(copies, permutation),
        unpermute(copies, permutation),
        weighted_unpermute(torch.ones(3, 4), values, permutation),
    ):
        assert rows.dtype == torch.float32
        assert torch.equal(rows, torch.full((2, 4), 1.0 + small))
