"""Timelines: what a recorder keeps, and what two ranks' recorded steps look like to Perfetto."""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pithtrain.parallel.tape import Phase
from pithtrain.timeline import TIMELINE, Recorder, merge
from tests.runs import make_run, run_ranks

Event = dict[str, Any]
ROWS = ("steps", "compute", "waits", "communication")


def write(run: Path, rank: int, *spans: tuple[str, Phase, int, int]) -> None:
    (run / TIMELINE).mkdir(exist_ok=True)
    (run / TIMELINE / f"step-00000002.rank-{rank:05d}.json").write_text(json.dumps({"rank": rank, "spans": spans}))


def slices(events: list[Event]) -> Iterator[tuple[int, str, str, int, int]]:
    """Rank, row as its thread is named, name, start and end in nanoseconds."""
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for e in events:
        if e["ph"] == "X":
            start, length = round(1e3 * e["ts"]), round(1e3 * e["dur"])
            yield e["pid"], rows[e["pid"], e["tid"]], e["name"], start, start + length


def test_a_recorder_gives_what_ran_and_keeps_when(tmp_path: Path) -> None:
    began, recorder = time.time_ns(), Recorder(torch.device("cpu"))
    assert recorder("outer", "action", lambda: recorder("inner", "forward", lambda: 7)) == 7
    recorder.write(tmp_path, 5, 3)
    file = json.loads((tmp_path / TIMELINE / "step-00000005.rank-00003.json").read_text())
    (inner, _, start, end), (outer, phase, before, after) = file["spans"]
    assert file["rank"] == 3 and (inner, outer, phase) == ("inner", "outer", "action")
    assert began <= before <= start <= end <= after <= time.time_ns(), "by the wall clock"


def test_an_exchange_lasts_from_its_launch_to_the_end_of_its_wait(tmp_path: Path) -> None:
    """Two of one name answer in their order, and stand in two rows where they overlap; a receive is its wait alone."""
    at = 10**18
    write(tmp_path, 0, ("a", "launch", at + 1000, at + 2000), ("a", "launch", at + 3000, at + 4000))
    write(
        tmp_path,
        1,
        ("a", "launch", at + 1000, at + 2000),
        ("a", "launch", at + 3000, at + 4000),
        ("a", "wait", at + 6000, at + 8000),
        ("a", "wait", at + 8000, at + 9500),
        ("hidden1.0", "wait", at + 9500, at + 9600),
    )
    events = merge(tmp_path)
    assert sorted((row, name, start, end) for rank, row, name, start, end in slices(events) if rank == 1) == [
        ("communication", "a", 0, 7000),
        ("communication", "a", 2000, 8500),
        ("communication", "hidden1.0", 8500, 8600),
        ("waits", "a", 5000, 7000),
        ("waits", "a", 7000, 8500),
        ("waits", "hidden1.0", 8500, 8600),
    ]
    lanes = [e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "communication"]
    assert lanes == [3, 4, 3]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}


def test_nothing_recorded_is_nothing(tmp_path: Path) -> None:
    assert merge(tmp_path) == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """Steps 2 and 3 of four on two ranks, in pairs, with a checkpoint and a validation; another start's file before."""
    run = make_run(tmp_path_factory.mktemp("timeline"))
    folder = run.parent / "out"
    (folder / TIMELINE).mkdir(parents=True)
    (folder / TIMELINE / "step-00000009.rank-00007.json").write_text('{"rank": 7, "spans": [["old", "step", 0, 1]]}')
    options = ["mesh.ep=2", "pipeline.schedule=dualpipev", "batch.num_microbatches=4", "schedule.decay_steps=1"]
    options += ["run.timeline_steps=2", "train.steps=4", "train.eval_interval=2", "checkpoint.interval=2"]
    run_ranks(2, run, *options, f"run.folder={folder}")
    return merge(folder)


def test_both_ranks_have_their_rows_and_the_steps_asked_for(recorded: list[Event]) -> None:
    found = list(slices(recorded))
    assert {(rank, row) for rank, row, *_ in found} == {(rank, row) for rank in (0, 1) for row in ROWS}
    assert all(0 <= start <= end for *_, start, end in found)
    for rank in (0, 1):
        names = [name for r, row, name, *_ in found if (r, row) == (rank, "steps")]
        assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
        for part in ("data", "reduce", "optimizer", "gather", "F0.0", "F1.1+B0.0"):
            assert names.count(part) == 2, part
        assert names.count("checkpoint") == names.count("validation") == 1
    (begin, end), (other_begin, other_end) = ((begin, end) for *_, name, begin, end in found if name == "step 2")
    assert begin < other_end and other_begin < end, "ranks share one clock"


def test_every_segment_runs_both_ways_for_every_micro_batch(recorded: list[Event]) -> None:
    """Three layers, the middle one dense; four micro-batches in each of two steps."""
    names = [(rank, name) for rank, row, name, *_ in slices(recorded) if row == "compute"]
    parts = ["embedding", "norm", *(f"layers.{i}.attention" for i in range(3))]
    parts += [f"layers.{i}.{part}" for i in (0, 2) for part in ("experts", "aggregate")]
    for rank in (0, 1):
        assert names.count((rank, "head forward")) == 8
        for part in parts:
            for way in ("forward", "backward"):
                assert names.count((rank, f"{part} {way}")) == 8, (rank, part, way)


def test_compute_lies_within_an_action_and_actions_within_a_step(recorded: list[Event]) -> None:
    found = list(slices(recorded))
    for rank in (0, 1):
        on_rank = [span for span in found if span[0] == rank]
        steps = [at for _, row, name, *at in on_rank if row == "steps" and name.startswith("step ")]
        acts = [at for _, row, name, *at in on_rank if row == "steps" and name[0] in "FBIW"]
        compute = [at for _, row, _, *at in on_rank if row == "compute"]
        assert len(acts) == 2 * 12 and all(inside(act, steps) for act in acts)
        assert all(inside(span, acts) for span in compute)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(compute))


def inside(span: list[int], spans: list[list[int]]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in spans)
