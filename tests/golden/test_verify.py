"""`pith verify` on replays that agree, differ or fail: exit codes, what is printed, what is written."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from golden import trace
from golden.cases import CASES, Case, Layout
from golden.trace import Trace
from golden.verify import Item, Replayed, replay_world, run

BASE = CASES[0]
MESH = BASE.layouts[2]
Change = Callable[[Trace], Trace | str]


def faithful(cases: Sequence[Case]) -> Replayed:
    """What a correct trainer replays, out of the files."""
    replayed: Replayed = {}
    for case in cases:
        golden = trace.read(case.name)
        for layout in (case.one_rank, *case.layouts):
            replayed[case, layout] = replace(golden.trace, costs=golden.costs[str(layout)])
    return replayed


def but(item: Item, change: Change) -> Callable[[Sequence[Case]], Replayed]:
    """Faithful, except that one layout's trace is another."""

    def replay(cases: Sequence[Case]) -> Replayed:
        replayed = faithful(cases)
        found = replayed[item]
        assert isinstance(found, Trace)
        return replayed | {item: change(found)}

    return replay


def with_step(at: int, **fields: Any) -> Change:
    def change(found: Trace) -> Trace:
        steps = list(found.steps)
        steps[at] = replace(steps[at], **fields)
        return replace(found, steps=tuple(steps))

    return change


ONE_RANK_DIFFERS = but((BASE, BASE.one_rank), with_step(41, grad_norm=2.0))
MESH_DIFFERS = but((BASE, MESH), with_step(4, loss=1.0))
MESH_LATER = but((BASE, MESH), with_step(5, loss=1.0))
MESH_COST = but((BASE, MESH), lambda found: replace(found, costs=replace(found.costs, collectives={})))
FP8, FP8_MESH = Layout(precision="fp8"), next(item for item in BASE.layouts if (item.precision, item.dp) == ("fp8", 2))
LOSS = trace.read("base").trace.steps[0].loss
FP8_STRAYS = but((BASE, FP8), with_step(4, loss=1.0))
FP8_NORM = but((BASE, FP8), with_step(0, grad_norm=trace.read("base").trace.steps[0].grad_norm * 1.16))
FP8_NORM_LATER = but((BASE, FP8), with_step(1, grad_norm=trace.read("base").trace.steps[1].grad_norm * 1.16))
FP8_NAN_LATER = but((BASE, FP8), with_step(1, grad_norm=float("nan")))
FP8_WITHIN = but((BASE, FP8_MESH), with_step(1, loss=trace.read("base").trace.steps[1].loss * 1.01))
FP8_MESH_DIFFERS = but((BASE, FP8_MESH), with_step(0, loss=LOSS * (1 + 2e-5)))
FP8_ROUNDS = but((BASE, FP8), lambda found: replace(found, costs=replace(found.costs, roundings={"e4m3": 1})))
FP8_FAILS = but((BASE, FP8), lambda found: "planted")
MESH_FAILS = but((BASE, MESH), lambda found: "rank 1: ValueError: planted")


@pytest.mark.parametrize(
    ("replay", "code", "says"),
    [
        (faithful, 0, "layouts checked"),
        (ONE_RANK_DIFFERS, 1, "base, 1 rank, n=1: first of 1 differing: step 41, grad_norm"),
        (MESH_DIFFERS, 1, "base, EP2 x DP2, n=1: .*first of 1 differing: step 4, loss"),
        (MESH_LATER, 0, "same"),
        (MESH_COST, 1, "base, EP2 x DP2, n=1: .*first of 1 differing: collectives"),
        (FP8_STRAYS, 1, "base, 1 rank, n=1, fp8: first of 1 differing: step 4, loss"),
        (FP8_NORM, 1, "base, 1 rank, n=1, fp8: first of 1 differing: step 0, grad_norm"),
        (FP8_NORM_LATER, 0, "same"),
        (FP8_NAN_LATER, 1, "base, 1 rank, n=1, fp8: first of 1 differing: step 1, grad_norm"),
        (FP8_WITHIN, 0, "same"),
        (FP8_MESH_DIFFERS, 1, "base, DP2, n=2, fp8, .*first of 1 differing: step 0, loss"),
        (FP8_ROUNDS, 1, "base, 1 rank, n=1, fp8: .*first of 1 differing: roundings"),
        (FP8_FAILS, 2, "base, DP2, n=2, fp8, .*1 rank, n=1, fp8 gave no trace to compare with: planted"),
        (MESH_FAILS, 2, "base, EP2 x DP2, n=1: rank 1: ValueError: planted"),
    ],
)
def test_exit_codes(replay: Any, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], replay=replay) == code
    assert re.search(says, capsys.readouterr().out)


def test_what_cannot_be_checked_gives_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(cases: Sequence[Case]) -> Replayed:
        raise RuntimeError("planted")

    def printed() -> str:
        return " ".join(capsys.readouterr().out.split())

    assert run(["bsae", "base"], replay=faithful) == 2
    assert "no golden case 'bsae'; the cases are: base, sequence-balance" in printed()
    assert run([], replay=crash) == 2
    assert "RuntimeError: planted" in printed()
    assert run(["base"], folder=tmp_path, replay=faithful) == 2
    assert "base.json: no such trace; restore the file, or write it anew: pith verify --update" in printed()
    text = trace.path_of("base").read_text()
    (tmp_path / "base.json").write_text(text[: len(text) // 2])
    assert run(["base"], folder=tmp_path, replay=faithful) == 2
    assert "not a trace" in printed()
    (tmp_path / "base.json").write_text(text.replace(BASE.fingerprint(), "0" * 64))
    assert run(["base"], folder=tmp_path, replay=faithful) == 2
    assert "made for another configuration" in printed()


def test_a_change_of_the_file_is_seen(tmp_path: Path) -> None:
    golden = trace.read("base")
    steps = list(golden.trace.steps)
    steps[49] = replace(steps[49], loss=steps[49].loss * 1.0001)
    (tmp_path / "base.json").write_text(trace.to_text(replace(golden, trace=replace(golden.trace, steps=tuple(steps)))))
    assert run(["base"], folder=tmp_path, replay=faithful) == 1


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["base"], json=True, replay=but((BASE, MESH), with_step(3, loss=float("nan")))) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["exit_code"] == 1 and len(printed["results"]) == 1 + len(BASE.layouts)
    wrong = [result for result in printed["results"] if result["verdict"] != "same"]
    assert [(result["case"], result["layout"]) for result in wrong] == [("base", "EP2 x DP2, n=1")]
    first = wrong[0]["differences"][0]
    assert (first["step"], first["field"], first["got"]) == (3, "loss", "NaN")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for case in CASES:
        copy(trace.path_of(case.name), tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("replay", "code"), [(MESH_DIFFERS, 1), (MESH_FAILS, 2)])
def test_update_refuses_when_a_mesh_disagrees(
    folder: Path, replay: Any, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    assert run([], update=True, reason="because", folder=folder, replay=replay) == code
    assert contents(folder) == before
    assert "Nothing was written" in capsys.readouterr().out


@pytest.mark.parametrize("reason", [None, "", "  "])
def test_update_needs_a_reason(folder: Path, reason: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    assert run([], update=True, reason=reason, folder=folder, replay=faithful) == 2
    assert contents(folder) == before
    assert "--update needs a reason" in capsys.readouterr().out


def changed_everywhere(cases: Sequence[Case]) -> Replayed:
    """A change of the arithmetic that every layout shares."""
    change = with_step(2, loss=1.25)
    return {item: change(found) for item, found in faithful(cases).items() if isinstance(found, Trace)}


def test_update_writes_the_new_trace_and_keeps_the_reasons(folder: Path) -> None:
    before = contents(folder)
    assert run(["base"], update=True, reason=" a new loss ", folder=folder, replay=changed_everywhere) == 0
    after = contents(folder)
    assert [name for name in before if after[name] != before[name]] == ["base.json"] and after.keys() == before.keys()
    old, new = trace.read("base"), trace.read("base", folder)
    assert new.trace.steps[2].loss == 1.25 and new.costs == old.costs and new.trace.costs == old.trace.costs
    assert new.history[:-1] == old.history and new.history[-1]["reason"] == "a new loss"
    assert new.provenance["config"] == BASE.config() and new.provenance["torch"]
    assert run(["base"], folder=folder, replay=changed_everywhere) == 0
    assert run(["base"], folder=folder, replay=faithful) == 1


def test_a_world_that_fails_says_so_for_each_of_its_layouts() -> None:
    impossible = replace(BASE, global_batch_size=7)
    items = [(impossible, Layout(dp=2)), (impossible, Layout(dp=2, num_microbatches=2))]
    replayed = replay_world(items, 1)
    assert list(replayed) == items
    for why in replayed.values():
        assert isinstance(why, str) and "7 sequences" in why
