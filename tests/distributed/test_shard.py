"""Sharding by calls on data, expert and pipeline axes: sums into owners' slices, gathering, whole tensors, norms, and
a parameter that one pipeline rank keeps and another one borrows.
"""

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from golden.world import run_world
from pithtrain.ops.parameter import ParameterSpec, initial_values
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.shard import Loan, Shard
from pithtrain.parallel.transport import Transport
from tests.agreement import assert_close

SPECS = [
    ParameterSpec("embedding", (13, 10), std=1.0),
    ParameterSpec("layers.0.attention_norm", (70,), decay=False, mean=1.0),
    ParameterSpec("layers.0.experts.gate_up", (4, 10, 11), expert=True, std=1.0),
    ParameterSpec("layers.0.router", (4, 10), std=1.0),
    ParameterSpec("layers.0.experts.down", (4, 10, 5), expert=True, std=1.0),
    ParameterSpec("norm", (1,), decay=False, mean=1.0),
    ParameterSpec("head", (13, 10), std=1.0),
]
NAMES = [spec.name for spec in SPECS]
MESHES = ((1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2))  # dp, ep, pp
KEPT = {1: (NAMES,), 2: (NAMES[1:5], [NAMES[0], *NAMES[5:]])}  # by number of pipeline ranks: what each of them keeps
LENT = "embedding"  # the second of two pipeline ranks keeps it, the first borrows it
SEED, BIG, SMALL = 5, 1.0, 2.0**-20


def gradient(spec: ParameterSpec, rank: int) -> Tensor:
    """What one rank adds to the whole parameter: wholly its own; one small beside one that bf16 could not hold."""
    generator = torch.Generator().manual_seed(100 * rank + len(spec.name))
    grad = torch.randn(spec.shape, generator=generator)
    grad.view(-1)[0] = BIG if rank == 0 else SMALL
    return grad


def reads(mesh: tuple[int, int, int], rank: int) -> set[str]:
    """What the layers of a rank read: what it keeps, and what it borrows."""
    dp, ep, pp = mesh
    return {*KEPT[pp][rank // (dp * ep)], LENT} if pp > 1 else set(NAMES)


def measure(dp: int, ep: int, pp: int) -> dict[str, Any]:
    """Everything on one rank; whole tensors are the same on all."""
    torch.set_deterministic_debug_mode("error")  # uninitialised memory is NaN
    mesh, transport = make_mesh(pp=pp, dp=dp, ep=ep), Transport()
    loan = Loan(LENT, owner=1, borrower=0) if pp > 1 else None
    shard = Shard.create(SPECS, mesh, transport, torch.device("cpu"), KEPT[pp][mesh.pp.index], loan)
    shard.initialise(SEED)
    results: dict[str, Any] = {"initial": {name: shard.whole(shard.masters(), name).numpy() for name in NAMES}}
    results["read"] = {name: weight.value.numpy().copy() for name, weight in shard.weights().items()}

    for spec in SPECS:
        if weight := shard.weights().get(spec.name):
            experts, whole = shard.local_experts(spec.name) if spec.expert else None, gradient(spec, mesh.rank)
            weight.grad.add_(whole if experts is None else whole[experts.start : experts.stop])
    transport.records.clear()
    grads = shard.reduce()
    results["sent"] = [(record.axis, record.bytes) for record in transport.records if record.kind == "send"]
    results["grads"] = {name: shard.whole(grads, name).numpy() for name in NAMES}
    results["norms"] = shard.square_norms(grads).tolist()
    results["chunks"] = {name: (flat.shape[0], flat.dtype == torch.float32) for name, flat in grads.items()}

    for flat in shard.masters().values():
        flat.mul_(2).add_(flat.ne(0), alpha=mesh.rank + 1)  # every owner changes what it owns, in its own way
    transport.records.clear()
    shard.gather()
    results["sent"] += [(record.axis, record.bytes) for record in transport.records if record.kind == "send"]
    results["views"] = {name: weight.value.numpy().copy() for name, weight in shard.weights().items()}
    results["after"] = {name: shard.whole(shard.masters(), name).numpy() for name in NAMES}
    stops = {"dense": 0, "expert": 0}
    for place in shard.placements.values():
        stops[place.bucket] = max(stops[place.bucket], place.stop)
    results["tails"] = {name: bucket.values[stops[name] :].abs().sum().item() for name, bucket in shard.buckets.items()}
    shard.zero_grads()
    buffers = [bucket.grads for bucket in shard.buckets.values()] + [w.grad for w in shard.weights().values()]
    results["zeroed"] = not any(buffer.any() for buffer in buffers)
    results["bits"] = keep_bits(shard)
    return results


def odd_values(spec: ParameterSpec) -> Tensor:
    """Bit patterns that sums or casts would change: -0.0, NaN with a payload, denormals, infinities."""
    patterns = torch.tensor([-(2**31), 0x7FC00123, 1, 0x7F800000, -(2**31) + 1, 0x3F800001], dtype=torch.int64)
    return patterns.repeat(-(-prod(spec.shape) // 6))[: prod(spec.shape)].to(torch.int32).view(spec.shape)


def keep_bits(shard: Shard) -> dict[str, Any]:
    """Odd values kept by each owner and assembled again, as int32."""
    flats = {name: torch.zeros_like(flat) for name, flat in shard.masters().items()}
    for name, place in shard.placements.items():
        assert shard.holds(name)
        experts, values = shard.local_experts(name), odd_values(place.spec).view(torch.float32)
        shard.keep(flats, name, values if experts is None else values[experts.start : experts.stop])
    return {name: shard.whole(flats, name).view(torch.int32).numpy() for name in NAMES}


@pytest.fixture(scope="module")
def worlds() -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    preload = ["tests.distributed.test_shard"]
    return {mesh: run_world(prod(mesh), measure, *mesh, preload=preload) for mesh in MESHES}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_initial_values_know_no_rank(worlds: Any, mesh: tuple[int, int, int]) -> None:
    for rank in worlds[mesh]:
        for spec in SPECS:
            if spec.expert:
                expected = torch.stack([initial_values(spec, expert, SEED) for expert in range(spec.shape[0])])
            else:
                expected = initial_values(spec, None, SEED)
            assert np.array_equal(rank["initial"][spec.name], expected.float().numpy()), spec.name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_rank_reads_the_parameters_of_its_stages(worlds: Any, mesh: tuple[int, int, int]) -> None:
    """And what is lent to it, from the same start as its owner's."""
    for rank, result in enumerate(worlds[mesh]):
        assert result["read"].keys() == result["views"].keys() == reads(mesh, rank)
        if LENT in result["read"]:
            assert np.array_equal(result["read"][LENT], result["initial"][LENT])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_reduce_and_gather(worlds: Any, mesh: tuple[int, int, int]) -> None:
    """Gradients are summed over the ranks that hold the parameter or the expert, in fp32, and divided by nothing."""
    _, ep, _ = mesh
    for rank, result in enumerate(worlds[mesh]):
        for spec in SPECS:
            adding = [r for r in range(prod(mesh)) if spec.name in reads(mesh, r)]
            expected = sum((gradient(spec, r).double() for r in adding), torch.zeros(spec.shape, dtype=torch.float64))
            if spec.expert:  # expert e lives on the ranks with ep index e // local
                local = spec.shape[0] // ep
                for expert in range(spec.shape[0]):
                    holders = [r for r in adding if r % ep == expert // local]
                    expected[expert] = sum(gradient(spec, r)[expert].double() for r in holders)
            got = torch.from_numpy(result["grads"][spec.name])
            assert_close(got, expected, f"rank {rank}: {spec.name}")
            assert got.view(-1)[0] == expected.view(-1)[0], "a small summand was lost"
        first = rank - rank % (prod(mesh) // mesh[2])
        assert result["chunks"] == worlds[mesh][first]["chunks"], "slices are equal"
        assert all(is_fp32 for _, is_fp32 in result["chunks"].values())
        assert result["tails"] == {"dense": 0.0, "expert": 0.0}, "padding at a bucket's end stays zero"
        assert result["zeroed"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_sees_what_the_owners_changed(worlds: Any, mesh: tuple[int, int, int]) -> None:
    """The layers' views after `gather` are the owners' values; each element had one owner, and every owner some."""
    _, ep, _ = mesh
    seen = set()
    for rank, result in enumerate(worlds[mesh]):
        for spec in SPECS:
            after = result["after"][spec.name]
            assert np.array_equal(after, worlds[mesh][0]["after"][spec.name])
            local = spec.shape[0] // ep
            mine = after[rank % ep * local : (rank % ep + 1) * local] if spec.expert else after
            if spec.name in reads(mesh, rank):
                assert np.array_equal(result["views"][spec.name], mine), f"rank {rank}: {spec.name}"
            owner = after - 2 * result["initial"][spec.name]
            assert np.abs(owner - owner.round()).max() < 1e-5
            seen |= set(owner.round().astype(int).flatten().tolist())
    assert seen == set(range(1, len(worlds[mesh]) + 1))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_square_norms_count_each_element_once(worlds: Any, mesh: tuple[int, int, int]) -> None:
    """On every rank the same: of the whole summed gradient, parameter by parameter, in the model's order."""
    for result in worlds[mesh]:
        expected = [float(np.square(result["grads"][spec.name].astype(np.float64)).sum()) for spec in SPECS]
        assert result["norms"] == pytest.approx(expected, rel=1e-6)
        assert result["norms"] == worlds[mesh][0]["norms"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_whole_and_keep_are_exact_to_the_bit(worlds: Any, mesh: tuple[int, int, int]) -> None:
    for result in worlds[mesh]:
        for spec in SPECS:
            assert np.array_equal(result["bits"][spec.name], odd_values(spec).numpy()), spec.name


def test_a_loan_is_one_gradient_and_one_value_a_step(worlds: Any) -> None:
    """Each borrower to the owner of the same data rank, and back, over the axis of that direction."""
    size = prod(SPECS[0].shape) * 4
    for rank, result in enumerate(worlds[2, 1, 2]):
        assert result["sent"] == [("pp" if rank < 2 else "pp_back", size)]
    assert all(result["sent"] == [] for result in worlds[2, 2, 1])


def test_every_parameter_starts_on_a_boundary_and_overlaps_none() -> None:
    shard = Shard.create(SPECS, make_mesh(), Transport(), torch.device("cpu"))
    assert list(shard.placements) == [spec.name for spec in SPECS], "in the model's order"
    for bucket in shard.buckets:
        places = sorted((p for p in shard.placements.values() if p.bucket == bucket), key=lambda p: p.start)
        assert all(place.start % 64 == 0 for place in places)
        assert all(a.stop <= b.start for a, b in pairwise(places))
        assert [p.spec.decay for p in places] == sorted((p.spec.decay for p in places), reverse=True)
    weights = shard.weights()
    weights["head"].value.fill_(3.0)
    weights["norm"].grad.fill_(4.0)
    assert shard.masters()["dense"].sum() == 3.0 * 130 and shard.buckets["dense"].grads.sum() == 4.0


def test_keep_refuses_another_shape() -> None:
    shard = Shard.create(SPECS, make_mesh(), Transport(), torch.device("cpu"))
    with pytest.raises(AssertionError, match=r"head: got \(10, 13\), this rank holds \(13, 10\)"):
        shard.keep(shard.masters(), "head", torch.zeros(10, 13))


def test_a_model_without_experts() -> None:
    dense = [spec for spec in SPECS if not spec.expert]
    shard = Shard.create(dense, make_mesh(), Transport(), torch.device("cpu"))
    shard.initialise(SEED)
    assert shard.masters()["expert"].shape == (0,) and shard.reduce()["expert"].shape == (0,)
    shard.gather()
    assert shard.square_norms(shard.masters()).shape == (len(dense),)
