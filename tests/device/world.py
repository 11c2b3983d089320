"""The transport over NCCL (gloo on CPU): every collective, and a step, on two ranks or, with one card, on one.

One card is a world of one rank, in which the transport moves nothing but counts; there the collectives that it calls
are called as they are.
"""

import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain import step
from pithtrain.data import Batch
from pithtrain.layers.balance import Objective
from pithtrain.ops.linear import Compute
from pithtrain.parallel.mesh import DIMS, Axis, Mesh, make_mesh
from pithtrain.parallel.transport import AllReduce, AllToAll, Counts, Receive, Send, Transport
from tests.device.measure import different, synchronise
from tests.device.model import batches, setup
from tests.device.report import Place, Row, judged

SECONDS = 20


def world(place: Place) -> Iterator[Row]:
    """The rows of rank 0, and what went wrong on the others."""
    on_card = place.device.type == "cuda"
    ranks = min(2, torch.cuda.device_count()) if on_card else 2
    context: Any = mp.get_context("spawn" if on_card else "fork")  # a fork cannot use a card that its parent has used
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, ranks, on_card, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        answers = [_answer(rank, pipe, place.deadline) for rank, (_, pipe) in enumerate(started)]
        for process, _ in started:
            process.kill()
            process.join()
    for rank, rows in enumerate(answers):
        yield from rows if rank == 0 else [row for row in rows if row.status == "failed"]


def _answer(rank: int, pipe: Connection, deadline: float) -> list[Row]:
    try:
        in_time = pipe.poll(max(0.0, deadline - time.monotonic()))
        return pipe.recv() if in_time else [Row(f"rank {rank}", "failed", note="no answer in time")]
    except EOFError:
        return [Row(f"rank {rank}", "failed", note="died without a word")]


def _rank(rank: int, ranks: int, on_card: bool, folder: str, pipe: Connection) -> None:
    device = torch.device("cuda", rank) if on_card else torch.device("cpu")
    try:
        if on_card:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        store, limit = f"file://{Path(folder, 'store')}", timedelta(seconds=SECONDS)
        dist.init_process_group(
            "nccl" if on_card else "gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit
        )
        axis = Axis("world", ranks, rank, dist.group.WORLD)
        rows = list(_alone(device) if ranks == 1 else _together(axis, device))
        rows += [_counts(axis, device), _step(ranks, device)]
        synchronise(device)
    except Exception:  # noqa: BLE001 - reported to the section
        rows = [Row(f"rank {rank}", "failed", note=traceback.format_exc())]
    pipe.send(rows)


def _alone(device: torch.device) -> Iterator[Row]:
    x = torch.arange(6.0, device=device)
    for name, call in (
        ("all_reduce", lambda out: dist.all_reduce(out.copy_(x))),
        ("all_to_all", lambda out: dist.all_to_all_single(out, x)),
        ("reduce_scatter", lambda out: dist.reduce_scatter_tensor(out, x)),
        ("all_gather", lambda out: dist.all_gather_into_tensor(out, x)),
    ):
        out = torch.zeros_like(x)
        call(out)
        yield judged(f"{name}, torch's", "one rank, wrong elements", different(out, x), 0)
    yield Row("send and receive", "not run", note="needs two cards")


def _together(axis: Axis, device: torch.device) -> Iterator[Row]:
    """Two ranks: rank r holds r * 10 + its place."""
    transport, rank, other = Transport(), axis.index, 1 - axis.index
    x = torch.arange(4.0, device=device) + 10 * rank
    both = [torch.arange(4.0, device=device) + 10 * peer for peer in range(2)]

    def row(name: str, got: Tensor, expected: Tensor) -> Row:
        return judged(name, "two ranks, wrong elements", different(got, expected), 0)

    yield row("all_reduce", transport.run(AllReduce(x.clone(), axis))[0], both[0] + both[1])
    send, recv = ((1, 3), (1, 2)) if rank == 0 else ((2, 1), (3, 1))
    expected = torch.cat([both[0][:1], both[1][:2]] if rank == 0 else [both[0][1:4], both[1][2:3]])
    yield row("all_to_all", transport.run(AllToAll((x[: sum(send)],), send, recv, axis))[0], expected)
    part = slice(2 * rank, 2 * rank + 2)
    yield row("reduce_scatter", transport.reduce_scatter(x.clone(), axis), (both[0] + both[1])[part])
    whole = torch.zeros(8, device=device)
    transport.all_gather_into(whole, x, axis)
    yield row("all_gather", whole, torch.cat(both))
    waits = [transport.launch(request) for request in _messages(rank, other, x, axis)]
    received = [wait()[0] for wait in waits][0 if rank else 1]
    yield row("send and receive", received, both[other])


def _messages(rank: int, other: int, x: Tensor, axis: Axis) -> list[Send | Receive]:
    """Rank 0 sends and then receives, rank 1 the other way round."""
    messages: list[Send | Receive] = [Send(x, other, axis), Receive(torch.zeros_like(x), other, axis)]
    return messages if rank == 0 else messages[::-1]


def _counts(axis: Axis, device: torch.device) -> Row:
    """Numbers for the host: row i goes to rank i."""
    mine = torch.arange(3 * axis.size, device=device).view(axis.size, 3) + 100 * axis.index
    sent, received = Transport().run(Counts(mine, axis))
    rows = [torch.arange(3 * axis.index, 3 * axis.index + 3) + 100 * peer for peer in range(axis.size)]
    wrong = different(sent, mine.cpu()) + different(received, torch.stack(rows))
    return judged("counts", f"{axis.size} ranks, wrong elements", wrong, 0)


def _step(ranks: int, device: torch.device) -> Row:
    """The gradients' norm of a small model in fp32, experts shared by all ranks, against that of one process."""
    made = setup(small=True)
    given = batches(made, 0, device)
    share = made.sequences // ranks
    mesh, alone = make_mesh(ep=ranks), Mesh(0, 1, **{name: Axis(name, 1, 0, None) for name in DIMS})
    part = slice(share * mesh.ep.index, share * (mesh.ep.index + 1))
    mine = [Batch(batch.tokens[part], batch.labels[part]) for batch in given]
    results = []
    for place, read in ((mesh, mine), (alone, given)):
        trainee = step.build(made.arch, place, Transport(), made.length, device)
        trainee.shard.initialise(0)
        choices = step.learned(trainee, len(read), None)
        results.append(step.gradients(trainee, read, Objective(), choices, Compute()))
    apart = max(abs(results[0].loss / results[1].loss - 1), abs(results[0].norm / results[1].norm - 1))
    return judged("a step's loss and norm", f"{ranks} ranks against one", apart, 1e-5)
