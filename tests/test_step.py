"""The train step on one rank against the whole model in float64: gradients, updates, evaluation."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain import step
from pithtrain.data import Batch
from pithtrain.layers.balance import BalanceKind, Objective
from pithtrain.layers.router import Replayed
from pithtrain.ops.linear import Compute
from pithtrain.optim import SGD, AdamW, Optimizer
from pithtrain.parallel.mesh import Axis
from pithtrain.parallel.transport import Transport
from spec.reference.optim import clip_by_global_norm, sgd_step
from spec.reference.router import update_expert_bias
from tests.agreement import assert_agree, assert_close, randn
from tests.whole_model import ARCH, expect, grads_of, new_batch, new_trainee, split

B, S = 4, 9
BIAS = randn(2, ARCH.num_experts, seed=9, std=0.1)
MIXED = Objective("sequence", 0.05, 0.01)


def gradients(
    trainee: step.Trainee, batch: Batch, objective: Objective, n: int = 1, bias: Tensor | None = None
) -> step.Gradients:
    choices = step.learned(trainee, n, bias)
    return step.gradients(trainee, split(batch, n), objective, choices, Compute())


def ids_of(result: step.Gradients, layer: int) -> Tensor:
    """The expert ids of one sparse layer for the whole batch, [T, K]."""
    return torch.cat([chosen[layer] for chosen in result.chosen])


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("tied", "biased"), [(False, True), (True, False)])
def test_micro_batches_add_up(n: int, tied: bool, biased: bool) -> None:
    """Labels are spread unevenly over the micro-batches: one has a single label. Buffers hold garbage before."""
    arch = replace(ARCH, tie_word_embeddings=tied)
    trainee, batch, bias = new_trainee(S, arch), new_batch(B, S), BIAS if biased else None
    for bucket in trainee.shard.buckets.values():
        bucket.grads.fill_(float("nan"))
    result = gradients(trainee, batch, MIXED, n, bias)
    expected = expect(trainee, batch, MIXED, 1, bias)
    assert result.num_labels == int((batch.labels != -100).sum())
    assert result.loss == pytest.approx(expected.loss.item(), rel=1e-6)
    assert result.balance_loss == pytest.approx(expected.balance_loss.item(), rel=1e-5)
    assert result.z_loss == pytest.approx(expected.z_loss.item(), rel=1e-5)
    assert torch.equal(result.num_tokens_per_expert, expected.counts)
    for layer, ids in enumerate(expected.ids):
        assert torch.equal(ids_of(result, layer), ids.flatten(0, 1))
    assert len(result.chosen) == n and 0 < result.gap < 1
    assert_agree(grads_of(trainee, result), expected.grads, f"{n} micro-batches")
    for name, square in result.square_norms.items():
        assert square == pytest.approx(float(expected.grads[name].square().sum()), rel=2e-5), name
    assert result.norm == pytest.approx(math.sqrt(sum(result.square_norms.values()))) and result.finite


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    trainee, batch = new_trainee(S), new_batch(B, S)
    batch.labels[: B // 2] = -100
    result, expected = gradients(trainee, batch, Objective(), 2), expect(trainee, batch)
    assert result.loss == pytest.approx(expected.loss.item(), rel=1e-6)
    assert_agree(grads_of(trainee, result), expected.grads)


def test_no_label_at_all_gives_zero_not_nan() -> None:
    trainee, batch = new_trainee(S), new_batch(B, S)
    batch.labels.fill_(-100)
    result = gradients(trainee, batch, Objective(), 2)
    assert (result.loss, result.norm, result.num_labels, result.finite) == (0.0, 0.0, 0, True)


KINDS: list[step.Execution] = [
    step.Execution("interleaved", 3, "experts"),
    step.Execution("zbv"),
    step.Execution("dualpipev", recompute="layer"),
]


@pytest.mark.parametrize("execution", KINDS, ids=lambda execution: execution.schedule)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_and_deferral_change_nothing_on_one_rank(execution: step.Execution, tied: bool) -> None:
    """ "zbv" and "dualpipev" leave weight gradients for later and run stages of several micro-batches in turn."""
    arch, batch = replace(ARCH, tie_word_embeddings=tied), new_batch(B, S)
    plain, staged = new_trainee(S, arch), new_trainee(S, arch, execution=execution)
    assert len(plain.stages) == 1 and len(staged.stages) == (execution.chunks or 2)
    objective = Objective("global_batch", 0.05, 0.01)
    expected, got = (gradients(trainee, batch, objective, 4, BIAS) for trainee in (plain, staged))
    for field in ("loss", "balance_loss", "z_loss", "norm"):
        assert getattr(got, field) == pytest.approx(getattr(expected, field), rel=1e-6), field
    assert torch.equal(got.num_tokens_per_expert, expected.num_tokens_per_expert)
    assert [row for row in range(2) if not torch.equal(ids_of(got, row), ids_of(expected, row))] == []
    assert_agree(grads_of(staged, got), grads_of(plain, expected), str(execution))
    assert step.evaluate(staged, split(batch, 2), BIAS) == step.evaluate(plain, split(batch, 2), BIAS)


def test_a_queue_that_nobody_would_drain_is_refused() -> None:
    trainee, batch = new_trainee(S), new_batch(B, S)
    with pytest.raises(AssertionError, match="the schedule says which weight gradients wait"):
        step.gradients(trainee, [batch], MIXED, step.learned(trainee, 1, None), Compute(deferred=[]))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_experts_takes_a_step(tied: bool) -> None:
    """Balance losses are zero, counts and biases empty, gradients the reference's."""
    arch = replace(ARCH, sparse_layers=(False,) * ARCH.num_layers, tie_word_embeddings=tied)
    trainee, batch = new_trainee(S, arch), new_batch(B, S)
    update = step.train_step(
        trainee,
        AdamW.create(trainee.shard, 0.9, 0.95, 1e-8, 0.1),
        split(batch, 2),
        MIXED,
        lr=0.1,
        updates=0,
        clip_norm=None,
        expert_bias=torch.zeros(0, ARCH.num_experts),
        bias_rate=0.1,
    )
    result = update.gradients
    assert update.applied and (result.balance_loss, result.z_loss, result.gap) == (0.0, 0.0, math.inf)
    assert result.num_tokens_per_expert.shape == (0, ARCH.num_experts)
    assert update.expert_bias is not None and update.expert_bias.shape == (0, ARCH.num_experts)
    assert_agree(grads_of(trainee, result), expect(new_trainee(S, arch), batch).grads)


def padded(batch: Batch, more: int, seed: int) -> Batch:
    """The batch with `more` positions of arbitrary tokens at the end of each sequence, marked as padding."""
    sequences, length = batch.tokens.shape
    junk = torch.randint(ARCH.vocab_size, (sequences, more), generator=torch.Generator().manual_seed(seed))
    tokens, labels = torch.cat([batch.tokens, junk], 1), F.pad(batch.labels, (0, more), value=-100)
    return Batch(tokens, labels, (torch.arange(length + more) >= length).expand(sequences, -1))


@pytest.mark.parametrize("kind", ["sequence", "micro_batch", "global_batch"])
def test_padding_changes_nothing(kind: BalanceKind) -> None:
    """Losses, gradients, counts and the biases after a step, with 1 and 2 micro-batches."""
    objective, batch = Objective(kind, 0.5, 0.1), new_batch(B, S)
    for n, more in ((1, 6), (2, 1)):
        plain, wide = new_trainee(S), new_trainee(S + more)
        updates = [
            step.train_step(
                trainee,
                SGD(trainee.shard),
                split(some, n),
                objective,
                lr=0.1,
                updates=0,
                clip_norm=None,
                expert_bias=BIAS,
                bias_rate=0.25,
            )
            for trainee, some in ((plain, batch), (wide, padded(batch, more, seed=n)))
        ]
        expected, got = (update.gradients for update in updates)
        assert got.num_labels == expected.num_labels
        for field in ("loss", "balance_loss", "z_loss", "norm"):
            assert getattr(got, field) == pytest.approx(getattr(expected, field), rel=1e-5), field
        assert torch.equal(got.num_tokens_per_expert, expected.num_tokens_per_expert)
        assert_agree(grads_of(wide, got), grads_of(plain, expected), f"{kind}, {n} micro-batches")
        before, after = (update.expert_bias for update in updates)
        assert before is not None and after is not None and torch.equal(before, after)
        assert not torch.equal(before, BIAS)


def test_replayed_routing_through_a_step() -> None:
    """Ids of one run given to another with other weights: used as they are, with gradients."""
    batch, n = new_batch(B, S), 2
    recorded = gradients(new_trainee(S, seed=8), batch, Objective(), n).chosen
    trainee = new_trainee(S)
    choices = [[Replayed(rows[row]) for row in range(2)] for rows in recorded]
    result = step.gradients(trainee, split(batch, n), MIXED, choices, Compute())
    ids = [torch.cat([rows[row] for rows in recorded]) for row in range(2)]
    expected = expect(trainee, batch, MIXED, n, ids=ids)
    own = expect(trainee, batch)
    assert not torch.equal(expected.ids[0], own.ids[0]), "both runs chose the same"
    assert torch.equal(result.num_tokens_per_expert, expected.counts)
    assert_agree(grads_of(trainee, result), expected.grads)


def weights_of(trainee: step.Trainee) -> dict[str, Tensor]:
    return {name: trainee.shard.whole(trainee.shard.masters(), name) for name in trainee.shard.placements}


@pytest.mark.parametrize("clip_norm", [None, 0.01, 1e6])
def test_a_step_moves_weights_and_bias_as_the_reference(clip_norm: float | None) -> None:
    trainee, batch = new_trainee(S), new_batch(B, S)
    expected, before = expect(trainee, batch, MIXED, 2, BIAS), weights_of(trainee)
    optimizer = SGD(trainee.shard, weight_decay=0.2)
    update = step.train_step(
        trainee,
        optimizer,
        split(batch, 2),
        MIXED,
        lr=0.5,
        updates=0,
        clip_norm=clip_norm,
        expert_bias=BIAS,
        bias_rate=2.0**-10,
    )
    grads = expected.grads
    if clip_norm is not None:
        clipped, whole_norm = clip_by_global_norm(list(grads.values()), clip_norm)
        grads = dict(zip(grads, clipped, strict=True))
        assert (clip_norm < float(whole_norm)) == (clip_norm == 0.01)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.grads.values()))
    assert update.applied and update.gradients.norm == pytest.approx(norm, rel=1e-5), "the norm before clipping"
    for name, weight in before.items():
        decay = 0.0 if name.endswith("norm") else 0.2
        assert_close(weights_of(trainee)[name], sgd_step(weight.double(), grads[name], 0.5, decay), name)
    moved = [
        update_expert_bias(bias.double(), counts, 2.0**-10) for bias, counts in zip(BIAS, expected.counts, strict=True)
    ]
    assert update.expert_bias is not None and update.expert_bias.dtype == torch.float32
    assert torch.equal(update.expert_bias, torch.stack(moved).float())


@dataclass(frozen=True, eq=False)
class Spoilt(Transport):
    """Puts one value into what an axis reduces."""

    axis: str = "expert"
    value: float = math.nan

    def reduce_scatter(self, tensor: Tensor, axis: Axis) -> Tensor:
        part = super().reduce_scatter(tensor, axis)
        if axis.name == self.axis:
            part[3] = self.value
        return part


def spoil_weight(name: str, value: float) -> Callable[[], step.Trainee]:
    def make() -> step.Trainee:
        trainee = new_trainee(S)
        trainee.shard.weights()[name].value.view(-1)[-1] = value
        return trainee

    return make


SPOILT: dict[str, Callable[[], step.Trainee]] = {
    "a NaN weight": spoil_weight("layers.0.attention.o", math.nan),
    "an infinite expert": spoil_weight("layers.2.experts.down", math.inf),
    "an infinite router weight": spoil_weight("layers.0.router", math.inf),
    "a NaN head": spoil_weight("head", math.nan),
    "a NaN in an expert's gradient only": lambda: new_trainee(S, transport=Spoilt()),
    "infinity in a dense gradient only": lambda: new_trainee(S, transport=Spoilt(axis="dense", value=-math.inf)),
}


@pytest.mark.parametrize("make", SPOILT.values(), ids=SPOILT.keys())
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_nonfinite_step_is_skipped(make: Callable[[], step.Trainee], kind: str) -> None:
    """Weights, moments and biases keep their bytes."""
    trainee = make()
    optimizer: Optimizer = SGD(trainee.shard, 0.1)
    if kind == "adamw":
        optimizer = AdamW.create(trainee.shard, 0.9, 0.95, 1e-8, 0.1)
        for seed, flats in enumerate(optimizer.state().values()):
            for flat in flats.values():
                flat.copy_(randn(flat.shape[0], seed=seed).abs())
    kept = [*trainee.shard.masters().values(), *(f for flats in optimizer.state().values() for f in flats.values())]
    before = [flat.clone().view(torch.int32) for flat in kept]
    bias = BIAS.clone()
    update = step.train_step(
        trainee,
        optimizer,
        split(new_batch(B, S), 2),
        MIXED,
        lr=0.1,
        updates=3,
        clip_norm=1.0,
        expert_bias=bias,
        bias_rate=0.1,
    )
    assert not update.applied and not update.gradients.finite
    for flat, bits in zip(kept, before, strict=True):
        assert torch.equal(flat.view(torch.int32), bits)
    assert update.expert_bias is not None and torch.equal(update.expert_bias, BIAS) and torch.equal(bias, BIAS)


def test_a_finite_step_after_a_skipped_one_is_as_if_it_had_not_been() -> None:
    trainees = [new_trainee(S), new_trainee(S)]
    batch, bad = new_batch(B, S), new_batch(B, S, seed=1)
    for trainee, spoil in zip(trainees, (True, False), strict=True):
        optimizer = AdamW.create(trainee.shard, 0.9, 0.95, 1e-8, 0.1)
        if spoil:
            objective = Objective(z_coef=math.inf)
            skipped = step.train_step(trainee, optimizer, [bad], objective, lr=0.1, updates=0, clip_norm=1.0)
            assert not skipped.applied
        assert step.train_step(trainee, optimizer, [batch], MIXED, lr=0.1, updates=0, clip_norm=1.0).applied
    first, second = (weights_of(trainee) for trainee in trainees)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


def test_evaluation_is_the_reference_and_changes_nothing() -> None:
    """Batches of unequal numbers of labels: the mean is over labels, not over batches."""
    trainee, batch = new_trainee(S + 2), new_batch(B, S)
    expected = expect(trainee, batch, expert_bias=BIAS)
    for bucket in trainee.shard.buckets.values():
        bucket.grads.fill_(7.0)
    before, bias = weights_of(trainee), BIAS.clone()
    assert step.evaluate(trainee, split(batch, 4), bias) == pytest.approx(expected.loss.item(), rel=1e-6)
    assert step.evaluate(trainee, [padded(batch, 2, seed=0)], bias) == pytest.approx(expected.loss.item(), rel=1e-6)
    assert torch.equal(bias, BIAS)
    assert all(bool((bucket.grads == 7.0).all()) for bucket in trainee.shard.buckets.values())
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(trainee).items())
    batch.labels.fill_(-100)
    assert step.evaluate(trainee, [batch]) == 0.0


def test_totals_count_labels_tokens_and_sequences() -> None:
    trainee, batch = new_trainee(S + 3), padded(new_batch(B, S), 3, seed=0)
    totals = step.count(trainee, split(batch, 2))
    assert (totals.labels, totals.slice_tokens) == (int((batch.labels != -100).sum()), (2 * S, 2 * S))
    assert totals.num_sequences == B


def test_norms_by_room() -> None:
    squares = {
        "embedding": 1.0,
        "layers.0.attention_norm": 4.0,
        "layers.0.attention.qkv": 9.0,
        "layers.11.attention.o": 16.0,
        "layers.0.attention.q_norm": 2.0,
        "layers.0.mlp_norm": 1.0,
        "layers.0.router": 25.0,
        "layers.0.experts.gate_up": 36.0,
        "layers.1.mlp.down": 49.0,
        "norm": 4.0,
        "head": 64.0,
    }
    assert step.rooms(squares) == {
        "embedding": 1.0,
        "norm": 3.0,
        "attention": math.sqrt(27.0),
        "router": 5.0,
        "experts": 6.0,
        "mlp": 7.0,
        "head": 8.0,
    }
