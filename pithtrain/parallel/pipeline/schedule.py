"""Pipeline schedules as tables: for each rank, the actions that it runs, in order.

A table is made by a pure function of counts. Each rank's row is first written in the papers' own notation, a list of
moves such as "F0" (a forward of the rank's chunk 0) or "F1+B0" (a pair); numbering the moves gives the actions, since
every chunk takes its micro-batches in ascending order, forwards and backwards alike. A published schedule that needs
more micro-batches than there are is written for as many as it needs, and what belongs to the others is left out: what
remains runs in the order of a table that ran, so it cannot wait in a circle.

Sources: "1f1b" and "interleaved": Narayanan et al., arXiv 2104.04473, section 2.2; "zbv": Qi et al., arXiv 2405.15362
and arXiv 2401.10241, section 6; "dualpipev": DeepSeek-V3, arXiv 2412.19437, section 3.2.1, in the form with half the
ranks that DeepSeek's DualPipe describes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, cast

ScheduleKind = Literal["1f1b", "interleaved", "zbv", "dualpipev"]
Kind = Literal["F", "B", "I", "W"]

LOOKAHEAD = 3
"""Steps: how far ahead of the step that needs it a receive is posted. With fewer, ZB-V's ranks can all be sending."""


class Action(NamedTuple):
    """One stage's work on one micro-batch: F forward, B full backward, or I input gradient and, later, W weight one."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Pair(NamedTuple):
    """One micro-batch's forward overlapped with another's full backward, on one rank's two stages."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Step = Action | Pair


class Transfer(NamedTuple):
    """One message between neighbouring stages on different ranks; `stage` is the one that receives."""

    kind: Literal["hidden", "grad"]
    stage: int
    microbatch: int

    @property
    def source(self) -> int:
        """The stage that sends it, if there is one."""
        return self.stage + (-1 if self.kind == "hidden" else 1)

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Who runs what, in which order."""

    kind: ScheduleKind
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    """The rank of each of the num_ranks * num_chunks stages."""
    steps: tuple[tuple[Step, ...], ...]
    """By rank, in the order in which it runs them."""
    note: str = ""
    """How the table differs from the published one; empty if it does not."""

    def forwards(self) -> "Schedule":
        """The forwards alone: an evaluation. In a V each rank takes its two stages in turn, in step with its peers.

        In their order beside backwards, a V's forwards could all be sending at once.
        """
        rows = [[a for step in row for a in actions(step) if a.kind == "F"] for row in self.steps]
        if self.kind in ("zbv", "dualpipev"):
            rows = [sorted(row, key=lambda a: 2 * a.microbatch + a.stage) for row in rows]
        return replace(self, steps=tuple(map(tuple, rows)))

    def pairs(self, stage: int, microbatch: int) -> bool:
        """Whether this backward runs beside a forward."""
        steps, backward = self.steps[self.rank_of[stage]], Action("B", stage, microbatch)
        return any(isinstance(step, Pair) and step.backward == backward for step in steps)

    def splits(self, stage: int, microbatch: int) -> bool:
        """Whether this backward is an I and a W, so that its weight gradients wait."""
        return Action("W", stage, microbatch) in self.steps[self.rank_of[stage]]

    def crosses(self, stage: int, other: int) -> bool:
        """Whether both are stages, on different ranks."""
        last = len(self.rank_of) - 1
        return 0 <= stage <= last and 0 <= other <= last and self.rank_of[stage] != self.rank_of[other]


def actions(step: Step) -> tuple[Action, ...]:
    """The one or two actions of a step, a pair's forward first."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


def stage_ranks(kind: ScheduleKind, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """The rank of each stage: round after round over the ranks, or down and up again for the V kinds."""
    down = tuple(range(num_ranks))
    return down + down[::-1] if kind in ("zbv", "dualpipev") else down * num_chunks


@cache  # every step asks for the same one
def make_schedule(kind: ScheduleKind, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """The table of `kind` for any number of ranks and micro-batches from 1 up.

    `num_chunks` is the number of stages per rank: 1 for "1f1b", 2 for "zbv" and "dualpipev", any for "interleaved"
    (default 2). Raises ValueError for a count that does not fit.
    """
    fixed = {"1f1b": 1, "interleaved": None, "zbv": 2, "dualpipev": 2}[kind]
    chunks = num_chunks if num_chunks is not None else fixed or 2
    for name, count in (("ranks", num_ranks), ("micro-batches", num_microbatches), ("chunks per rank", chunks)):
        if count < 1:
            raise ValueError(f"schedule {kind}: got {count} {name}, expected at least 1; give 1 or more")
    if fixed and chunks != fixed:
        raise ValueError(
            f'schedule {kind}: got {chunks} chunks per rank, expected {fixed}; leave them out, or take "interleaved"'
        )
    rank_of = stage_ranks(kind, num_ranks, chunks)
    needed = _published(kind, num_ranks, num_microbatches, chunks)
    rows = []
    for rank in range(num_ranks):
        stages = [stage for stage, owner in enumerate(rank_of) if owner == rank]
        rows.append(tuple(_number(_moves(kind, num_ranks, rank, needed, chunks), stages, num_microbatches)))
    note = (
        f"{kind} on {num_ranks} ranks is published for {needed} micro-batches, not for {num_microbatches}: "
        f"this is the table for {needed} without the last {needed - num_microbatches}"
    )
    note = note if needed > num_microbatches else ""
    return Schedule(kind, num_ranks, chunks, num_microbatches, rank_of, tuple(rows), note)


def _published(kind: ScheduleKind, ranks: int, count: int, chunks: int) -> int:
    """The least number of micro-batches from `count` up for which the schedule is published."""
    match kind:
        case "1f1b" | "interleaved":
            return count if chunks == 1 else -(-count // ranks) * ranks
        case "zbv":
            return max(count, 2 * ranks - 1)
        case "dualpipev":
            return max(count, 2 * ranks)


def _moves(kind: ScheduleKind, ranks: int, rank: int, count: int, chunks: int) -> list[str]:
    match kind:
        case "1f1b" | "interleaved":
            return _one_forward_one_backward(ranks, rank, count, chunks)
        case "zbv":
            return _zbv(ranks, rank, count)
        case "dualpipev":
            return _dualpipev(ranks, rank, count)


def _one_forward_one_backward(ranks: int, rank: int, count: int, chunks: int) -> list[str]:
    """Forwards until the first backward is due, then one of each in turn, then the backwards that are left.

    With several chunks a rank takes `ranks` micro-batches through one chunk, then through the next.
    """
    turns = [index // ranks % chunks for index in range(count * chunks)]
    forwards = [f"F{chunk}" for chunk in turns]
    backwards = [f"B{chunks - 1 - chunk}" for chunk in turns]
    ahead = (ranks - rank - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
    ahead = min(ahead, len(turns))
    steady = [move for both in zip(forwards[ahead:], backwards, strict=False) for move in both]
    return forwards[:ahead] + steady + backwards[len(turns) - ahead :]


def _zbv(ranks: int, rank: int, count: int) -> list[str]:
    after = ranks - rank - 1
    return [
        *["F0"] * (2 * after + 1),
        *["F1", "F0"] * rank,
        *["F1", "I1", "W1"] * (after + 1),
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (count - ranks - after),
        *["I0", "W0", "F1", "I1", "W1"] * after,
        *["I0", "I1"] * rank,
        *["I0", "W0"] * (after + 1),
        *["W1"] * rank,
        *["W0"] * rank,
    ]


def _dualpipev(ranks: int, rank: int, count: int) -> list[str]:
    """The second half of the last backwards is split: their weight gradients fill the end, oldest first."""
    after, upto = ranks - rank - 1, rank + 1
    main = ["F0+B1", "F1+B0"] * (count - 2 * ranks + upto)
    turn = ["F0", "B1"] if after == 0 else main[:1]  # the last rank starts unpaired, which shortens the bubble
    return [
        *["F0"] * (2 * after),
        *["F0", "F1"] * upto,
        *["I1", "W", "F1"] * after,
        *turn,
        *main[1:],
        *["B1", "F1+B0"] * after,
        *(["B1", "B0"] * upto)[:upto],
        *(["I1", "I0"] * upto)[upto:],
        *["W", "I0"] * after,
        *["W"] * upto,
    ]


def _number(moves: Iterable[str], stages: list[int], num_microbatches: int) -> Iterator[Step]:
    """Moves of a rank whose chunks are `stages` -> its steps, without the micro-batches from `num_microbatches` up.

    A chunk's k-th forward is micro-batch k, and so is its k-th backward. "W0" is the weight gradient of the oldest I
    of chunk 0 that has none yet, "W" that of any chunk.
    """
    counts: Counter[tuple[bool, str]] = Counter()
    waiting: list[Action] = []

    def number(move: str) -> Action:
        kind, chunk = cast(Kind, move[0]), move[1:]
        if kind == "W":
            oldest = next(a for a in waiting if not chunk or a.stage == stages[int(chunk)])
            waiting.remove(oldest)
            return oldest._replace(kind="W")
        action = Action(kind, stages[int(chunk)], counts[kind == "F", chunk])
        counts[kind == "F", chunk] += 1
        if kind == "I":
            waiting.append(action)
        return action

    for move in moves:
        numbered = [number(part) for part in move.split("+")]
        kept = [action for action in numbered if action.microbatch < num_microbatches]
        if kept:
            yield kept[0] if len(kept) == 1 else Pair(*kept)


def outgoing(step: Step, schedule: Schedule) -> tuple[Transfer, ...]:
    """What a step sends when it has run, in order. Neighbouring stages on one rank hand over without a message."""
    there = ((a, a.stage + _ahead(a)) for a in actions(step))
    return tuple(Transfer(_content(a), to, a.microbatch) for a, to in there if schedule.crosses(a.stage, to))


def incoming(step: Step, schedule: Schedule) -> tuple[Transfer, ...]:
    """What a step needs before it runs."""
    here = ((a, a.stage - _ahead(a)) for a in actions(step))
    return tuple(
        Transfer(_content(a), a.stage, a.microbatch) for a, source in here if schedule.crosses(source, a.stage)
    )


def _ahead(action: Action) -> int:
    """From an action's stage to the one that goes on with its result."""
    return {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]


def _content(action: Action) -> Literal["hidden", "grad"]:
    return "hidden" if action.kind == "F" else "grad"


@cache
def arrivals(schedule: Schedule, rank: int) -> tuple[tuple[Transfer, ...], ...]:
    """For each step of `rank`, the receives that are posted before it runs.

    They are those needed up to LOOKAHEAD steps later and not posted yet. What one peer sends arrives in the order in
    which it is sent, so a message's forerunners from the same peer are posted with it; peers are in order of rank.
    """
    steps = schedule.steps[rank]
    needed = {transfer: index for index, step in enumerate(steps) for transfer in incoming(step, schedule)}
    posts: list[list[Transfer]] = [[] for _ in steps]
    for row in reversed(schedule.steps):
        due = len(steps)
        for transfer in reversed([t for step in row for t in outgoing(step, schedule) if t in needed]):
            due = min(due, max(0, needed[transfer] - LOOKAHEAD))
            posts[due].insert(0, transfer)
    return tuple(map(tuple, posts))
