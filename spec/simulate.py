"""Runs a schedule's table on paper: proves that it ends, and gives its time, its bubble and its activations in flight.

The rules are strict ones. A rank runs its steps in order. A send is a rendezvous: it holds the sender until the
receiver has posted the receive, which happens where `arrivals` says; the message is there `transfer` later. A table
that ends under these rules ends under any transport that buffers more.

What an exchange between expert-parallel ranks takes is part of a forward's time and of an input gradient's. Only in a
pair does it run behind the other half's compute: the pair then takes what it would take without either exchange, but
no less than each half alone and than both exchanges, which share the wires.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from pithtrain.parallel.pipeline.schedule import (
    Action,
    Pair,
    Schedule,
    Step,
    Transfer,
    actions,
    arrivals,
    incoming,
    outgoing,
)

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times in any one unit, the same for every stage or one per stage."""

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    transfer: float = 0.0
    """Of one message between stages."""
    exchange: PerStage = 0.0
    """Of one pass's exchanges, within `forward` and within `input_grad`: what a pair can hide. 0: nothing is hidden."""

    def of(self, step: Step) -> float:
        """The time of a step."""
        if not isinstance(step, Pair):
            return self._action(step)
        halves = [self._action(action) for action in actions(step)]
        exchanges = sum(_at(self.exchange, action.stage) for action in actions(step))
        return max(sum(halves) - exchanges, exchanges, *halves)

    def _action(self, action: Action) -> float:
        match action.kind:
            case "F":
                return _at(self.forward, action.stage)
            case "B":
                return _at(self.input_grad, action.stage) + _at(self.weight_grad, action.stage)
            case "I":
                return _at(self.input_grad, action.stage)
            case "W":
                return _at(self.weight_grad, action.stage)


def _at(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


class Place(NamedTuple):
    """A step of a rank."""

    rank: int
    step: int


class _Moment(NamedTuple):
    """A time, and the step whose end it waited for."""

    time: float
    after: Place | None


class Span(NamedTuple):
    """When a step runs, and the step that it waited for last: its rank's previous one or another rank's."""

    start: float
    end: float
    after: Place | None


@dataclass(frozen=True)
class Simulation:
    """What came out. Times are in the unit of the costs."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """By rank, one per step."""
    time: float
    """From the start to the end of the last step anywhere."""
    bubble: float
    """The share of ranks x time in which a rank runs nothing."""
    peak_activations: tuple[int, ...]
    """By rank, how many stages' activations are kept at most, one micro-batch's each: from F to the end of B or W."""
    critical_path: tuple[Place, ...]
    """Steps from the start to the last one, each of which waited for the one before."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Runs the table, for costs of 1 if none are given.

    Raises ValueError where actions are missing or too many, and where ranks wait in a circle: it then names each
    rank that waits, its step and what for.
    """
    check_actions(schedule)
    run = _Run(schedule, costs or Costs())
    live = {rank: run.rank(rank) for rank in range(schedule.num_ranks)}
    while live:
        before = run.progress
        waiting = {rank: next(steps, None) for rank, steps in live.items()}
        live = {rank: live[rank] for rank, wait in waiting.items() if wait is not None}
        if live and run.progress == before:
            raise ValueError(
                f"schedule {schedule.kind} cannot end, expected every wait to be met; change the order of the table:\n"
                + "\n".join(f"rank {rank}, {wait}" for rank, wait in waiting.items() if wait is not None)
            )
    return run.result()


def check_actions(schedule: Schedule) -> None:
    """Each stage has every micro-batch once, on its rank: F then B, or F, I, W; or, for evaluation, F alone throughout.

    Raises ValueError with the first that is otherwise.
    """
    found: defaultdict[tuple[int, int, int], str] = defaultdict(str)
    for rank, row in enumerate(schedule.steps):
        for kind, stage, microbatch in (action for step in row for action in actions(step)):
            found[rank, stage, microbatch] += kind
    passes = ("F",) if set(found.values()) == {"F"} else ("FB", "FIW")
    expected = {
        (rank, stage, microbatch): passes
        for stage, rank in enumerate(schedule.rank_of)
        for microbatch in range(schedule.num_microbatches)
    }
    for key in sorted(expected.keys() | found.keys()):
        want = expected.get(key, ("",))
        if found[key] not in want:
            rank, stage, microbatch = key
            raise ValueError(
                f"schedule {schedule.kind}, rank {rank}, stage {stage}, micro-batch {microbatch}: got actions "
                f"{found[key]!r}, expected {' or '.join(map(repr, want))} in this order; correct the table"
            )


class _Run:
    """The state that the ranks share while they run."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.posted: dict[Transfer, _Moment] = {}
        self.arrived: dict[Transfer, _Moment] = {}
        self.done: set[Action] = set()
        self.spans: list[list[Span]] = [[] for _ in schedule.steps]

    @property
    def progress(self) -> int:
        return len(self.posted) + len(self.arrived) + len(self.done)

    def rank(self, rank: int) -> Iterator[str]:
        """Runs a rank's steps, yielding what it waits for as long as it waits."""
        now = _Moment(0.0, None)
        for index, posts in enumerate(arrivals(self.schedule, rank)):
            step, here = self.schedule.steps[rank][index], Place(rank, index)
            self.posted |= dict.fromkeys(posts, now)
            for action in _needs(step, self.schedule):
                while action not in self.done:
                    yield f"step {index} ({step}): waits for {action}, which comes later on the rank"
            for transfer in incoming(step, self.schedule):
                while transfer not in self.arrived:
                    yield f"step {index} ({step}): waits for {transfer}"
                now = max(now, self.arrived[transfer], key=itemgetter(0))
            end = now.time + self.costs.of(step)
            self.spans[rank].append(Span(now.time, end, now.after))
            self.done |= {a._replace(kind="B") if a.kind == "I" else a for a in actions(step)}  # an I is a backward
            now = _Moment(end, here)
            for transfer in outgoing(step, self.schedule):
                while transfer not in self.posted:
                    yield f"step {index} ({step}): waits until the receive of {transfer} is posted"
                now = max(now, self.posted[transfer], key=itemgetter(0))
                self.arrived[transfer] = _Moment(now.time + self.costs.transfer, now.after)

    def result(self) -> Simulation:
        places = [Place(rank, index) for rank, row in enumerate(self.spans) for index in range(len(row))]
        span = {place: self.spans[place.rank][place.step] for place in places}
        last = max(places, key=lambda place: span[place].end)
        time, busy = span[last].end, sum(s.end - s.start for s in span.values())
        path = [last]
        while (after := span[path[-1]].after) is not None:
            path.append(after)
        return Simulation(
            schedule=self.schedule,
            spans=tuple(map(tuple, self.spans)),
            time=time,
            bubble=1 - busy / (time * self.schedule.num_ranks) if time else 0.0,
            peak_activations=tuple(_peak(row) for row in self.schedule.steps),
            critical_path=tuple(reversed(path)),
        )


def _needs(step: Step, schedule: Schedule) -> Iterator[Action]:
    """What must have run on the same rank before a step."""
    ranks = schedule.rank_of
    for kind, stage, microbatch in actions(step):
        if kind != "F":
            yield Action("B" if kind == "W" else "F", stage, microbatch)
        before = stage + (-1 if kind == "F" else 1)
        if kind != "W" and 0 <= before < len(ranks) and ranks[before] == ranks[stage]:
            yield Action("F" if kind == "F" else "B", before, microbatch)


def _peak(row: Sequence[Step]) -> int:
    held = peak = 0
    for step in row:
        for action in actions(step):  # a pair's forward comes first: both are held while it runs
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, held)
    return peak
