"""Recomputation: the same gradients to the bit, one choice of experts, less memory, and what it costs in products."""

from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from golden.replay import CountCosts
from pithtrain import passes, step
from pithtrain.layers.balance import Objective
from pithtrain.ops.linear import Compute
from pithtrain.parallel.tape import drive
from tests.agreement import assert_agree
from tests.whole_model import ARCH, new_batch, new_trainee, split, whole_of

B, S = 4, 9
WAYS: tuple[passes.Recompute, ...] = get_args(passes.Recompute)
MIXED = Objective("global_batch", 0.05, 0.01)
COPIES = B * S * ARCH.top_k * sum(ARCH.sparse_layers)


def trainee_of(recompute: passes.Recompute) -> step.Trainee:
    return new_trainee(S, execution=step.Execution(recompute=recompute))


def gradients(trainee: step.Trainee, n: int = 2) -> step.Gradients:
    return step.gradients(trainee, split(new_batch(B, S), n), MIXED, step.learned(trainee, n, None), Compute())


@pytest.mark.parametrize("recompute", WAYS[1:])
def test_a_step_is_the_same_to_the_bit(recompute: passes.Recompute) -> None:
    """Gradients, losses, and what is counted: once, though segments run twice."""
    expected, got = gradients(trainee_of("none")), gradients(trainee_of(recompute))
    for name, flat in expected.flat.items():
        assert torch.equal(got.flat[name], flat), name
    for field in ("loss", "balance_loss", "z_loss", "norm", "gap"):
        assert getattr(got, field) == getattr(expected, field), field
    assert torch.equal(got.num_tokens_per_expert, expected.num_tokens_per_expert)
    assert int(got.num_tokens_per_expert.sum()) == COPIES


def forward(trainee: step.Trainee, scale: float | None = 0.05) -> passes.Forwarded:
    setting = passes.Setting(trainee.mesh, Compute(), Compute(), trainee.execution.recompute)
    (choices,), batch = step.learned(trainee, 1, None), new_batch(B, S)
    inputs = passes.Inputs(batch.tokens, batch.labels, None, trainee.tables, choices, scale)
    (done,) = drive(trainee.transport, passes.forward(whole_of(trainee), inputs, None, setting))
    return done


def backward(trainee: step.Trainee, done: passes.Forwarded) -> dict[str, Tensor]:
    drive(trainee.transport, passes.backward(whole_of(trainee), done, None, {}, torch.tensor(0.01)))
    return {name: weight.grad for name, weight in trainee.shard.weights().items()}


def test_experts_are_chosen_once() -> None:
    """All scores tie, but for rounding; then the weights move by a rounding, and a second choice would be another."""
    plain, again = trainee_of("none"), trainee_of("layer")
    routers = [name for name in plain.shard.placements if name.endswith("router")]
    for trainee in (plain, again):
        for name in routers:
            trainee.shard.weights()[name].value[:] = trainee.shard.weights()[name].value[0].clone()
    expected, first = backward(plain, forward(plain)), forward(again)
    for seed, name in enumerate(routers):
        value = again.shard.weights()[name].value
        value += 1e-7 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    other = forward(again, scale=None)
    assert all((first.loads[row].topk_expert_ids != other.loads[row].topk_expert_ids).any() for row in range(2))
    assert_agree(backward(again, first), expected)


def costs(recompute: passes.Recompute) -> CountCosts:
    """Of a whole step, its model apart."""
    trainee = trainee_of(recompute)
    with CountCosts() as counter:
        gradients(trainee)
    return counter


def bytes_kept(recompute: passes.Recompute) -> int:
    """What the tape holds after a forward pass: saved for backward and kept as inputs, each storage once."""
    trainee, kept = trainee_of(recompute), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        done = forward(trainee)
    kept += [tensor for piece in done.tape.pieces for tensor in piece._inputs]
    weights = {bucket.values.untyped_storage().data_ptr() for bucket in trainee.shard.buckets.values()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for pointer, size in storages.items() if pointer not in weights)


def test_each_way_keeps_less() -> None:
    """Whole layers keep, of each layer, no more than its input and what its exchanges brought."""
    peaks = [costs(recompute).peak_bytes for recompute in WAYS]
    assert peaks[0] > peaks[1] > peaks[2]
    none, experts, layer = (bytes_kept(recompute) for recompute in WAYS)
    tokens, hidden = B * S, ARCH.hidden_size
    assert none - experts > COPIES * (2 * ARCH.moe_intermediate_size + hidden) * 4, "gate, up, and each copy's row"
    per_layer = 5 * tokens * hidden * 4 + 3 * tokens * (ARCH.num_experts + ARCH.top_k) * 8
    assert layer < experts < none and layer < (ARCH.num_layers + 1) * per_layer


def test_it_costs_the_products_of_the_forward_pass_again() -> None:
    """Experts alone: three products a copy. Whole layers: all but the head's."""

    none, experts, layer = (costs(way).flops for way in WAYS)
    with CountCosts() as forward_alone:
        step.evaluate(trainee_of("none"), [new_batch(B, S)])
    assert experts - none == 2 * COPIES * 3 * ARCH.hidden_size * ARCH.moe_intermediate_size
    assert layer - none == forward_alone.flops - 2 * B * S * ARCH.hidden_size * ARCH.vocab_size
