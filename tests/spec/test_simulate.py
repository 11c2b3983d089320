"""The simulator: closed forms of the papers, and tables spoilt by hand that it must refuse."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pithtrain.parallel.pipeline.schedule import Action, Pair, Schedule, ScheduleKind, Step, make_schedule
from spec.simulate import Costs, Simulation, simulate

MANY = [(ranks, n) for ranks in (1, 2, 3, 4, 8) for n in (2 * ranks, 2 * ranks + 3, 4 * ranks)]


def spoilt(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    """The same with another row for one rank."""
    return replace(schedule, steps=(*schedule.steps[:rank], tuple(steps), *schedule.steps[rank + 1 :]))


def idle(run: Simulation) -> list[float]:
    """By rank, the time in which it runs nothing."""
    return [run.time - sum(span.end - span.start for span in row) for row in run.spans]


# --- closed forms


def test_1f1b_bubble_and_activations() -> None:
    for ranks, n in [*MANY, (4, 1), (8, 3)]:
        run = simulate(make_schedule("1f1b", ranks, n), Costs(forward=1, input_grad=1.5, weight_grad=0.5))
        assert run.bubble == pytest.approx((ranks - 1) / (n + ranks - 1), abs=1e-12)
        assert run.time == pytest.approx((n + ranks - 1) * 3)
        assert run.peak_activations == tuple(min(ranks - rank, n) for rank in range(ranks))


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_bubble_and_activations(chunks: int) -> None:
    for ranks, n in [(ranks, times * ranks) for ranks in (1, 2, 4, 8) for times in (1, 2, 4)]:
        run = simulate(make_schedule("interleaved", ranks, n, chunks))
        assert run.bubble == pytest.approx((ranks - 1) / (chunks * n + ranks - 1), abs=1e-12)
        warm = [2 * (ranks - rank - 1) + (chunks - 1) * ranks for rank in range(ranks)]
        assert run.peak_activations == tuple(min(ahead + 1, n * chunks) for ahead in warm)


def test_zbv_has_no_bubble_between_its_first_and_last_step() -> None:
    for ranks, n in MANY:
        run = simulate(make_schedule("zbv", ranks, n))
        for rank, row in enumerate(run.spans):
            gaps = [later.start - sooner.end for sooner, later in pairwise(row)]
            assert max(gaps, default=0) == 0, f"{ranks} ranks, {n} micro-batches, rank {rank}"
        assert idle(run) == [ranks - 1] * ranks, "the time until the first forward has gone down"
        assert run.peak_activations == (2 * ranks,) * ranks, "that of 1F1B's first rank: its stages are half as large"


def test_dualpipev_bubble_and_activations_are_those_of_its_authors() -> None:
    """Bubble (PP/2 - 1)(F&B + B - 3W) and PP + 1 activations, where PP is the number of stages.

    The last rank, which runs one pair's halves apart, is idle for less where a pair hides something.
    """
    for ranks, n in MANY:
        for exchange in (0, 0.25, 0.5):
            run = simulate(make_schedule("dualpipev", ranks, n), Costs(exchange=exchange))
            pair, backward, weight = 3 - 2 * exchange, 2, 1
            assert max(idle(run)) == pytest.approx((ranks - 1) * (pair + backward - 3 * weight)), (ranks, n, exchange)
            assert run.peak_activations == (2 * ranks + 1,) * ranks


def test_an_activation_is_kept_until_its_weight_gradient() -> None:
    table = make_schedule("zbv", 1, 2)
    one = [Action("F", 0, 0), Action("F", 1, 0), Action("I", 1, 0), Action("I", 0, 0)]
    passes = [action._replace(microbatch=m) for m in range(2) for action in one]
    weights = [Action("W", stage, m) for m in range(2) for stage in range(2)]
    assert simulate(spoilt(table, 0, [*passes, *weights])).peak_activations == (4,)
    assert simulate(table).peak_activations == (2,)


# --- costs


def test_a_pair_hides_exchanges_and_nothing_else() -> None:
    pair = Pair(Action("F", 0, 1), Action("B", 1, 0))
    assert Costs(1, 2, 4).of(pair) == 7
    assert Costs(1, 2, 4, exchange=0.5).of(pair) == 6
    assert Costs(1, 1, 0, exchange=1).of(pair) == 2, "both exchanges share the wires"
    assert Costs((1, 0), (0, 8), 0, exchange=(1, 3)).of(pair) == 8, "never less than one of its halves"
    assert [Costs(1, 2, 4, exchange=0.5).of(Action(kind, 0, 0)) for kind in "FBIW"] == [1, 6, 2, 4]  # type: ignore[arg-type]


def test_costs_may_differ_by_stage_and_messages_take_time() -> None:
    run = simulate(make_schedule("1f1b", 2, 1), Costs(forward=(1, 2), input_grad=(4, 8), weight_grad=16, transfer=32))
    assert [[(s.start, s.end) for s in row] for row in run.spans] == [[(0, 1), (91, 111)], [(33, 35), (35, 59)]]
    assert run.time == 111


def test_a_send_waits_for_the_receive() -> None:
    """Rank 1 is busy with its first micro-batch: rank 0's fifth message waits, and so does its fifth forward."""
    table = make_schedule("1f1b", 2, 6)
    alone = table.forwards()
    run = simulate(alone, Costs(forward=(1, 10)))
    assert [span.start for span in run.spans[0]] == [0, 1, 2, 3, 4, 11]
    assert [span.start for span in run.spans[1]] == [1, 11, 21, 31, 41, 51]


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_the_critical_path_fills_the_time(kind: ScheduleKind) -> None:
    for ranks, n in [(1, 3), (4, 8), (4, 3), (8, 17)]:
        run = simulate(make_schedule(kind, ranks, n), Costs(1, 1.25, 0.5, exchange=0.25))
        spans = [run.spans[place.rank][place.step] for place in run.critical_path]
        assert spans[0].start == 0 and spans[-1].end == run.time
        assert all(later.start == sooner.end for sooner, later in pairwise(spans))


# --- refusals


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    table = make_schedule("1f1b", 2, 2)  # rank 1: F1.0 B1.0 F1.1 B1.1
    late = spoilt(table, 1, [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)])
    simulate(late)  # another order of the same, which ends as well
    table = spoilt(table, 0, [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)])
    with pytest.raises(ValueError) as error:
        simulate(spoilt(table, 1, [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)]))
    assert str(error.value).splitlines() == [
        "schedule 1f1b cannot end, expected every wait to be met; change the order of the table:",
        "rank 0, step 1 (B0.0): waits for grad0.0",
        "rank 1, step 0 (F1.1): waits for hidden1.1",
    ]


def test_sends_that_wait_for_each_other_are_found() -> None:
    """Every message has its sender in time, yet both ranks send what the other will only read much later."""

    def crossed(n: int) -> Schedule:
        first = [Action("F", stage, m) for stage in (0, 3) for m in range(n)]
        first += [Action("B", stage, m) for stage in (3, 0) for m in range(n)]
        second = [Action("F", stage, m) for stage in (1, 2) for m in range(n)]
        second += [Action("B", stage, m) for m in range(n) for stage in (2, 1)]
        return replace(make_schedule("zbv", 2, n), steps=(tuple(first), tuple(second)))

    simulate(crossed(3))
    with pytest.raises(ValueError) as error:
        simulate(crossed(10))
    assert str(error.value).splitlines()[1:] == [
        "rank 0, step 23 (B3.3): waits until the receive of grad2.3 is posted",
        "rank 1, step 21 (B1.0): waits until the receive of grad0.0 is posted",
    ]


def test_what_comes_too_late_on_its_own_rank_is_named() -> None:
    table = make_schedule("zbv", 1, 1)
    row = [Action("F", 1, 0), Action("F", 0, 0), Action("I", 1, 0), Action("W", 1, 0), Action("B", 0, 0)]
    with pytest.raises(ValueError, match=r"rank 0, step 0 \(F1.0\): waits for F0.0, which comes later on the rank"):
        simulate(spoilt(table, 0, row))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ([Action("F", 1, 0)], "rank 1, stage 1, micro-batch 0: got actions 'F', expected 'FB' or 'FIW'"),
        ([Action("B", 1, 0), Action("F", 1, 0)], "stage 1, micro-batch 0: got actions 'BF', expected 'FB' or 'FIW'"),
        ([Action("F", 1, 0), Action("W", 1, 0), Action("I", 1, 0)], "got actions 'FWI', expected 'FB' or 'FIW'"),
        ([Action("F", 1, 0)] * 2 + [Action("B", 1, 0)], "got actions 'FFB', expected 'FB' or 'FIW'"),
        ([], "rank 1, stage 1, micro-batch 0: got actions '', expected 'FB' or 'FIW'"),
        (
            [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1)],
            "rank 1, stage 1, micro-batch 1: got actions 'F', expected ''",
        ),
        (
            [Action("F", 1, 0), Action("B", 1, 0), Action("F", 0, 0)],
            "rank 1, stage 0, micro-batch 0: got actions 'F', expected ''",
        ),
    ],
)
def test_actions_missing_twice_out_of_order_or_elsewhere_are_refused(row: list[Step], what: str) -> None:
    with pytest.raises(ValueError) as error:
        simulate(spoilt(make_schedule("1f1b", 2, 1), 1, row))
    assert what in str(error.value)
