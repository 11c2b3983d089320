"""Pieces of a backward pass, and the driver that runs several passes in turn.

A piece is one compute segment of one micro-batch: its inputs are cut from what came before, its outputs from what
comes after, so that exchanges, schedules and other micro-batches fit between two pieces.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from pithtrain.parallel.transport import Pending, Request, Transport

Result = TypeVar("Result")
Pass = Generator[Request, tuple[Tensor, ...], Result]


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
    """One segment's run. `name` is the segment's (layers.3.experts); `outputs` are cut from its graph."""

    def __init__(self, name: str, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self.name = name
        self._slots: list[list[Tensor]] = [[] for _ in inputs]
        anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            entered = [
                _Enter.apply(anchor, x.detach(), slot) if x.is_floating_point() else x
                for x, slot in zip(inputs, self._slots, strict=True)
            ]
            outputs = run(*entered)
        self._edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        self.outputs = tuple(x.detach() for x in outputs)

    def backward(self, *grads: Tensor | None) -> list[Tensor | None]:
        """Gradients of the outputs, None where there is none -> of the inputs, None where nothing reached them.

        Runs once; the piece's graph is freed with it.
        """
        pairs = [
            (edge, grad) for edge, grad in zip(self._edges, grads, strict=True) if edge is not None and grad is not None
        ]
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        self._edges, self.outputs = [], ()
        return [slot.pop() if slot else None for slot in self._slots]


def drive(transport: Transport, *passes: Pass[Any]) -> list[Any]:
    """Runs passes to their ends, in turn: each goes on until it asks for an exchange, then the next has its go."""
    results: list[Any] = [None] * len(passes)
    live: deque[tuple[int, Pass[Any], Pending | None]] = deque((i, run, None) for i, run in enumerate(passes))
    while live:
        index, run, pending = live.popleft()
        try:
            request = next(run) if pending is None else run.send(pending())
        except StopIteration as end:
            results[index] = end.value
        else:
            live.append((index, run, transport.launch(request)))
    return results
