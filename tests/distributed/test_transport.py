"""The transport on worlds of 2 and 4 ranks: what it carries and records, and that tests can slow and poison it."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from golden.world import WorldError, run_world
from pithtrain.parallel.mesh import Axis, make_mesh
from pithtrain.parallel.transport import AllReduce, AllToAll, Counts, Pending, Receive, Record, Request, Send, Transport

PRELOAD = ["tests.distributed.test_transport"]
SEND = [[2, 0], [3, 1]]  # rows from one rank of the expert axis to the other: SEND[from][to]


def carry() -> list[Record]:
    """Every collective on every axis of dp2 x ep2; results are checked on the rank itself."""
    mesh, transport = make_mesh(dp=2, ep=2), Transport()
    rank, me, records = mesh.rank, mesh.ep.index, transport.records

    send, recv = tuple(SEND[me]), (SEND[0][me], SEND[1][me])
    rows = torch.arange(sum(send) * 3).view(-1, 3) + 100 * rank
    weights = rows[:, :2].float()
    got_rows, got_weights = transport.run(AllToAll((rows, weights), send, recv, mesh.ep))
    expected = [
        torch.arange(sum(SEND[peer]) * 3).view(-1, 3).split(SEND[peer])[me] + 100 * (rank - me + peer)
        for peer in range(2)
    ]
    assert torch.equal(got_rows, torch.cat(expected)) and torch.equal(got_weights, torch.cat(expected)[:, :2].float())

    turned = rows.double().T.contiguous().T  # not contiguous: rows still go whole
    (got_turned,) = transport.run(AllToAll((turned,), send, recv, mesh.ep))
    assert torch.equal(got_turned, torch.cat(expected).double())

    for axis, ranks in ((mesh.dp, [rank % 2, rank % 2 + 2]), (mesh.dense, [0, 1, 2, 3])):
        (summed,) = transport.run(AllReduce(torch.tensor([rank, 1]), axis))
        assert summed.tolist() == [sum(ranks), len(ranks)]

    part = transport.reduce_scatter(torch.arange(8.0) + rank, mesh.dense)
    assert part.tolist() == [4 * (2 * rank) + 6, 4 * (2 * rank + 1) + 6]
    part = transport.reduce_scatter(torch.arange(8.0) + rank, mesh.expert)
    assert part.tolist() == [2 * (4 * mesh.dp.index + i) + 2 * me + 2 for i in range(4)]

    whole = torch.full((8,), -1.0)
    whole[2 * rank : 2 * rank + 2] = torch.tensor([rank, rank + 0.5])
    transport.all_gather_into(whole, whole[2 * rank : 2 * rank + 2], mesh.dense)
    assert whole.tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]

    numbers = torch.tensor([[10, 11], [20, 21]]) + rank  # row i to peer i
    sent, received = transport.run(Counts(numbers, mesh.ep))
    assert torch.equal(sent, numbers) and received.device.type == "cpu"
    assert received.tolist() == [
        [10 * (me + 1) + rank - me + peer, 10 * (me + 1) + 1 + rank - me + peer] for peer in (0, 1)
    ]

    before = len(records)
    alone = Axis("cp", 1, 0, None)
    assert transport.run(AllToAll((rows,), (4,), (4,), alone))[0] is rows
    assert transport.run(AllReduce(rows, alone))[0] is rows
    assert transport.reduce_scatter(whole, alone) is whole
    transport.all_gather_into(whole, whole, alone)
    assert len(records) == before, "an axis of one rank moves nothing"
    return records


def test_records_kind_axis_and_bytes() -> None:
    """In order, once each; bytes are those sent: int64 and fp64 have 8 an element, fp32 has 4."""
    for rank, records in enumerate(run_world(4, carry, preload=PRELOAD)):
        rows = sum(SEND[rank % 2])
        assert records == [
            Record("all_to_all", "ep", rows * 3 * 8),
            Record("all_to_all", "ep", rows * 2 * 4),
            Record("all_to_all", "ep", rows * 3 * 8),
            Record("all_reduce", "dp", 2 * 8),
            Record("all_reduce", "dense", 2 * 8),
            Record("reduce_scatter", "dense", 8 * 4),
            Record("reduce_scatter", "expert", 8 * 4),
            Record("all_gather", "dense", 2 * 4),
            Record("all_to_all", "ep", 4 * 8),
        ]


def send_messages() -> list[Record]:
    """Along a pipeline of 2 beside 2 data ranks: in order, both ways at once, each among the right two ranks."""
    mesh, transport = make_mesh(pp=2, dp=2), Transport()
    me, peer, data = mesh.pp.index, 1 - mesh.pp.index, mesh.dp.index
    groups = {id(axis.group) for axis in (mesh.pp, mesh.pp_back, mesh.dp, mesh.world)}
    along = make_mesh(pp=4)  # one group of all ranks, and still not the world's
    groups |= {id(along.pp.group), id(along.pp_back.group)}
    assert len(groups) == 6, "messages between two ranks keep to groups of their own"
    buffers = [torch.full((2, 3), -1.0) for _ in range(3)]
    receives = [transport.launch(Receive(buffer, peer, mesh.back_from(peer))) for buffer in buffers]
    turned = (torch.arange(6.0).view(3, 2) + 10 * mesh.rank).T  # not contiguous: elements still arrive in place
    sends = [transport.launch(Send(turned + 100 * i, peer, mesh.towards(peer))) for i in range(3)]
    for i, (receive, buffer) in enumerate(zip(receives, buffers, strict=True)):
        (received,) = receive()
        expected = (torch.arange(6.0).view(3, 2) + 10 * (2 * peer + data)).T + 100 * i
        assert received is buffer and torch.equal(received, expected)
    for send in sends:
        send()
    assert me == mesh.rank // 2
    return transport.records


def test_messages_arrive_in_order_and_are_recorded_where_they_start() -> None:
    for rank, records in enumerate(run_world(4, send_messages, preload=PRELOAD)):
        assert records == [Record("send", "pp" if rank < 2 else "pp_back", 6 * 4)] * 3


@dataclass(frozen=True, eq=False)
class Slow(Transport):
    """Every answer comes so many seconds after it was there."""

    seconds: float = 0.3

    def launch(self, request: Request) -> Pending:
        pending = super().launch(request)

        def wait() -> tuple[Tensor, ...]:
            time.sleep(self.seconds)
            return pending()

        return wait


@dataclass(frozen=True, eq=False)
class Poisoned(Transport):
    """What arrives from others is NaN."""

    def launch(self, request: Request) -> Pending:
        pending = super().launch(request)
        return lambda: tuple(torch.full_like(tensor, torch.nan) for tensor in pending())


@dataclass(frozen=True, eq=False)
class Dropping(Transport):
    """Takes part in nothing: requests are never sent, and whoever waits learns so."""

    def launch(self, request: Request) -> Pending:
        raise ConnectionError("dropped")


def disturb() -> tuple[float, list[float], int]:
    mesh, slow, poisoned = make_mesh(ep=2), Slow(), Poisoned()
    start = time.monotonic()
    (summed,) = slow.run(AllReduce(torch.ones(1), mesh.ep))
    took = time.monotonic() - start
    assert summed.item() == 2
    return took, poisoned.run(AllReduce(torch.ones(2), mesh.ep))[0].tolist(), len(slow.records)


def test_a_test_can_slow_and_poison_it() -> None:
    for took, values, records in run_world(2, disturb, preload=PRELOAD):
        assert took >= 0.3 and all(value != value for value in values) and records == 1


def drop() -> None:
    mesh = make_mesh(ep=2)
    (Dropping() if mesh.rank == 1 else Transport()).run(AllReduce(torch.ones(1), mesh.ep))


def test_a_dropped_request_ends_the_world_with_its_own_error() -> None:
    with pytest.raises(WorldError, match=r"rank 1: ConnectionError: dropped"):
        run_world(2, drop, preload=PRELOAD)


def launch_two() -> tuple[Any, ...]:
    """Two requests on their way at once, waited for in the other order; the sent tensors are let go before."""
    mesh, transport = make_mesh(ep=2), Transport()
    requests = [AllToAll((torch.full((2, 2), 10.0 * mesh.rank + i),), (1, 1), (1, 1), mesh.ep) for i in range(2)]
    first, second = (transport.launch(request) for request in requests)
    del requests
    return second()[0][:, 0].tolist(), first()[0][:, 0].tolist()


def test_requests_overlap() -> None:
    for results in run_world(2, launch_two, preload=PRELOAD):
        assert results == ([1.0, 11.0], [0.0, 10.0])
