"""The transport: the only place that calls a collective. It records what it carries: kind, axis, bytes.

A request is launched at once and waited for later; what lies between hides it. On an axis of one rank nothing moves
and nothing is recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from pithtrain.parallel.mesh import Axis, AxisName

# torch 2.13 renames these two and warns of the old names; 2.11 has the old names only
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

Kind = Literal["all_to_all", "all_reduce", "reduce_scatter", "all_gather"]
Pending = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Record:
    """One collective as this rank saw it; bytes are those it sent."""

    kind: Kind
    axis: AxisName
    bytes: int


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Rows to ranks: tensors [sum(send), ..], rows sorted by destination; send and recv are rows a peer."""

    tensors: tuple[Tensor, ...]
    send: tuple[int, ...]
    recv: tuple[int, ...]
    axis: Axis


@dataclass(frozen=True, eq=False)
class AllReduce:
    """The sum over the axis, in place."""

    tensor: Tensor
    axis: Axis


Request = AllToAll | AllReduce


@dataclass(frozen=True, eq=False)
class Transport:
    """Carries requests between the ranks of an axis. `records` grows with every collective that moved something."""

    records: list[Record] = field(default_factory=list)

    def launch(self, request: Request) -> Pending:
        """Starts a request; the returned call waits for it and gives the received tensors."""
        match request:
            case AllToAll(tensors, send, recv, axis):
                waits = [self._all_to_all(tensor, send, recv, axis) for tensor in tensors]
                return lambda: tuple(wait() for wait in waits)
            case AllReduce(tensor, axis):
                return self._all_reduce(tensor, axis)

    def run(self, request: Request) -> tuple[Tensor, ...]:
        """Launches a request and waits for it."""
        return self.launch(request)()

    def _all_to_all(
        self, tensor: Tensor, send: tuple[int, ...], recv: tuple[int, ...], axis: Axis
    ) -> Callable[[], Tensor]:
        if axis.size == 1:
            return lambda: tensor
        tensor = tensor.contiguous()
        received = tensor.new_empty(sum(recv), *tensor.shape[1:])
        self._record("all_to_all", axis, tensor)
        work = dist.all_to_all_single(received, tensor, list(recv), list(send), group=axis.group, async_op=True)
        return lambda: _finish(work, received, keep=tensor)

    def _all_reduce(self, tensor: Tensor, axis: Axis) -> Pending:
        if axis.size == 1:
            return lambda: (tensor,)
        self._record("all_reduce", axis, tensor)
        work = dist.all_reduce(tensor, group=axis.group, async_op=True)
        return lambda: (_finish(work, tensor, keep=tensor),)

    def reduce_scatter(self, tensor: Tensor, axis: Axis) -> Tensor:
        """This rank's part [n] of the sum of tensor [axis.size * n] over the axis."""
        if axis.size == 1:
            return tensor
        self._record("reduce_scatter", axis, tensor)
        part = tensor.new_empty(tensor.shape[0] // axis.size)
        _reduce_scatter(part, tensor, group=axis.group)
        return part

    def all_gather_into(self, tensor: Tensor, part: Tensor, axis: Axis) -> None:
        """Fills tensor [axis.size * n] with every rank's part [n]; part may be this rank's own slice of it."""
        if axis.size == 1:
            return
        self._record("all_gather", axis, part)
        _all_gather(tensor, part, group=axis.group)

    def _record(self, kind: Kind, axis: Axis, tensor: Tensor) -> None:
        self.records.append(Record(kind, axis.name, tensor.numel() * tensor.element_size()))


def _finish(work: dist.Work | None, received: Tensor, keep: Tensor) -> Tensor:
    """Waits; `keep` lives until then, since the transfer reads it."""
    if work is not None:
        work.wait()
    del keep
    return received
