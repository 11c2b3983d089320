"""Runs a schedule's steps on one pipeline rank: any table, one loop.

Receives are posted as the table's `arrivals` say, so a message can travel before the step that needs it; a step waits
for its own messages only. A send is waited for when the one after the next goes to the same peer, and at the end:
the tables are proven free of deadlock with sends that wait at once, which is stricter.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.pipeline.schedule import Action, Pair, Schedule, Transfer, arrivals, outgoing
from pithtrain.parallel.tape import Observe, Pass, drive
from pithtrain.parallel.transport import Pending, Receive, Send, Transport


class Work(Protocol):
    """What the actions of a schedule do. Tensors are hidden states [B, S, D] or their gradients."""

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Pass[Tensor | None]:
        """hidden: None in the first stage. Gives what the next stage reads, None in the last."""

    def backward(self, stage: int, microbatch: int, grad: Tensor | None) -> Pass[Tensor | None]:
        """grad: None in the last stage. Gives the gradient of what the stage read, None in the first."""

    def weight_gradients(self, stage: int, microbatch: int) -> None:
        """Adds the weight gradients that the backward pass has left for later so far."""


@dataclass(frozen=True, eq=False)
class Post:
    """The messages of one run: receives posted, values for another stage of this rank, sends under way by peer.

    due: what the step that runs will send, in the table's order, which its receivers rely on. ready: what is computed
    but waits for its turn (of a pair, either pass may end first).
    """

    schedule: Schedule
    mesh: Mesh
    transport: Transport
    like: Tensor
    observe: Observe
    posted: dict[Transfer, Pending] = field(default_factory=dict)
    handed: dict[Transfer, Tensor] = field(default_factory=dict)
    due: deque[Transfer] = field(default_factory=deque)
    ready: dict[Transfer, Tensor] = field(default_factory=dict)
    sent: defaultdict[int, deque[Callable[[], object]]] = field(default_factory=lambda: defaultdict(deque))

    def post(self, transfer: Transfer) -> None:
        """Starts to receive."""
        peer = self.schedule.rank_of[transfer.source]
        receive = Receive(self.like.new_empty(self.like.shape), peer, self.mesh.back_from(peer))
        self.posted[transfer] = self.transport.launch(receive)

    def take(self, transfer: Transfer) -> Tensor | None:
        """Waits for a message; None where no stage sends it."""
        if not 0 <= transfer.source < len(self.schedule.rank_of):
            return None
        if transfer in self.handed:
            return self.handed.pop(transfer)
        (received,) = self.observe(str(transfer), "wait", self.posted.pop(transfer))
        return received

    def give(self, transfer: Transfer, tensor: Tensor) -> None:
        """Hands a message to another stage of this rank, or sends it once those before it are sent."""
        if self.schedule.rank_of[transfer.stage] == self.mesh.pp.index:
            self.handed[transfer] = tensor
            return
        self.ready[transfer] = tensor
        while self.due and self.due[0] in self.ready:
            first = self.due.popleft()
            self._send(first, self.ready.pop(first))

    def _send(self, transfer: Transfer, tensor: Tensor) -> None:
        peer = self.schedule.rank_of[transfer.stage]
        under_way = self.sent[peer]
        if len(under_way) > 1:
            under_way.popleft()()
        send, name = Send(tensor, peer, self.mesh.towards(peer)), str(transfer)
        pending = self.observe(name, "launch", partial(self.transport.launch, send))
        under_way.append(partial(self.observe, name, "wait", pending))

    def finish(self) -> None:
        """Waits for every send."""
        for under_way in self.sent.values():
            for wait in under_way:
                wait()
        assert not self.posted and not self.handed and not self.ready, "every message was taken"


def connect(rank_of: Sequence[int], mesh: Mesh, device: torch.device) -> None:
    """Collective. Sends one message over every channel between stages, pair by pair in one order on all ranks.

    NCCL makes a connection at its first use and waits there for the peer; a receive that is posted early must not.
    """
    transport, me = Transport(), mesh.pp.index
    for source, target in sorted({pair for a, b in pairwise(rank_of) if a != b for pair in ((a, b), (b, a))}):
        if me == source:
            transport.run(Send(torch.zeros(1, device=device), target, mesh.towards(target)))
        elif me == target:
            transport.run(Receive(torch.zeros(1, device=device), source, mesh.back_from(source)))


def execute(schedule: Schedule, work: Work, mesh: Mesh, transport: Transport, like: Tensor, observe: Observe) -> None:
    """Runs this rank's steps in order. like: a tensor of the shape, dtype and device of every message.

    The passes of a Pair run in turn, the backward first: what it leaves for later fills behind its exchanges.
    """
    rank, post = mesh.pp.index, Post(schedule, mesh, transport, like, observe)
    for step, arriving in zip(schedule.steps[rank], arrivals(schedule, rank), strict=True):
        for transfer in arriving:
            post.post(transfer)
        post.due.extend(outgoing(step, schedule))
        run: Callable[[], Any]
        match step:
            case Action("W", stage, microbatch):
                run = partial(work.weight_gradients, stage, microbatch)
            case Action():
                run = partial(drive, transport, _run(post, work, step), observe=observe)
            case Pair(forward, backward):
                both = _run(post, work, backward), _run(post, work, forward)
                filler = partial(work.weight_gradients, backward.stage, backward.microbatch)
                run = partial(drive, transport, *both, observe=observe, filler=filler)
        observe(str(step), "action", run)
    post.finish()


def _run(post: Post, work: Work, action: Action) -> Pass[None]:
    """One action: takes its message, runs the pass, sends what it gave."""
    _, stage, microbatch = action
    if action.kind == "F":
        hidden = yield from work.forward(stage, microbatch, post.take(Transfer("hidden", stage, microbatch)))
        if hidden is not None:
            post.give(Transfer("hidden", stage + 1, microbatch), hidden)
    else:
        grad = yield from work.backward(stage, microbatch, post.take(Transfer("grad", stage, microbatch)))
        if grad is not None:
            post.give(Transfer("grad", stage - 1, microbatch), grad)
