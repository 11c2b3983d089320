"""The embedding's lookup and its gradient."""

import pytest
import torch

from pithtrain.ops.embedding import add_rows, embedding
from tests.agreement import assert_close, randn
from tests.ops.weights import added, leaf, new_weight


@pytest.mark.parametrize("view", ["contiguous", "a slice"])
def test_embedding_and_its_gradient(view: str) -> None:
    tokens = torch.tensor([[3, 3, 0, 5, 3], [0, 3, 6, 6, 1]])  # repeated within and across sequences; 2 and 4 never
    tokens = tokens[:, :-1] if view == "a slice" else tokens
    weight = new_weight(7, 6)
    hidden = embedding(tokens, weight)
    upstream = randn(tokens.shape[1], 2, 6, seed=1).transpose(0, 1)
    oracle = leaf(weight.value)
    (grad,) = torch.autograd.grad(oracle[tokens], oracle, upstream.double())
    assert torch.equal(hidden, weight.value[tokens])
    hidden.backward(upstream)
    assert_close(added(weight), grad)
    unused = [row for row in range(7) if row not in tokens]
    assert {2, 4} <= set(unused) and not added(weight)[unused].any()
    embedding(tokens, weight).backward(upstream)
    assert_close(added(weight), 2 * grad, "gradients add up")


def test_rows_add_in_token_order() -> None:
    for values, total in (((2.0**24, 1.0, -(2.0**24)), 0.0), ((2.0**24, -(2.0**24), 1.0), 1.0)):
        buffer = torch.zeros(2, 3)
        add_rows(buffer, torch.tensor([1, 1, 1]), torch.tensor(values)[:, None].expand(3, 3))
        assert torch.equal(buffer, torch.tensor([0.0, total])[:, None].expand(2, 3))
