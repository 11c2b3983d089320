"""The executor: the order of a rank's actions, messages and exchanges is the table's, on every kind of schedule.

Ranks are threads here, and a send waits until its receive is posted. Messages say what they are.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from pithtrain import step
from pithtrain.layers.balance import Objective
from pithtrain.models.decoder import SparseLayer, build_stage
from pithtrain.ops.linear import Compute
from pithtrain.ops.rope import rope_tables
from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.pipeline.executor import execute
from pithtrain.parallel.pipeline.schedule import (
    Pair,
    Schedule,
    ScheduleKind,
    Transfer,
    actions,
    arrivals,
    make_schedule,
    outgoing,
)
from pithtrain.parallel.tape import Pass, Phase, Piece
from pithtrain.parallel.transport import AllReduce, Receive, Request, Send, Transport
from spec.simulate import simulate
from tests.parallel.meshes import mesh_of
from tests.parallel.threads import Wired, Wires, run_threads
from tests.whole_model import ARCH, new_batch, split

KINDS: tuple[ScheduleKind, ...] = ("1f1b", "interleaved", "zbv", "dualpipev")
COUNTS = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 2), (4, 8), (4, 9)]  # ranks, micro-batches


def message(transfer: Transfer) -> Tensor:
    return torch.tensor([float(transfer.kind == "grad"), transfer.stage, transfer.microbatch])


def read(tensor: Tensor) -> Transfer:
    grad, stage, microbatch = (int(x) for x in tensor)
    return Transfer("grad" if grad else "hidden", stage, microbatch)


@dataclass(frozen=True, eq=False)
class Saying:
    """Work whose messages name themselves. yields: exchanges within a forward and a backward.

    left: the split and the paired backwards that have left weight gradients, as each does around its exchanges.
    """

    schedule: Schedule
    mesh: Mesh
    yields: tuple[int, int]
    forwarded: set[tuple[int, int]] = field(default_factory=set)
    left: set[tuple[int, int]] = field(default_factory=set)

    @property
    def last(self) -> int:
        return len(self.schedule.rank_of) - 1

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Pass[Tensor | None]:
        assert (hidden is None) == (stage == 0)
        assert hidden is None or read(hidden) == Transfer("hidden", stage, microbatch)
        for _ in range(self.yields[0]):
            yield AllReduce(torch.zeros(1), self.mesh.cp)
        self.forwarded.add((stage, microbatch))
        return None if stage == self.last else message(Transfer("hidden", stage + 1, microbatch))

    def backward(self, stage: int, microbatch: int, grad: Tensor | None) -> Pass[Tensor | None]:
        assert (grad is None) == (stage == self.last) and (stage, microbatch) in self.forwarded
        assert grad is None or read(grad) == Transfer("grad", stage, microbatch)
        waits = self.schedule.splits(stage, microbatch) or self.schedule.pairs(stage, microbatch)
        for _ in range(self.yields[1]):
            self.left.update({(stage, microbatch)} if waits else ())
            yield AllReduce(torch.zeros(1), self.mesh.cp)
        self.left.update({(stage, microbatch)} if waits else ())
        return message(Transfer("grad", stage - 1, microbatch)) if stage else None

    def weight_gradients(self, stage: int, microbatch: int) -> None:
        self.left.discard((stage, microbatch))


def logs(schedule: Schedule, yields: tuple[int, int]) -> list[list[str]]:
    """By rank: actions as they start, receives as they are posted, messages as they are sent."""

    def run(rank: int, wires: Wires) -> list[str]:
        log, mesh = list[str](), mesh_of(rank, pp=schedule.num_ranks)

        def note(request: Request) -> None:
            match request:
                case Send(tensor, peer, axis):
                    log.append(f"{read(tensor)} to {peer} over {axis.name}")
                case Receive(_, peer, axis):
                    log.append(f"post {peer} over {axis.name}")

        def observe(name: str, phase: Phase, run: Callable[[], Any]) -> Any:
            if phase == "action":
                log.append(name)
            return run()

        transport = Wired(wires=wires, rank=rank, note=note)
        work = Saying(schedule, mesh, yields)
        execute(schedule, work, mesh, transport, torch.empty(3), observe)
        assert not work.left, "weight gradients were never added"
        return log

    return run_threads((schedule.num_ranks, 1, 1, 1), run)


def as_the_table_says(schedule: Schedule, rank: int) -> list[str]:
    lines = []
    for row, posts in zip(schedule.steps[rank], arrivals(schedule, rank), strict=True):
        sources = [schedule.rank_of[t.stage + (-1 if t.kind == "hidden" else 1)] for t in posts]
        lines += [f"post {source} over {'pp' if source < rank else 'pp_back'}" for source in sources]
        lines.append(str(row))
        for transfer in outgoing(row, schedule):
            peer = schedule.rank_of[transfer.stage]
            lines.append(f"{transfer} to {peer} over {'pp' if peer > rank else 'pp_back'}")
    return lines


@pytest.mark.parametrize("kind", KINDS)
def test_actions_receives_and_sends_are_the_tables(kind: ScheduleKind) -> None:
    """Each action, each posted receive and each message in its place; evaluation runs the forwards alone."""
    for ranks, microbatches in COUNTS:
        whole = make_schedule(kind, ranks, microbatches)
        for schedule in (whole, whole.forwards()):
            for rank, log in enumerate(logs(schedule, (0, 0))):
                assert log == as_the_table_says(schedule, rank), f"{ranks} ranks, {microbatches} micro-batches"


@pytest.mark.parametrize("yields", [(0, 3), (3, 0), (2, 2)], ids=str)
def test_messages_keep_their_order_whichever_pass_of_a_pair_ends_first(yields: tuple[int, int]) -> None:
    schedule = make_schedule("dualpipev", 4, 10)
    for rank, log in enumerate(logs(schedule, yields)):
        assert log == as_the_table_says(schedule, rank)


DEEP = replace(ARCH, num_layers=8, sparse_layers=(True, False) * 4, num_experts=4, top_k=2, tie_word_embeddings=True)
S = 5


def staged(mesh: Mesh, transport: Transport, execution: step.Execution) -> step.Trainee:
    """What step.build gives, without connecting ranks that are no processes."""
    cpu = torch.device("cpu")
    layers, shard = step.place(DEEP, mesh, transport, cpu, execution)
    shard.initialise(0)
    stages = {
        stage: build_stage(DEEP, shard.weights(), layers[stage], DEEP.num_experts // mesh.ep.size) for stage in layers
    }
    tables = rope_tables(S, DEEP.head_dim, DEEP.rope_theta, cpu)
    return step.Trainee(DEEP, stages, shard, mesh, transport, tables, execution)


def work_of(trainee: step.Trainee, n: int, seed: int = 0) -> step._Work:
    batches, labels = split(new_batch(n, S, seed), n), step.Totals(1, (S,) * n, n)
    return step._Work(trainee, batches, step.learned(trainee, n, None), Compute(), Objective("sequence", 0.1), labels)


def held_by(work: step._Work) -> set[tuple[int, int]]:
    """The stages' micro-batches that wait for their backward pass or their weight gradients."""
    return work.live.keys() | {key for key, queue in work.queues.items() if queue.deferred}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_keeps_the_micro_batches_that_the_table_says(kind: ScheduleKind) -> None:
    """After each action: from F to B, or to the W of an I; so the simulator's peak is never passed."""
    n = 9
    schedule = make_schedule(kind, 4, n)

    def run(rank: int, wires: Wires) -> list[int]:
        held = list[int]()

        def observe(name: str, phase: Phase, run: Callable[[], Any]) -> Any:
            result = run()
            if phase == "action":
                held.append(len(held_by(work)))
            return result

        trainee = staged(mesh_of(rank, pp=4), Wired(wires=wires, rank=rank), step.Execution(kind))
        work = work_of(replace(trainee, observe=observe), n)
        work.execute(schedule)
        return held

    for rank, held in enumerate(run_threads((4, 1, 1, 1), run)):
        changes = [sum({"F": 1, "I": 0}.get(a.kind, -1) for a in actions(row)) for row in schedule.steps[rank]]
        assert held == list(accumulate(changes)), f"rank {rank}"
        assert held[-1] == 0 < max(held) <= simulate(schedule).peak_activations[rank]


def pieces() -> int:
    return sum(type(thing) is Piece for thing in gc.get_objects())


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_lets_go_of_what_its_forward_kept(kind: ScheduleKind) -> None:
    """At once, not when Python collects its garbage: after each action, the pieces of those yet to come alone."""
    kept, expected = list[int](), list[int]()

    def observe(name: str, phase: Phase, run: Callable[[], Any]) -> Any:
        result = run()
        if phase == "action":
            kept.append(pieces())
            expected.append(sum(per_stage[stage] for stage, _ in work.live))
        return result

    trainee = staged(mesh_of(0), Transport(), step.Execution(kind))
    work = work_of(replace(trainee, observe=observe), 3)
    per_stage = {
        stage: sum(3 if isinstance(layer, SparseLayer) else 1 for layer in part.layers)
        + (part.embedding is not None)
        + (part.norm is not None)
        for stage, part in trainee.stages.items()
    }
    gc.collect()
    gc.disable()
    try:
        work.execute(trainee.schedule(3))
    finally:
        gc.enable()
    assert kept == expected and max(kept) > 0 == kept[-1]


def test_a_pair_runs_each_passes_exchanges_behind_the_others_compute(snapshot: SnapshotAssertion) -> None:
    """The launch order is a table: what rank 0 of two expert ranks does in one pair, a line each."""
    schedule = make_schedule("dualpipev", 1, 4)
    pair = next(str(item) for item in schedule.steps[0] if isinstance(item, Pair))

    def run(rank: int, wires: Wires) -> list[tuple[str, Phase]]:
        events, within = list[tuple[str, Phase]](), list[str]()

        def observe(name: str, phase: Phase, run: Callable[[], Any]) -> Any:
            if phase == "action":
                within.append(name)
            elif within[-1] == pair and phase != "host":
                events.append((name, phase))
            return run()

        transport = Wired(wires=wires, rank=rank)
        trainee = staged(mesh_of(rank, ep=2), transport, step.Execution("dualpipev"))
        work_of(replace(trainee, observe=observe), 4, seed=rank).execute(schedule)
        return events

    events, other = run_threads((1, 1, 1, 2), run)
    assert events == other, "every rank launches its collectives in the same order"
    assert "\n".join(f"{phase} {name}" for name, phase in events) == snapshot
    assert_hidden(events, of="", behind="backward")
    assert_hidden(events, of="_backward", behind="forward")


def assert_hidden(events: list[tuple[str, Phase]], of: str, behind: Phase) -> None:
    """Every exchange of one pass has compute of the other between its launch and its wait, while that still runs."""
    exchanges = [name + of for layer in range(8) for name in (f"layers.{layer}.dispatch", f"layers.{layer}.combine")]
    compute = [at for at, (name, phase) in enumerate(events) if phase == behind]
    launched = [name for name, phase in events if phase == "launch" and name in exchanges]
    assert len(launched) == 4, "two sparse layers, two exchanges each"
    for name in launched:
        launch, wait = events.index((name, "launch")), events.index((name, "wait"))
        if launch < compute[-1]:
            assert any(launch < at < wait for at in compute), f"nothing stands behind {name}"
