"""The transport: the only place that calls a collective. It records what it carries: kind, axis, bytes.

A request is launched at once and waited for later; what lies between hides it. On CUDA the communication library runs
it on a stream of its own, behind the compute launched before it, and waiting makes the compute stream wait, not the
host; the tensors live until then. A request's name is what observers call it. On an axis of one rank nothing moves and
nothing is recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pithtrain.parallel.mesh import Axis, AxisName

# torch 2.13 renames these two and warns of the old names; 2.11 has the old names only
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

Kind = Literal["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "send"]
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
    name: str = ""


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers for the host: row i of tensor [P, n] int64 goes to peer i. Gives (what was sent, what was received) on
    the host, without waiting for compute that was launched meanwhile.
    """

    tensor: Tensor
    axis: Axis
    name: str = ""


@dataclass(frozen=True, eq=False)
class AllReduce:
    """The sum over the axis, in place."""

    tensor: Tensor
    axis: Axis
    name: str = ""


@dataclass(frozen=True, eq=False)
class Send:
    """A tensor to one peer (its index on the axis). Messages between two ranks of an axis arrive in their order."""

    tensor: Tensor
    peer: int
    axis: Axis
    name: str = ""


@dataclass(frozen=True, eq=False)
class Receive:
    """The next tensor from one peer, into `buffer`."""

    buffer: Tensor
    peer: int
    axis: Axis
    name: str = ""


Request = AllToAll | Counts | AllReduce | Send | Receive


def _stream_for_copies() -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if torch.cuda.is_available() else None


@dataclass(frozen=True, eq=False)
class Transport:
    """Carries requests between the ranks of an axis. `records` grows with every collective that moved something.

    copies: the CUDA stream on which counts go to the host, None on CPU.
    """

    records: list[Record] = field(default_factory=list)
    copies: torch.cuda.Stream | None = field(default_factory=_stream_for_copies)

    def launch(self, request: Request) -> Pending:
        """Starts a request; the returned call waits for it and gives the received tensors."""
        match request:
            case AllToAll(tensors, send, recv, axis):
                waits = [self._all_to_all(tensor, send, recv, axis) for tensor in tensors]
                return lambda: tuple(wait() for wait in waits)
            case Counts(tensor, axis):
                return self._counts(tensor, axis)
            case AllReduce(tensor, axis):
                return self._all_reduce(tensor, axis)
            case Send(tensor, peer, axis):
                tensor = tensor.contiguous()
                self._record("send", axis, tensor)
                sent = dist.isend(tensor, group=axis.group, group_dst=peer)
                return lambda: (_finish(sent, tensor, keep=tensor),)
            case Receive(buffer, peer, axis):
                received = dist.irecv(buffer, group=axis.group, group_src=peer)
                return lambda: (_finish(received, buffer, keep=buffer),)

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

    def _counts(self, tensor: Tensor, axis: Axis) -> Pending:
        received = torch.empty_like(tensor)
        self._record("all_to_all", axis, tensor)
        work = dist.all_to_all_single(received, tensor, group=axis.group, async_op=True)
        if self.copies is None:
            return lambda: (tensor, _finish(work, received, keep=tensor))
        with torch.cuda.stream(self.copies):
            work.wait()
            hosts = [torch.empty_like(x, device="cpu", pin_memory=True) for x in (tensor, received)]
            for host, device in zip(hosts, (tensor, received), strict=True):
                host.copy_(device, non_blocking=True)
            arrived = self.copies.record_event()
        return lambda: _arrived(arrived, hosts, keep=(tensor, received))

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


def _arrived(event: torch.cuda.Event, hosts: list[Tensor], keep: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Waits on the host until the copies are there; `keep` lives until then."""
    event.synchronize()
    del keep
    return tuple(hosts)


def _finish(work: dist.Work | None, received: Tensor, keep: Tensor) -> Tensor:
    """Waits; `keep` lives until then, since the transfer reads it."""
    if work is not None:
        work.wait()
    del keep
    return received
