"""Pieces of a backward pass, and the driver that runs passes in turn."""

import gc
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.tape import Phase, Piece, Segment, drive
from pithtrain.parallel.transport import AllReduce, Pending, Request, Transport
from tests.agreement import randn

GRADS = randn(2, 3, seed=3), randn(2, 3, seed=4)


def segment(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """x is used three times, y once; an integer input picks rows; one output has no gradient."""
    return x * y + x.square(), 2 * x.index_select(0, index), index + 1


def test_a_piece_gives_the_gradients_of_autograd() -> None:
    x, y, index = randn(2, 3), randn(2, 3, seed=1), torch.tensor([1, 1])
    piece = Piece("layers.0.attention", segment, (x, y, index))
    leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
    expected = segment(*leaves, index)
    for got, output in zip(piece.forward(), expected, strict=True):
        assert torch.equal(got, output) and not got.requires_grad
    grads = torch.autograd.grad(expected[:2], leaves, GRADS)
    grad_x, grad_y, grad_index = piece.backward(*GRADS, None)
    assert grad_x is not None and torch.equal(grad_x, grads[0])
    assert grad_y is not None and torch.equal(grad_y, grads[1])
    assert grad_index is None and piece.name == "layers.0.attention"


def test_a_missing_gradient_counts_as_zero_and_what_nothing_reached_is_none() -> None:
    x, y, index = randn(2, 3), randn(2, 3, seed=1), torch.tensor([1, 0])
    piece = Piece("", segment, (x, y, index))
    piece.forward()
    grad_x, grad_y, _ = piece.backward(None, GRADS[1], None)
    assert grad_x is not None and torch.equal(grad_x, 2 * GRADS[1].flip(0)) and grad_y is None


def test_pieces_are_cut_from_each_other() -> None:
    """Gradients do not run through a piece into what came before it, nor does the piece keep that alive."""
    x = randn(2, 3).requires_grad_()
    kept = (x * 2).exp()
    before, held = kept.sin(), weakref.ref(kept)
    piece = Piece("", lambda x: (x.square(),), (before,))
    piece.forward()
    expected = GRADS[0] * 2 * before.detach()
    del kept, before
    gc.collect()
    assert held() is None
    (grad,) = piece.backward(GRADS[0])
    assert grad is not None and torch.equal(grad, expected)
    assert x.grad is None


def test_a_graph_is_freed_with_its_backward_pass() -> None:
    """What only the graph held goes with it, though the piece itself may live on."""
    made = []

    def run(x: Tensor) -> tuple[Tensor, ...]:
        kept = x.exp()
        made.append(weakref.ref(kept))
        return (kept * kept.sin(),)

    piece = Piece("", run, (randn(2, 3),))
    piece.forward()
    gc.collect()
    assert made[0]() is not None
    piece.backward(GRADS[0])
    gc.collect()
    assert made[0]() is None


def test_a_piece_that_runs_again_keeps_its_inputs_alone() -> None:
    """Same outputs, same gradients; nothing of the first run lives on, and the second sees the inputs of the first."""
    x, y, index = randn(2, 3), randn(2, 3, seed=1), torch.tensor([1, 1])
    made = []

    def run(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        kept = x.exp()
        made.append((weakref.ref(kept), torch.is_grad_enabled()))
        return segment(x, y * kept, index)

    plain, again = Piece("", run, (x, y, index)), Piece("", run, (x, y, index), recompute=True)
    outputs, outputs_again = plain.forward(), again.forward()
    gc.collect()
    assert made[0][0]() is not None and made[1][0]() is None, "the second keeps no graph"
    for one, other in zip(outputs, outputs_again, strict=True):
        assert torch.equal(one, other) and not other.requires_grad
    for one, other in zip(plain.backward(*GRADS, None), again.backward(*GRADS, None), strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    gc.collect()
    assert [grad for _, grad in made] == [True, False, True] and made[2][0]() is None


def test_what_the_first_run_decided_goes_to_the_second() -> None:
    """`again` is made once, of the first run's outputs, and stands for the segment in the backward pass."""
    runs: list[str] = []

    def first(x: Tensor) -> tuple[Tensor, ...]:
        runs.append("first")
        return x * 2, torch.tensor([5])

    def again(outputs: tuple[Tensor, ...]) -> Segment:
        def second(x: Tensor) -> tuple[Tensor, ...]:
            runs.append(f"second, {int(outputs[1])}")
            return x * 7, outputs[1]

        return second

    for recompute, expected, factor in ((False, ["first"], 2.0), (True, ["first", "second, 5"], 7.0)):
        runs.clear()
        piece = Piece("", first, (randn(2, 3),), recompute, again)
        assert torch.equal(piece.forward()[0], randn(2, 3) * 2)
        (grad,) = piece.backward(GRADS[0], None)
        assert runs == expected and grad is not None and torch.equal(grad, factor * GRADS[0])


@dataclass(frozen=True, eq=False)
class Watched(Transport):
    """Says when each request was launched and when it was waited for."""

    events: list[str] = field(default_factory=list)

    def launch(self, request: Request) -> Pending:
        assert isinstance(request, AllReduce)
        tensor = request.tensor
        self.events.append(f"launch {int(tensor)}")

        def wait() -> tuple[Tensor, ...]:
            self.events.append(f"wait {int(tensor)}")
            return (tensor * 10,)

        return wait


def steps(name: int, count: int, events: list[str]) -> Generator[Request, tuple[Tensor, ...], int]:
    total = 0
    for at in range(count):
        (answer,) = yield AllReduce(torch.tensor(10 * name + at), make_mesh().dp)
        events.append(f"go on {10 * name + at}")
        total += int(answer)
    return total


def test_passes_take_turns_behind_each_others_exchanges() -> None:
    transport = Watched()
    events = transport.events
    totals = drive(transport, steps(1, 2, events), steps(2, 1, events), steps(3, 0, events))
    assert totals == [10 * (10 + 11), 10 * 20, 0]
    assert events == [
        *("launch 10", "launch 20"),
        *("wait 10", "go on 10", "launch 11"),
        *("wait 20", "go on 20"),
        *("wait 11", "go on 11"),
    ]


def test_what_the_first_pass_left_is_done_behind_its_own_exchanges() -> None:
    """In a turn of its own, and once more when that pass has ended; the other pass goes on between."""
    transport = Watched()
    events = transport.events
    drive(transport, steps(1, 2, events), steps(2, 2, events), filler=lambda: events.append("fill"))
    assert events == [
        *("launch 10", "launch 20", "fill"),
        *("wait 20", "go on 20", "launch 21"),
        *("wait 10", "go on 10", "launch 11"),
        *("wait 21", "go on 21", "fill"),
        *("wait 11", "go on 11", "fill"),
    ]


def test_an_observer_sees_launches_and_waits_by_name() -> None:
    seen: list[tuple[str, Phase]] = []

    def observe(name: str, phase: Phase, run: Callable[[], Any]) -> Any:
        seen.append((name, phase))
        return run()

    def ask(name: str) -> Generator[Request, tuple[Tensor, ...], None]:
        yield AllReduce(torch.zeros(1), make_mesh().dp, name)

    drive(Transport(), ask("a"), ask("b"), observe=observe)
    assert seen == [("a", "launch"), ("b", "launch"), ("a", "wait"), ("b", "wait")]
