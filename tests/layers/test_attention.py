"""Causal grouped-query attention with QK-norm against its definition."""

import pytest
import torch

from pithtrain.layers.attention import Attention
from pithtrain.ops.linear import Compute
from pithtrain.ops.rope import rope_tables
from spec.reference.attention import attention as reference
from tests.agreement import assert_close, randn
from tests.ops.weights import added, gradients, leaf, new_weight

D, EPS, THETA = 10, 1e-3, 100.0


def new_attention(heads: int, groups: int, head_dim: int) -> Attention:
    return Attention(
        qkv=new_weight((heads + 2 * groups) * head_dim, D, seed=1, std=0.5),
        o=new_weight(D, heads * head_dim, seed=2, std=0.5),
        q_norm=new_weight(head_dim, seed=3),
        k_norm=new_weight(head_dim, seed=4),
        num_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        eps=EPS,
    )


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(6, 2, 8), (4, 4, 6), (5, 1, 4), (1, 1, 2)])
@pytest.mark.parametrize("length", [1, 7])
def test_attention_is_the_reference(heads: int, groups: int, head_dim: int, length: int) -> None:
    layer = new_attention(heads, groups, head_dim)
    x, upstream = randn(2, length, D).requires_grad_(), randn(2, length, D, seed=5)
    tables = rope_tables(length, head_dim, THETA, torch.device("cpu"))
    output = layer(x, tables, Compute())
    weights = [layer.qkv, layer.o, layer.q_norm, layer.k_norm]
    oracle = [leaf(x), *(leaf(weight.value) for weight in weights)]
    hidden, qkv, o, q_norm, k_norm = oracle
    expected = reference(hidden, qkv, o, q_norm, k_norm, heads, groups, THETA, EPS)
    grads = gradients(expected, oracle, upstream)
    assert_close(output, expected)
    (grad_x,) = gradients(output, [x], upstream)
    if length == 1:  # one position attends to itself whatever the scores: queries and keys have no gradient
        query_key = (heads + groups) * head_dim
        assert added(layer.qkv)[:query_key].abs().max() < 1e-6
        assert_close(added(layer.qkv)[query_key:], grads[1][query_key:], "values")
        assert_close(added(layer.o), grads[2], "o")
        assert_close(grad_x, grads[0])
        return
    assert_close(grad_x, grads[0])
    for name, weight, grad in zip(("qkv", "o", "q_norm", "k_norm"), weights, grads[1:], strict=True):
        assert_close(added(weight), grad, name)


def test_a_position_sees_no_later_one() -> None:
    layer, tables = new_attention(6, 2, 8), rope_tables(6, 8, THETA, torch.device("cpu"))
    hidden = randn(1, 6, D)
    changed = hidden.clone()
    changed[:, 4:] += 1
    before, after = (layer(x, tables, Compute()) for x in (hidden, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


def test_sequences_of_a_batch_do_not_meet() -> None:
    layer, tables = new_attention(6, 2, 8), rope_tables(5, 8, THETA, torch.device("cpu"))
    hidden = randn(3, 5, D)
    together = layer(hidden, tables, Compute())
    for row in range(3):
        assert_close(layer(hidden[row : row + 1], tables, Compute())[0], together[row])
