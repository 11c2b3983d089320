"""A world of ranks that are threads: what each sends, posts and waits for is seen, and a send waits for its receive."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from pithtrain.parallel.mesh import Axis, groups_of
from pithtrain.parallel.transport import AllReduce, AllToAll, Counts, Pending, Receive, Request, Send, Transport

Result = TypeVar("Result")
SECONDS = 60  # for whatever one thread waits for; only a fault waits longer


class Wires:
    """What the ranks of a world of pp, dp, cp, ep `sizes` hand each other: a future for each thing, by its key."""

    def __init__(self, sizes: tuple[int, int, int, int]) -> None:
        self.sizes = sizes
        self.futures: defaultdict[Any, Future[Any]] = defaultdict(Future)
        self.lock = Lock()

    def future(self, *key: Any) -> "Future[Any]":
        with self.lock:
            return self.futures[key]


@dataclass(frozen=True, eq=False)
class Wired(Transport):
    """One rank's transport. log: a line for each message it sends or posts, see `note`."""

    wires: Wires = field(default_factory=lambda: Wires((1, 1, 1, 1)))
    rank: int = 0
    note: Callable[[Request], None] = lambda request: None
    counts: defaultdict[Any, int] = field(default_factory=lambda: defaultdict(int))

    def launch(self, request: Request) -> Pending:
        self.note(request)
        axis = request.axis
        if axis.size == 1:
            return super().launch(request)
        match request:
            case Send(tensor, peer):
                channel = self.next("send", axis, axis.index, peer)
                self.wires.future("message", *channel).set_result(tensor.clone())
                return partial(self._posted, channel, tensor)
            case Receive(buffer, peer):
                channel = self.next("receive", axis, peer, axis.index)
                self.wires.future("post", *channel).set_result(None)
                return partial(self._received, channel, buffer)
            case AllToAll(tensors, send, recv):
                rows = self.meet(axis, [tensor.split(send) for tensor in tensors])
                return lambda: tuple(self._rows(rows(), axis.index, i, recv) for i in range(len(tensors)))
            case Counts(tensor):
                counts = self.meet(axis, tensor.clone())
                return lambda: (tensor, torch.stack([other[axis.index] for other in counts()]))
            case AllReduce(tensor):
                parts = self.meet(axis, tensor.clone())
                return lambda: (tensor.copy_(torch.stack(parts()).sum(0)),)

    def next(self, kind: str, axis: Axis, *ends: int) -> tuple[Any, ...]:
        """The key of the next thing of its kind between these ends of this rank's group."""
        (group,) = (ranks for ranks in groups_of(self.wires.sizes, axis.name) if self.rank in ranks)
        key = axis.name, group[0], *ends
        self.counts[kind, key] += 1
        return (*key, self.counts[kind, key])

    def meet(self, axis: Axis, value: Any) -> Callable[[], list[Any]]:
        """Gives this rank's value to its group; the call waits for everyone's."""
        key = self.next("meeting", axis)
        self.wires.future(*key, axis.index).set_result(value)
        return lambda: [self.wires.future(*key, index).result(SECONDS) for index in range(axis.size)]

    def _posted(self, channel: tuple[Any, ...], tensor: Tensor) -> tuple[Tensor, ...]:
        self.wires.future("post", *channel).result(SECONDS)
        return (tensor,)

    def _received(self, channel: tuple[Any, ...], buffer: Tensor) -> tuple[Tensor, ...]:
        return (buffer.copy_(self.wires.future("message", *channel).result(SECONDS)),)

    @staticmethod
    def _rows(parts: list[Any], me: int, index: int, recv: tuple[int, ...]) -> Tensor:
        rows = [other[index][me] for other in parts]
        assert tuple(row.shape[0] for row in rows) == recv
        return torch.cat(rows)


def run_threads(sizes: tuple[int, int, int, int], function: Callable[[int, Wires], Result]) -> list[Result]:
    """function(rank, wires) on every rank at once; the first failure of any that is not another's echo."""
    wires = Wires(sizes)
    with ThreadPoolExecutor(prod(sizes)) as pool:
        futures = [pool.submit(function, rank, wires) for rank in range(prod(sizes))]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, TimeoutError)):
        raise error
    return [future.result() for future in futures]
