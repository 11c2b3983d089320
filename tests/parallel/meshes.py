"""Meshes without processes: what each rank of a world sees, and an expert axis run rank by rank in one process."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from pithtrain.parallel.mesh import DIMS, Axis, Mesh, groups_of
from pithtrain.parallel.tape import Pass
from pithtrain.parallel.transport import AllToAll, Counts, Request

Result = TypeVar("Result")


def mesh_of(rank: int, pp: int = 1, dp: int = 1, cp: int = 1, ep: int = 1) -> Mesh:
    """The mesh of one rank of a world that does not run: its axes have no group."""
    sizes = (pp, dp, cp, ep)
    axes = {}
    for name in DIMS:
        (mine,) = (ranks for ranks in groups_of(sizes, name) if rank in ranks)
        axes[name] = Axis(name, len(mine), mine.index(rank), None)
    return Mesh(rank, len(list(product(*map(range, sizes)))), **axes)


def in_step(ranks: Sequence[Pass[Result]], watch: Callable[[Request], None] = lambda request: None) -> list[Result]:
    """Runs the passes of every rank of an expert axis; `watch` sees what rank 0 asks for."""
    results: dict[int, Result] = {}
    answers: list[tuple[Tensor, ...] | None] = [None] * len(ranks)
    while not results:
        requests = []
        for index, (run, answer) in enumerate(zip(ranks, answers, strict=True)):
            try:
                requests.append(next(run) if answer is None else run.send(answer))
            except StopIteration as end:
                results[index] = end.value
        if not results:
            watch(requests[0])
            answers = list(_exchange(requests))
    assert len(results) == len(ranks), "ranks asked for different numbers of exchanges"
    return [results[index] for index in range(len(ranks))]


def _exchange(requests: Sequence[Request]) -> list[tuple[Tensor, ...]]:
    counts = [request.tensor for request in requests if isinstance(request, Counts)]
    if len(counts) == len(requests):
        return [(mine, torch.stack([other[me] for other in counts])) for me, mine in enumerate(counts)]
    sent = [request for request in requests if isinstance(request, AllToAll)]
    assert len(sent) == len(requests), "the ranks of an expert axis only exchange rows, and their numbers"
    received = []
    for me, request in enumerate(sent):
        assert request.recv == tuple(other.send[me] for other in sent)
        received.append(
            tuple(
                torch.cat([other.tensors[i].split(other.send)[me] for other in sent])
                for i in range(len(request.tensors))
            )
        )
    return received
