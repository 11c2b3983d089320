"""Pieces of a backward pass, and the driver that runs several passes in turn.

A piece is one compute segment of one micro-batch: its inputs are cut from what came before, its outputs from what
comes after, so that exchanges, schedules and other micro-batches fit between two pieces.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from pithtrain.parallel.transport import Pending, Request, Transport

Result = TypeVar("Result")
Pass = Generator[Request, tuple[Tensor, ...], Result]
Segment = Callable[..., tuple[Tensor, ...]]
Phase = Literal["forward", "backward", "launch", "wait", "host", "action", "step"]


class Observe(Protocol):
    """What sees a run: called around everything that has a name, it returns what `run` returns.

    phase: forward or backward of a segment, launch or wait of an exchange, a host read, an action, a part of a step.
    """

    def __call__(self, name: str, phase: Phase, run: Callable[[], Result], /) -> Result: ...


def unobserved(name: str, phase: Phase, run: Callable[[], Result], /) -> Result:
    """Nobody looks."""
    return run()


class _Enter(Function):
    """The edge of a piece: passes a value in, catches its gradient, keeps no data."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, slot: list[Tensor]) -> Tensor:
        ctx.slot = slot
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.slot.append(grad)
        return None, None, None


class Piece:
    """One segment's run. `name` is the segment's (layers.3.experts).

    recompute: keep the inputs alone and run again for the backward pass. again: what runs then, made of the outputs of
    the first run (which may have decided something that must not be decided twice); the same segment where not given.
    """

    def __init__(
        self,
        name: str,
        run: Segment,
        inputs: Sequence[Tensor],
        recompute: bool = False,
        again: Callable[[tuple[Tensor, ...]], Segment] | None = None,
    ) -> None:
        self.name = name
        self._run, self._again, self._recompute = run, again, recompute
        self._inputs = tuple(x.detach() for x in inputs)

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs, cut from the piece's graph."""
        if self._recompute:
            with torch.no_grad():
                outputs = self._run(*self._inputs)
            if self._again is not None:
                self._run = self._again(outputs)
            return outputs
        outputs = self._enter()
        self._inputs = ()
        return tuple(x.detach() for x in outputs)

    def _enter(self) -> tuple[Tensor, ...]:
        self._slots: list[list[Tensor]] = [[] for _ in self._inputs]
        anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            entered = [
                _Enter.apply(anchor, x, slot) if x.is_floating_point() else x
                for x, slot in zip(self._inputs, self._slots, strict=True)
            ]
            outputs = self._run(*entered)
        self._edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        return outputs

    def backward(self, *grads: Tensor | None) -> list[Tensor | None]:
        """Gradients of the outputs, None where there is none -> of the inputs, None where nothing reached them.

        Runs once; the piece's graph is freed with it.
        """
        if self._recompute:
            self._enter()
            self._inputs = ()
        pairs = [
            (edge, grad) for edge, grad in zip(self._edges, grads, strict=True) if edge is not None and grad is not None
        ]
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        self._edges = []
        return [slot.pop() if slot else None for slot in self._slots]


def drive(
    transport: Transport, *passes: Pass[Any], observe: Observe = unobserved, filler: Callable[[], None] | None = None
) -> list[Any]:
    """Runs passes to their ends, in turn: each goes on until it asks for an exchange, then the next has its go.

    filler: does what the first pass has left for later, in a turn of its own behind each exchange of that pass, and
    when the pass ends.
    """
    results: list[Any] = [None] * len(passes)
    live: deque[tuple[int, Pass[Any], str, Pending | None, Callable[[], None] | None]]
    live = deque((index, run, "", None, None) for index, run in enumerate(passes))
    while live:
        index, run, name, pending, fill = live.popleft()
        if fill is not None:
            fill()
            live.append((index, run, name, pending, None))
            continue
        try:
            request = next(run) if pending is None else run.send(observe(name, "wait", pending))
        except StopIteration as end:
            results[index] = end.value
            if index == 0 and filler is not None:
                filler()
        else:
            pending = _launch(transport, request, observe)
            live.append((index, run, request.name, pending, filler if index == 0 else None))
    return results


def _launch(transport: Transport, request: Request, observe: Observe) -> Pending:
    return observe(request.name, "launch", lambda: transport.launch(request))
