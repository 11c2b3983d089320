"""The tables: every count gives a valid one; where torch has the same schedule, the same one."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from syrupy.assertion import SnapshotAssertion
from torch.distributed.pipelining import schedules as torchs

from pithtrain.config.sections import PipelineConfig
from pithtrain.parallel.pipeline.schedule import (
    LOOKAHEAD,
    Action,
    Pair,
    Schedule,
    ScheduleKind,
    Transfer,
    actions,
    arrivals,
    incoming,
    make_schedule,
    outgoing,
    stage_ranks,
)
from spec.simulate import simulate

CASES: list[tuple[ScheduleKind, int]] = [
    ("1f1b", 1),
    *[("interleaved", chunks) for chunks in (1, 2, 3, 4)],
    ("zbv", 2),
    ("dualpipev", 2),
]


def text(schedule: Schedule) -> str:
    """A line per rank."""
    return "\n".join([*(" ".join(map(str, row)) for row in schedule.steps), schedule.note or "as published"])


# --- validity


@pytest.mark.parametrize(("kind", "chunks"), CASES)
def test_every_count_gives_a_table_that_ends(kind: ScheduleKind, chunks: int) -> None:
    few = [(ranks, n) for ranks in range(1, 5) for n in range(1, 21)]
    many = [(ranks, n) for ranks in range(5, 9) for n in (1, 2, 3, 7, 8, 9, 15, 16, 17)]
    for ranks, n in [*few, *many, (4, 33), (8, 64)]:
        schedule = make_schedule(kind, ranks, n, chunks)
        simulate(schedule)  # every action once, dependencies met, no deadlock
        for row in schedule.steps:
            assert not any(isinstance(step, Pair) for step in row) or kind == "dualpipev"
            for kinds in ("F", "BI", "W"):
                ascending([a for step in row for a in actions(step) if a.kind in kinds])


def ascending(row: list[Action]) -> None:
    """Each stage takes its micro-batches in order: balance losses count on it."""
    for stage in {action.stage for action in row}:
        numbers = [action.microbatch for action in row if action.stage == stage]
        assert numbers == sorted(numbers), f"stage {stage}: {numbers}"


@pytest.mark.parametrize(("kind", "chunks"), CASES)
def test_forwards_alone_are_a_table_too(kind: ScheduleKind, chunks: int) -> None:
    for ranks, n in [(1, 1), (1, 5), (2, 3), (4, 16), (8, 5), (8, 20)]:
        alone = make_schedule(kind, ranks, n, chunks).forwards()
        run = simulate(alone)
        assert all(isinstance(step, Action) and step.kind == "F" for row in alone.steps for step in row)
        for row in alone.steps:
            ascending([a for step in row for a in actions(step)])
        if n % ranks == 0 or kind != "interleaved":
            down = ranks - 1 if kind in ("1f1b", "interleaved") else 2 * (ranks - 1)  # a V ends where it began
            assert run.time == n * chunks + down, "nothing but the way there is idle"


def test_placement() -> None:
    assert stage_ranks("1f1b", 3, 1) == (0, 1, 2)
    assert stage_ranks("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_ranks("zbv", 3, 2) == stage_ranks("dualpipev", 3, 2) == (0, 1, 2, 2, 1, 0)


def test_splits_are_the_backwards_with_a_weight_gradient_of_their_own() -> None:
    table = make_schedule("dualpipev", 2, 4)
    split = {(s, m) for s in range(4) for m in range(4) if table.splits(s, m)}
    assert split == {(3, 0), (0, 2), (0, 3), (2, 3), (1, 3)}
    assert all(make_schedule("zbv", 2, 4).splits(s, m) for s in range(4) for m in range(4))


def test_notes_say_what_differs_from_the_published_table() -> None:
    for kind, ranks, fits, short in [("zbv", 4, 7, 6), ("dualpipev", 4, 8, 7), ("interleaved", 4, 8, 7)]:
        assert make_schedule(kind, ranks, fits).note == ""  # type: ignore[arg-type]
        assert make_schedule(kind, ranks, short).note == (  # type: ignore[arg-type]
            f"{kind} on {ranks} ranks is published for {fits} micro-batches, not for {short}: "
            f"this is the table for {fits} without the last 1"
        )
    assert make_schedule("1f1b", 4, 1).note == make_schedule("interleaved", 4, 3, 1).note == ""


def test_what_is_left_out_leaves_the_rest_in_order() -> None:
    whole, part = make_schedule("dualpipev", 4, 8), make_schedule("dualpipev", 4, 3)
    for row, short in zip(whole.steps, part.steps, strict=True):
        kept = [a for step in row for a in actions(step) if a.microbatch < 3]
        assert kept == [a for step in short for a in actions(step)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 4), "schedule 1f1b: got 0 ranks, expected at least 1; give 1 or more"),
        (("zbv", 2, 0), "schedule zbv: got 0 micro-batches, expected at least 1; give 1 or more"),
        (("interleaved", 2, 4, 0), "schedule interleaved: got 0 chunks per rank, expected at least 1; give 1 or more"),
        (
            ("1f1b", 2, 4, 2),
            'schedule 1f1b: got 2 chunks per rank, expected 1; leave them out, or take "interleaved"',
        ),
        (
            ("dualpipev", 2, 4, 3),
            'schedule dualpipev: got 3 chunks per rank, expected 2; leave them out, or take "interleaved"',
        ),
    ],
)
def test_counts_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make_schedule(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "arguments",
    [
        ("1f1b", 4, 8),
        ("interleaved", 2, 4, 2),
        ("zbv", 4, 8),
        ("dualpipev", 4, 8),
        ("dualpipev", 4, 3),
        ("dualpipev", 1, 3),
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
def test_tables(arguments: Any, snapshot: SnapshotAssertion) -> None:
    assert text(make_schedule(*arguments)) == snapshot


# --- messages


def test_neighbours_on_one_rank_hand_over_without_a_message() -> None:
    table = make_schedule("zbv", 2, 3)  # stages 0 1 1 0
    assert outgoing(Action("F", 0, 1), table) == (Transfer("hidden", 1, 1),) == incoming(Action("F", 1, 1), table)
    assert outgoing(Action("F", 1, 1), table) == () == incoming(Action("F", 2, 1), table)
    assert outgoing(Action("I", 2, 1), table) == () == incoming(Action("B", 1, 1), table)
    assert outgoing(Action("B", 3, 1), table) == (Transfer("grad", 2, 1),) == incoming(Action("I", 2, 1), table)
    for kind in ("F", "B", "I", "W"):  # the ends of the pipeline have no neighbour
        ends = outgoing(Action(kind, 3 if kind == "F" else 0, 0), table)
        assert ends == () == incoming(Action(kind, 0 if kind == "F" else 3, 0), table)
    assert outgoing(Action("W", 1, 1), table) == () == incoming(Action("W", 1, 1), table)


def test_a_pair_sends_its_forwards_message_first() -> None:
    table = make_schedule("dualpipev", 2, 4)
    assert outgoing(Pair(Action("F", 0, 3), Action("B", 3, 1)), table) == (
        Transfer("hidden", 1, 3),
        Transfer("grad", 2, 1),
    )


@pytest.mark.parametrize(("kind", "chunks"), CASES)
def test_receives_are_posted_once_in_time_and_in_the_senders_order(kind: ScheduleKind, chunks: int) -> None:
    table = make_schedule(kind, 4, 9, chunks)
    for rank, row in enumerate(table.steps):
        posts = arrivals(table, rank)
        posted = [transfer for some in posts for transfer in some]
        assert len(posts) == len(row)
        assert sorted(posted) == sorted(t for step in row for t in incoming(step, table))
        for peer in table.steps:
            sent = [t for step in peer for t in outgoing(step, table) if table.rank_of[t.stage] == rank]
            assert [t for t in posted if t in set(sent)] == sent
        for index, step in enumerate(row):
            early = {t for some in posts[: max(0, index - LOOKAHEAD) + 1] for t in some}
            assert set(incoming(step, table)) <= early


def test_no_receive_is_posted_earlier_than_a_later_step_or_message_asks() -> None:
    table = make_schedule("1f1b", 2, 6)
    posts = arrivals(table, 1)  # F B F B ...: the hidden states of micro-batch m are needed in step 2 m
    assert [[t.microbatch for t in some] for some in posts[:6]] == [[0, 1], [2], [], [3], [], [4]]
    assert all(t.kind == "hidden" for some in posts for t in some)


# --- torch.distributed.pipelining's own tables


def stage(index: int, ranks: int, chunks: int, rank: int) -> Any:
    last = ranks * chunks - 1
    return SimpleNamespace(
        stage_index=index,
        num_stages=last + 1,
        group_size=ranks,
        group_rank=rank,
        is_first=index == 0,
        is_last=index == last,
        has_backward=True,
        submod=None,
        device="cpu",
    )


def torch_rows(name: str, ranks: int, n: int, chunks: int) -> list[list[str]]:
    stages = [stage(rank, ranks, chunks, 0) for rank in range(chunks)]
    cls = getattr(torchs, name)
    made = cls(stages[0] if name == "Schedule1F1B" else stages, n, loss_fn=lambda *_: None)
    order = made._get_pipeline_order() if name == "Schedule1F1B" else made.pipeline_order
    if name == "Schedule1F1B":  # torch lists the last rank's forwards from 1 on; what it runs starts at 0
        order[ranks - 1] = [from_zero(action) for action in order[ranks - 1]]
    return [[word(action) for action in order[rank] if is_compute(action)] for rank in range(ranks)]


def from_zero(action: Any) -> Any:
    if action is None or action.computation_type.name != "FORWARD":
        return action
    return action._replace(microbatch_index=action.microbatch_index - 1)


def is_compute(action: Any) -> bool:
    """Not an idle slot, and not torch's own step that reduces gradients."""
    return action is not None and action.computation_type.name != "REDUCE_GRAD"


def word(action: Any) -> str:
    if action.sub_actions:
        return "+".join(word(part) for part in action.sub_actions)
    kind = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return f"{kind[action.computation_type.name]}{action.stage_index}.{action.microbatch_index}"


@pytest.mark.parametrize(
    ("kind", "name", "chunks", "counts"),
    [
        ("1f1b", "Schedule1F1B", 1, [(1, 1), (2, 2), (4, 4), (4, 9), (8, 16)]),
        ("interleaved", "ScheduleInterleaved1F1B", 2, [(2, 2), (2, 8), (4, 4), (4, 12), (8, 16)]),
        ("interleaved", "ScheduleInterleaved1F1B", 3, [(2, 4), (4, 8)]),
        ("zbv", "ScheduleZBVZeroBubble", 2, [(1, 1), (2, 1), (2, 3), (4, 3), (4, 7), (4, 9), (8, 16)]),
        ("dualpipev", "ScheduleDualPipeV", 2, [(1, 2), (2, 4), (2, 5), (4, 8), (4, 11), (8, 16), (8, 19)]),
    ],
)
def test_tables_are_torchs_where_torch_has_them(
    kind: ScheduleKind, name: str, chunks: int, counts: list[tuple[int, int]]
) -> None:
    for ranks, n in counts:
        table = make_schedule(kind, ranks, n, chunks)
        assert [[str(step) for step in row] for row in table.steps] == torch_rows(name, ranks, n, chunks), (ranks, n)


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_the_config_counts_a_schedules_stages_as_its_table_does(kind: ScheduleKind) -> None:
    assert PipelineConfig(schedule=kind).num_chunks == make_schedule(kind, 2, 4).num_chunks
