"""Optimizers on flat shards, clipping, learning rates and routing biases against the reference.

Every rank's shard is stepped in this process: one rank, and a mesh of 2 x 2 in which slices cut parameters in two.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from pithtrain.ops.parameter import ParameterSpec
from pithtrain.optim import SGD, AdamW, LearningRate, Optimizer, clip, decay_parts, updated_bias
from pithtrain.parallel.shard import Flat, Shard
from pithtrain.parallel.transport import Transport
from spec.reference import schedule
from spec.reference.optim import adamw_step, clip_by_global_norm, sgd_step
from spec.reference.router import update_expert_bias
from tests.agreement import assert_close, randn
from tests.parallel.meshes import mesh_of

SPECS = [
    ParameterSpec("embedding", (13, 10), std=1.0),
    ParameterSpec("layers.0.attention_norm", (70,), decay=False, mean=1.0),
    ParameterSpec("layers.0.attention.qkv", (30, 10), std=1.0),
    ParameterSpec("layers.0.attention.q_norm", (6,), decay=False, mean=1.0),
    ParameterSpec("layers.0.router", (4, 10), std=1.0),
    ParameterSpec("layers.0.experts.gate_up", (4, 10, 10), expert=True, std=1.0),
    ParameterSpec("layers.0.experts.down", (4, 10, 5), expert=True, std=1.0),
    ParameterSpec("norm", (130,), decay=False, mean=1.0),
    ParameterSpec("head", (13, 10), std=1.0),
]
MESHES = [{"dp": 1, "ep": 1}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 1}]


class Ranks:
    """Every rank's shard of one mesh; values by name come from and go to all of them."""

    def __init__(self, dp: int, ep: int) -> None:
        meshes = [mesh_of(rank, dp=dp, ep=ep) for rank in range(dp * ep)]
        self.shards = [Shard.create(SPECS, mesh, Transport(), torch.device("cpu")) for mesh in meshes]

    def scatter(self, flats: list[Flat], values: dict[str, Tensor]) -> None:
        """Each rank keeps what it owns."""
        for shard, flat in zip(self.shards, flats, strict=True):
            for name, tensor in values.items():
                experts = shard.local_experts(name)
                shard.keep(flat, name, tensor if experts is None else tensor[experts.start : experts.stop])

    def gather(self, flats: list[Flat]) -> dict[str, Tensor]:
        """Whole tensors, cut out of the owners' slices laid end to end."""
        dense = torch.cat([flat["dense"] for flat in flats])
        owners: dict[int, list[Tensor]] = {}
        for shard, flat in zip(self.shards, flats, strict=True):
            owners.setdefault(shard.mesh.ep.index, []).append(flat["expert"])
        values = {}
        for name, place in self.shards[0].placements.items():
            buckets = [torch.cat(slices) for slices in owners.values()] if place.spec.expert else [dense]
            values[name] = torch.cat([bucket[place.start : place.stop].view(place.shape) for bucket in buckets])
        return values

    def masters(self) -> list[Flat]:
        return [shard.masters() for shard in self.shards]

    def new_flats(self) -> list[Flat]:
        return [{name: torch.zeros_like(flat) for name, flat in shard.masters().items()} for shard in self.shards]


def draw(seed: int) -> dict[str, Tensor]:
    return {spec.name: randn(*spec.shape, seed=100 * seed + i) for i, spec in enumerate(SPECS)}


def decay_of(spec: ParameterSpec, weight_decay: float) -> float:
    return weight_decay if spec.decay else 0.0


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("eps", "weight_decay"), [(1e-8, 0.1), (0.3, 0.0), (1e-3, 0.5)])
def test_adamw_is_the_reference(mesh: dict[str, int], eps: float, weight_decay: float) -> None:
    """Four updates at changing rates: weights by their change, and both moments."""
    ranks, start = Ranks(**mesh), draw(0)
    ranks.scatter(ranks.masters(), start)
    optimizers = [AdamW.create(shard, 0.8, 0.95, eps, weight_decay) for shard in ranks.shards]
    weights = {name: weight.double() for name, weight in start.items()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = dict(first)
    for updates, lr in enumerate((0.1, 0.3, 0.05, 0.2)):
        grads, flats = draw(1 + updates), ranks.new_flats()
        ranks.scatter(flats, grads)
        for optimizer, flat in zip(optimizers, flats, strict=True):
            optimizer.step(flat, lr, updates)
        for spec in SPECS:
            at, decay = spec.name, decay_of(spec, weight_decay)
            moments = grads[at].double(), first[at], second[at]
            weights[at], first[at], second[at] = adamw_step(
                weights[at], *moments, updates + 1, lr, 0.8, 0.95, eps, decay
            )
    got = ranks.gather(ranks.masters())
    for name, weight in weights.items():
        assert_close(got[name] - start[name], weight - start[name].double(), name)
    for kind, expected in (("exp_avg", first), ("exp_avg_sq", second)):
        moments_now = ranks.gather([optimizer.state()[kind] for optimizer in optimizers])
        for name, moment in expected.items():
            assert moments_now[name].dtype == torch.float32
            assert_close(moments_now[name], moment, f"{name}: {kind}")
    assert optimizers[0].state().keys() == {"exp_avg", "exp_avg_sq"}
    assert all(flat.dtype == torch.float32 for flats in ranks.masters() for flat in flats.values())


def test_bias_correction_counts_updates_from_before() -> None:
    """An optimizer that starts with moments and 7 updates behind it, as after a resume."""
    ranks, start, grads = Ranks(1, 1), draw(0), draw(1)
    ranks.scatter(ranks.masters(), start)
    optimizer = AdamW.create(ranks.shards[0], 0.8, 0.95, 1e-8, 0.1)
    first, second = draw(2), {name: tensor.square() for name, tensor in draw(3).items()}
    ranks.scatter([optimizer.exp_avg], first)
    ranks.scatter([optimizer.exp_avg_sq], second)
    (flat,) = ranks.new_flats()
    ranks.scatter([flat], grads)
    optimizer.step(flat, 0.1, 7)
    got = ranks.gather(ranks.masters())
    for spec in SPECS:
        at, decay = spec.name, decay_of(spec, 0.1)
        before = start[at].double(), grads[at].double(), first[at].double(), second[at].double()
        weight, _, _ = adamw_step(*before, 8, 0.1, 0.8, 0.95, 1e-8, decay)
        assert_close(got[at] - start[at], weight - start[at].double(), at)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_sgd_is_the_reference(mesh: dict[str, int], weight_decay: float) -> None:
    ranks, start, grads = Ranks(**mesh), draw(0), draw(1)
    ranks.scatter(ranks.masters(), start)
    flats = ranks.new_flats()
    ranks.scatter(flats, grads)
    for shard, flat in zip(ranks.shards, flats, strict=True):
        optimizer = SGD(shard, weight_decay)
        optimizer.step(flat, 0.3, 0)
        assert optimizer.state() == {}
    got = ranks.gather(ranks.masters())
    for spec in SPECS:
        weight, grad = start[spec.name].double(), grads[spec.name].double()
        expected = sgd_step(weight, grad, 0.3, decay_of(spec, weight_decay))
        assert_close(got[spec.name] - start[spec.name], expected - weight, spec.name)


def new_adamw(shard: Shard) -> Optimizer:
    return AdamW.create(shard, 0.9, 0.95, 1e-8, 0.5)


def new_sgd(shard: Shard) -> Optimizer:
    return SGD(shard, 0.5)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("new", [new_adamw, new_sgd])
def test_norms_do_not_decay(mesh: dict[str, int], new: Callable[[Shard], Optimizer]) -> None:
    """A gradient of zeros leaves them to the bit, whichever rank owns them; matrices shrink by lr times decay."""
    ranks, start = Ranks(**mesh), draw(0)
    ranks.scatter(ranks.masters(), start)
    for shard, flat in zip(ranks.shards, ranks.new_flats(), strict=True):
        new(shard).step(flat, 0.25, 0)
    for name, weight in ranks.gather(ranks.masters()).items():
        if name.endswith("norm"):
            assert torch.equal(weight, start[name]), name
        else:
            assert_close(weight, start[name] * (1 - 0.25 * 0.5), name)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_cover_each_shard_once(mesh: dict[str, int]) -> None:
    for shard in Ranks(**mesh).shards:
        covered = {name: torch.zeros(bucket.chunk) for name, bucket in shard.buckets.items()}
        for name, part, _ in decay_parts(shard):
            covered[name][part] += 1
        assert all(bool((count == 1).all()) for count in covered.values())


@pytest.mark.parametrize("clip_norm", [0.5, 20.0, 1e3])
def test_clip_is_the_reference(clip_norm: float) -> None:
    """Dense and expert gradients are scaled alike; below the limit nothing changes, to the bit."""
    grads = draw(1)
    ranks = Ranks(2, 2)
    flats = ranks.new_flats()
    ranks.scatter(flats, grads)
    expected, norm = clip_by_global_norm([grad.double() for grad in grads.values()], clip_norm)
    for flat in flats:
        clip(flat, float(norm), clip_norm)
    got = ranks.gather(flats)
    for name, grad in zip(grads, expected, strict=True):
        assert_close(got[name], grad, name)
        assert torch.equal(got[name], grads[name]) == (clip_norm > float(norm))
    zeros = {"dense": torch.zeros(4)}
    clip(zeros, 0.0, clip_norm)
    assert not zeros["dense"].any()


def test_clip_adds_a_millionth_to_the_norm() -> None:
    flat = {"dense": torch.tensor([3e-6, 4e-6])}
    clip(flat, 5e-6, 3e-6)
    assert_close(flat["dense"], torch.tensor([1.5e-6, 2e-6]))


def expected_rate(rate: LearningRate, step: int) -> float:
    match rate.kind:
        case "constant":
            return schedule.constant(step, rate.lr, rate.warmup_steps)
        case "wsd":
            return schedule.warmup_stable_decay(
                step, rate.lr, rate.total_steps, rate.warmup_steps, rate.decay_steps, rate.min_lr_ratio
            )
        case "cosine":
            return schedule.cosine(step, rate.lr, rate.total_steps, rate.warmup_steps, rate.min_lr_ratio)


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1, 1.0])
def test_learning_rate_is_the_reference(kind: str, min_lr_ratio: float) -> None:
    """Every step; no warm-up, one step of it, warm-up and decay that fill the run, no decay."""
    for total, warmup, decay in product((12, 1), (0, 1, 4), (0, 1, 8)):
        if warmup + decay > total:
            continue
        rate = LearningRate(kind, 3.0, total, warmup, decay, min_lr_ratio)  # type: ignore[arg-type]
        for step in range(total):
            assert rate.at(step) == pytest.approx(expected_rate(rate, step), rel=1e-12, abs=1e-15), (rate, step)


def test_learning_rate_by_hand() -> None:
    wsd = LearningRate("wsd", 8.0, total_steps=8, warmup_steps=2, decay_steps=4, min_lr_ratio=0.5)
    assert [wsd.at(step) for step in range(8)] == [4.0, 8.0, 8.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    cosine = LearningRate("cosine", 8.0, total_steps=4, warmup_steps=2, min_lr_ratio=0.0)
    assert [cosine.at(step) for step in range(4)] == pytest.approx([4.0, 8.0, 4.0, 0.0], abs=1e-12)


def test_bias_update_is_the_reference() -> None:
    """To the bit: below the mean up, above it down, at it unmoved, for any number of experts and any size of counts."""
    rate, generator = 2.0**-10, torch.Generator().manual_seed(0)
    for experts in (1, 3, 7, 8):
        counts = torch.randint(0, 5, (20, experts), generator=generator)
        bias = randn(20, experts, seed=experts)
        expected = [update_expert_bias(b.double(), c, rate) for b, c in zip(bias, counts, strict=True)]
        got = updated_bias(bias, counts, rate)
        assert got.dtype == torch.float32
        assert torch.equal(got, torch.stack(expected).float())
        assert experts == 1 or bool((got == bias).any()), "no expert at the mean"
    zero, huge = torch.zeros(1, 3), torch.tensor([[2**60, 2**60 + 1, 2**60 + 2]])
    assert updated_bias(zero, huge, rate).tolist() == [[rate, 0.0, -rate]]
    assert updated_bias(zero, torch.tensor([[5, 5, 5]]), rate).tolist() == [[0.0, 0.0, 0.0]]
    assert not zero.any(), "the old bias stays as it was"
