"""Dispatch and combine on expert axes of 2 and 4 ranks, against one rank that holds every expert. In float64.

Every rank runs `exchange` on its own tokens; what it returns is compared here. T tokens, K experts a token, E experts,
P ranks, R rows received, D hidden.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from golden.world import run_world
from pithtrain.ops.permute import sum_copies
from pithtrain.parallel.expert import (
    Route,
    combine,
    combine_backward,
    dispatch,
    dispatch_backward,
    make_route,
)
from pithtrain.parallel.mesh import Mesh, make_mesh
from pithtrain.parallel.tape import drive
from pithtrain.parallel.transport import Transport

E, K, D = 12, 3, 5
TOKENS = (17, 0, 1, 30)  # of each rank: one has none


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. experts: tokens choose among the first of so many."""

    tokens: tuple[int, ...] = TOKENS
    experts: int = E
    top_k: int = K


CASES = (Case(), Case(experts=3), Case(tokens=(0, 0, 0, 0)), Case(top_k=1), Case(top_k=E, tokens=(2, 3, 0, 1)))
MESHES = ((1, 2), (1, 4), (2, 2))  # dp, ep


def draw(case: Case, rank: int, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(case.tokens[rank], *shape, dtype=torch.float64, generator=generator)


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], weights [T, K], ids [T, K], distinct in each row, in no order."""
    x, weights = draw(case, rank, D, seed=1), draw(case, rank, case.top_k, seed=2)
    ids = draw(case, rank, case.experts, seed=3).argsort(1)[:, : case.top_k]
    return x, weights, ids


def matrices() -> Tensor:
    return torch.randn(E, D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def mixture(x: Tensor, weights: Tensor, ids: Tensor, experts: Tensor) -> Tensor:
    """The definition: each row's weighted sum over its experts, a matrix each; -1 names none. [rows, D]."""
    rows = []
    for row, row_weights, row_ids in zip(x, weights, ids, strict=True):
        total = torch.zeros_like(row)
        for weight, expert in zip(row_weights, row_ids.tolist(), strict=True):
            total = total + weight * (experts[expert] @ row) if expert >= 0 else total
        rows.append(total)
    return torch.stack(rows) if rows else x


def exchange(dp: int, ep: int, case: Case) -> dict[str, Any]:
    """One layer's exchanges on this rank, forward and backward, around `mixture`."""
    mesh, transport = make_mesh(dp=dp, ep=ep), Transport()
    x, weights, ids = tokens_of(case, mesh.rank)

    def run(request: Any) -> Any:
        (result,) = drive(transport, request)
        return result

    route: Route = run(make_route(ids, E, mesh.ep))
    got_x, got_weights, got_ids = (part.detach() for part in run(dispatch(route, x, weights, ids)))
    first = mesh.ep.index * route.num_local_experts
    experts = matrices()[first : first + route.num_local_experts].requires_grad_()
    entered_x, entered_weights = got_x.clone().requires_grad_(), got_weights.clone().requires_grad_()
    rows = mixture(entered_x, entered_weights, got_ids, experts)
    (back,) = run(combine(route, rows.detach()))
    assert route.sent is not None
    output = sum_copies(back, route.sent)

    upstream = draw(case, mesh.rank, D, seed=4)
    (grad_rows,) = run(combine_backward(route, upstream.index_select(0, route.sent.rows)))
    zero = (experts * 0).sum()
    inputs = [entered_x, entered_weights, experts]
    grads = torch.autograd.grad((rows * grad_rows).sum() + zero, inputs, materialize_grads=True)
    grad_x, grad_weights = run(dispatch_backward(route, grads[0], grads[1]))
    tensors = {"x": x, "ids": ids, "output": output, "grad_x": grad_x, "grad_weights": grad_weights}
    tensors |= {"got_x": got_x, "got_weights": got_weights, "got_ids": got_ids, "grad_experts": grads[2]}
    return {
        **{name: tensor.numpy() for name, tensor in tensors.items()},
        "sizes": (route.send_sizes, route.recv_sizes, route.expert_sizes),
        "records": [record.kind for record in transport.records],
        "inner": inner_products(route, run, case, mesh, got_ids),
    }


def inner_products(route: Route, run: Any, case: Case, mesh: Mesh, got_ids: Tensor) -> list[float]:
    """For dispatch and combine: <move(a), b> and <a, reversed(b)> of this rank, to be summed over ranks."""
    x, weights, ids = tokens_of(case, mesh.rank)
    generator = torch.Generator().manual_seed(70 + mesh.rank)
    shape = (sum(route.recv_sizes), D), (sum(route.recv_sizes), case.top_k), (sum(route.send_sizes), D)
    b_x, b_weights, b_sent = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shape)
    b_weights = b_weights * (got_ids >= 0)  # entries elsewhere have no gradient
    moved_x, moved_weights, _ = run(dispatch(route, x, weights, ids))
    back_x, back_weights = run(dispatch_backward(route, b_x, b_weights))
    (combined,) = run(combine(route, b_x))
    (returned,) = run(combine_backward(route, b_sent))
    return [
        float((moved_x * b_x).sum() + (moved_weights * b_weights).sum()),
        float((x * back_x).sum() + (weights * back_weights).sum()),
        float((combined * b_sent).sum()),
        float((b_x * returned).sum()),
    ]


def exchange_all(dp: int, ep: int) -> list[dict[str, Any]]:
    torch.set_deterministic_debug_mode("error")  # uninitialised memory is NaN
    return [exchange(dp, ep, case) for case in CASES]


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def worlds() -> dict[tuple[int, int], list[Ranks]]:
    """By (dp, ep): for each case, what each rank returned."""
    results = {}
    for dp, ep in MESHES:
        ranks = run_world(dp * ep, exchange_all, dp, ep, preload=["tests.distributed.test_expert"])
        results[dp, ep] = [list(case) for case in zip(*ranks, strict=True)]
    return results


def groups(dp: int, ep: int, ranks: Ranks) -> list[Ranks]:
    """The ranks of each expert axis: ep is innermost."""
    return [ranks[at * ep : (at + 1) * ep] for at in range(dp)]


@pytest.mark.parametrize(("dp", "ep"), MESHES)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_a_token_is_sent_once_to_each_rank(worlds: Any, dp: int, ep: int, index: int) -> None:
    """Which holds one of its experts, and to no other; by source rank, then token; with its weights and local ids."""
    local = E // ep
    for group in groups(dp, ep, worlds[dp, ep][index]):
        for me, rank in enumerate(group):
            first = me * local
            _, received, expert_sizes = rank["sizes"]
            assert received == tuple(other["sizes"][0][me] for other in group)
            expected: list[tuple[Any, list[int]]] = []
            for source, other in enumerate(group):
                rows = [(x, ids - first) for x, ids in zip(other["x"], other["ids"], strict=True)]
                rows = [(x, ids) for x, ids in rows if ((ids >= 0) & (ids < local)).any()]
                assert len(rows) == received[source]
                expected += [(x, [int(i) if 0 <= i < local else -1 for i in ids]) for x, ids in rows]
            assert rank["got_x"].shape[0] == len(expected) == sum(received)
            for (x, ids), got_x, got_ids in zip(expected, rank["got_x"], rank["got_ids"], strict=True):
                assert np.array_equal(got_x, x) and got_ids.tolist() == ids
            assert not rank["got_weights"][rank["got_ids"] < 0].any(), "a weight of an expert elsewhere was sent"
            counts = [int((rank["got_ids"] == expert).sum()) for expert in range(local)]
            assert expert_sizes == tuple(counts), "copies of each local expert"


@pytest.mark.parametrize(("dp", "ep"), MESHES)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_exchanges_and_their_reverse(worlds: Any, dp: int, ep: int, index: int) -> None:
    """Outputs and gradients are those of one rank with every expert; none of a token's experts is left out."""
    case, ranks = CASES[index], worlds[dp, ep][index]
    experts = matrices().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rank, result in enumerate(ranks):
        x, weights, ids = tokens_of(case, rank)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        output = mixture(x, weights, ids, experts)
        scalar = (output * draw(case, rank, D, seed=4)).sum()
        grad_x, grad_weights = torch.autograd.grad(scalar, [x, weights], retain_graph=True, materialize_grads=True)
        total = total + scalar
        for name, expected in (("output", output), ("grad_x", grad_x), ("grad_weights", grad_weights)):
            close(result[name], expected.detach().numpy(), f"rank {rank}: {name}")
    (grad,) = torch.autograd.grad(total + (experts * 0).sum(), [experts])
    for at in range(ep):
        got = sum(group[at]["grad_experts"] for group in groups(dp, ep, ranks))
        close(got, grad[at * E // ep : (at + 1) * E // ep].numpy(), f"experts of rank {at}")
    for group in groups(dp, ep, ranks):
        moved, back, combined, returned = np.sum([rank["inner"] for rank in group], axis=0)
        assert moved == pytest.approx(back, rel=1e-12) and combined == pytest.approx(returned, rel=1e-12)


def close(got: Any, expected: Any, what: str) -> None:
    assert got.shape == expected.shape, what
    assert np.linalg.norm(got - expected) <= 1e-12 * np.linalg.norm(expected), what


def test_cases_hold_what_they_should(worlds: Any) -> None:
    """A rank without tokens, a rank that gets none, a token for every rank, a rank whose rows all go elsewhere."""
    plain, first = worlds[1, 4][0], worlds[1, 4][1]
    assert plain[1]["sizes"][0] == (0, 0, 0, 0) and sum(plain[1]["sizes"][1]) > 0
    assert [sum(rank["sizes"][1]) for rank in first] == [48, 0, 0, 0]
    assert [rank["sizes"][0] for rank in worlds[1, 4][4]] == [(2,) * 4, (3,) * 4, (0,) * 4, (1,) * 4]
    assert all(kind == "all_to_all" for ranks in worlds[1, 4] for rank in ranks for kind in rank["records"])


def one_row_a_rank(ep: int) -> tuple[list[float], str]:
    """A token whose experts, one on each of 4 ranks, give 2^24, 1, -2^24, 1: the fp32 sum says in what order."""
    mesh, transport = make_mesh(ep=ep), Transport()
    values = [2.0**24, 1.0, -(2.0**24), 1.0][mesh.ep.index]
    ids = torch.tensor([[9, 3, 6, 0]])
    (route,) = drive(transport, make_route(ids, E, mesh.ep))
    x, weights = torch.zeros(1, D), torch.ones(1, 4)
    ((got, _, _),) = drive(transport, dispatch(route, x, weights, ids))
    ((back,),) = drive(transport, combine(route, torch.full_like(got, values)))
    summed = sum_copies(back, route.sent)
    return summed[0].tolist(), str(summed.dtype)


def test_rows_add_in_rank_order_in_fp32() -> None:
    """(2^24 + 1) - 2^24 + 1 = 1 in fp32: the one of rank 1 is lost. In float64 or backwards it is 2."""
    for total, dtype in run_world(4, one_row_a_rank, 4, preload=["tests.distributed.test_expert"]):
        assert (total, dtype) == ([1.0] * D, "torch.float32")
