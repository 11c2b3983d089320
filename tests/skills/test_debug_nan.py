"""The skill debug-nan names the place of values that are not finite, planted in the trainer's source."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from golden.world import run_world
from pithtrain.config import load
from pithtrain.models.decoder import Attended
from pithtrain.step import Trainee
from skills.debug_nan import work
from skills.debug_nan.answer import ORDER, Answer, Line
from skills.debug_nan.finding import Origin, Place
from skills.debug_nan.locate import origins
from skills.debug_nan.order import make_order
from skills.debug_nan.record import Comparison, compare
from skills.debug_nan.replay import Job
from skills.debug_nan.skill import DebugNan, DebugParams, DebugResult
from skills.debug_nan.watcher import Seen
from skills.debug_nan.whereabouts import Whereabouts
from skills.debug_nan.work import describe, is_growing, rungs_of
from skills.frame import Workspace
from skills.frame.running import main
from tests.runs import Trouble, make_run, not_a_number, start_ranks
from tests.skills.plants import FLEETING, PADDING, PLANTS, ROW, TOKEN, Plant, replay_planted
from tests.whole_model import new_trainee

ROOT = Path(__file__).parents[2]
PRELOAD = (*work.PRELOAD, "tests.skills.plants")
MESHES = {"ep2": {"ep": 2}, "pp2": {"pp": 2}, "ep2-pp2": {"ep": 2, "pp": 2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def named(plant: Plant, name: str) -> str:
    return f"{plant.name} {plant.phase} {name}"


CASES = [
    pytest.param(plant, sizes, id=named(plant, name))
    for plant in PLANTS
    for name, sizes in MESHES.items()
    if "ep" in sizes or not plant.only_ep
]
QUICK = ("experts forward ep2",)


def answer_to(plant: Plant, sizes: dict[str, int], rank: int, run: Path, folder: Path) -> Answer:
    overrides = ("batch.num_microbatches=2", *(f"mesh.{axis}={size}" for axis, size in sizes.items()))
    job = Job(run, overrides, (None,), 1, folder)
    ranks = sizes.get("pp", 1) * sizes.get("ep", 1)
    return describe(run_world(ranks, replay_planted, plant, rank, job, preload=PRELOAD)[0])


def check_plant(plant: Plant, sizes: dict[str, int], run: Path, folder: Path) -> None:
    """The origin is the plant's, in place, cause and line."""
    ranks = sizes.get("pp", 1) * sizes.get("ep", 1)
    rank = sizes.get("ep", 1) - 1 if plant.part == "embedding" else ranks - 1
    answer = answer_to(plant, sizes, rank, run, folder)
    origin = answer.origin
    assert answer.bad == 1 and answer.deterministic and origin is not None, answer
    layer = "layers.0" if plant.phase == "forward" and "pp" not in sizes else "layers.2"
    whole = plant.part in ("embedding", "norm", "head", "reduce")
    place = origin.place
    expected = plant.part if whole else f"{layer}.{plant.part}"
    if plant.kind == "arrived" and "pp" in sizes:  # what the last stage receives first
        expected = "hidden1.0"
    assert place.name == expected, origin.words()
    assert (origin.kind, origin.rank, place.phase) == (plant.kind, rank, plant.phase), origin.words()
    assert place.microbatch == (None if plant.phase == "step" else plant.call - 1), origin.words()
    if plant.kind == "operator":
        assert origin.operator == "aten.mul" and origin.code.startswith(f"{plant.file}:"), origin.words()
        assert all(stats.non_finite == 0 for stats in origin.inputs) and len(origin.inputs) == 2
    if plant.part in ("embedding", "aggregate") or plant.name == "attention":
        assert origin.row is not None
        assert (origin.row.rank, origin.row.sequence * 16 + origin.row.position) == (rank, ROW), origin.words()
    if plant.name == "experts":
        assert origin.row is not None and origin.expert is not None and not origin.row.padding
        assert origin.expert // (8 // sizes.get("ep", 1)) == rank % sizes.get("ep", 1), origin.words()


@pytest.mark.parametrize(("plant", "sizes"), [case for case in CASES if case.id in QUICK])
def test_a_plant_is_named(plant: Plant, sizes: dict[str, int], run: Path, tmp_path: Path) -> None:
    check_plant(plant, sizes, run, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize(("plant", "sizes"), [case for case in CASES if case.id not in QUICK])
def test_every_plant_is_named(plant: Plant, sizes: dict[str, int], run: Path, tmp_path: Path) -> None:
    check_plant(plant, sizes, run, tmp_path)


def test_the_token_behind_a_received_row_is_named(run: Path, tmp_path: Path) -> None:
    origin = answer_to(TOKEN, MESHES["ep2"], 1, run, tmp_path).origin
    assert origin is not None and origin.row is not None
    assert origin.place.name == "layers.0.experts" and origin.kind == "operator", origin.words()
    assert (origin.row.rank, origin.row.sequence, origin.row.position) == (1, 0, ROW), origin.words()


def test_a_padding_row_is_told_from_a_valid_one(run: Path, tmp_path: Path) -> None:
    origin = answer_to(PADDING, {}, 0, run, tmp_path).origin
    assert origin is not None and origin.row is not None
    assert (origin.place.name, origin.row.sequence, origin.row.position) == ("layers.0.attention", 0, ROW)
    assert "a padding row (rank 0, sequence 0, position 5)" in origin.words()


def test_what_comes_out_in_another_way_is_said_and_nothing_promised(run: Path, tmp_path: Path) -> None:
    answer = answer_to(FLEETING, {}, 0, run, tmp_path)
    assert answer.bad == 1 and answer.deterministic is False and answer.origin is None
    result = DebugResult(answer=answer, script=tmp_path / "reproduce.py")
    assert DebugNan().postconditions(DebugParams(run=run), result, Workspace(ROOT, tmp_path)) == []
    said = result.summary()
    assert "not deterministic" in said and "may pass" in said and "fails until" not in said


def test_help_needs_no_torch() -> None:
    """The parameters and the answer are declared without it."""
    code = "import sys, skills.debug_nan.skill; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_all_that_a_sparse_layer_gives_counts_but_its_gap() -> None:
    trainee = new_trainee(16)
    where = Whereabouts(trainee.mesh)
    where.watched(trainee)
    names, place = list(Attended._fields), Place(name="layers.2.attention", phase="forward", microbatch=1)
    assert where.given(place, names) == [name for name in names if name != "gap"]
    assert where.ids == {("layers.2", 1): "topk_expert_ids"}
    with pytest.raises(TypeError):
        where.given(place, names[:-1])
    assert where.given(place.model_copy(update={"phase": "backward"}), names[:-1]) == names[:-1]


def test_origins_come_in_the_order_of_causes() -> None:
    """Micro-batch by micro-batch, forward first, backward from the last stage; what was sent so is no origin."""

    def place(name: str, phase: str, microbatch: int | None, stage: int = 0, index: int = 1) -> Place:
        return Place.model_validate(
            {"name": name, "phase": phase, "microbatch": microbatch, "stage": stage, "index": index}
        )

    order = [
        place("a", "forward", 0, 0, 2),
        place("b", "forward", 0, 1, 1),
        place("c", "backward", 0, 1, 3),
        place("d", "backward", 0, 0, 1),
        place("e", "forward", 1, 0, 1),
        place("reduce", "step", None),
    ]
    ranks = [1, 0, 1, 0, 1, 0]
    rows = [
        (Origin(kind="operator", rank=rank, place=at, order=0), None) for rank, at in zip(ranks, order, strict=True)
    ]
    came = (Origin(kind="arrived", rank=0, place=place("x", "forward", 0, 0, 1), order=0), None)
    seen = [Seen(rank, [row for row in rows if row[0].rank == rank], set(), {}, (1, 1), []) for rank in (0, 1)]
    seen[0].origins.append(came)
    assert [origin.place.name for origin in origins(seen, 2, 1)] == ["x", *(at.name for at in order)]
    seen[1].sent.add(("x", "forward", 0))
    assert [origin.place.name for origin in origins(seen, 2, 1)] == [at.name for at in order]


def asked(folder: Path, out: Path, **params: Any) -> Answer:
    """What the skill's own process answers, in this one."""
    order = make_order(DebugParams(run=folder, ladder=False, **params))
    out.mkdir(exist_ok=True)
    (out / ORDER).write_text(order.model_dump_json())
    return work.work(out)


def ended(run: Path, *overrides: str, troubles: Sequence[Trouble] = ()) -> int | None:
    """The exit code of a training run on one rank."""
    return start_ranks(1, run, *overrides, troubles=troubles)[0].wait(120)


@pytest.fixture(scope="module")
def pruned(run: Path) -> Path:
    """A run that skipped step 3, lost its checkpoints before it, and was resumed with another learning rate."""
    folder = run.parent / "pruned"
    words = [f"run.folder={folder}", "schedule.kind=constant", "checkpoint.interval=2", "checkpoint.keep=1"]
    assert ended(run, *words, "train.steps=4", troubles=[Trouble(not_a_number, [3])]) == 0
    assert ended(run, *words, "train.steps=6", "optim.lr=1e-3") == 0
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]
    return folder


def test_a_run_that_cannot_be_repeated_is_refused_at_once(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("debug-nan", [str(pruned)]) == 2
    said = capsys.readouterr().err
    assert "the learning rate 0.0005 for step 1, recorded is 0.005" in said
    assert "step-00000002 (checkpoint.keep = 1; left: step-00000006): the replay starts from the beginning" in said
    assert "remedy: " in said and "--set checkpoint.resume=FOLDER" in said
    kept = pruned / "checkpoints" / "step-00000006"
    assert main("debug-nan", [str(pruned), "--set", f"checkpoint.resume={kept}"]) == 3
    assert f"--step 3: {kept} is of step 6" in capsys.readouterr().err
    assert main("debug-nan", [str(pruned), "--set", "mesh.ep=3"]) == 3
    assert "num_experts = 8" in capsys.readouterr().err


def test_a_replay_that_is_another_run_fails_and_says_where_it_differs(pruned: Path, tmp_path: Path) -> None:
    answer = asked(pruned, tmp_path)
    assert answer.record is not None and answer.record.verdict == "another run"
    result, params = DebugResult(answer=answer, script=None), DebugParams(run=pruned)
    first, *_, remedy = DebugNan().postconditions(params, result, Workspace(ROOT, tmp_path))
    assert first.startswith("another run: differs first in step 1: learning_rate 0.0005, recorded 0.005"), first
    assert "checkpoint.resume=FOLDER" in remedy
    assert result.summary().startswith(first) and "the replay starts from the beginning" in result.summary()


def test_with_what_the_run_had_then_it_is_the_same_and_an_unmet_step_is_said(pruned: Path, tmp_path: Path) -> None:
    answer = asked(pruned, tmp_path, set=["optim.lr=1e-2"])
    assert answer.record is not None and answer.changed and answer.bad is None
    assert (answer.record.compared, answer.record.same, answer.record.unmet) == (2, 2, 3)
    first, second, *_ = DebugResult(answer=answer, script=None).summary().splitlines()
    assert first == "the same run: 2 of 2 replayed steps are exactly as recorded"
    assert second.startswith("the run's own record has step 3 as skipped; the replay did not meet it")


def test_a_checkpoint_that_is_gone_or_not_whole_is_passed_over(pruned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(pruned, folder)
    kept, config = folder / "checkpoints" / "step-00000006", folder / "config.resolved.toml"
    config.write_text(config.read_text().replace('resume = "latest"', 'resume = "/gone"'))
    assert make_order(DebugParams(run=folder, step=7)).starts == (kept,)
    (kept / "pith/manifest.json").unlink()
    with pytest.raises(ValueError, match="/gone"):
        make_order(DebugParams(run=folder, step=7))
    config.write_text(config.read_text().replace("/gone", "latest"))
    assert make_order(DebugParams(run=folder, step=7)).starts == (None,)


def line(step: int, loss: float = 5.0, norm: float = 1.0, rate: float = 1e-3, **more: Any) -> dict[str, Any]:
    figures = {"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens_seen": step * 100}
    return figures | {"skipped": False} | more


NAN, INFINITY = float("nan"), float("inf")
HELD = [  # replayed, recorded, precision -> verdict, figure of the first difference
    ([line(1), line(2)], [line(1), line(2)], "auto", ("the same run", None)),
    ([line(1, NAN)], [line(1, NAN)], "auto", ("the same run", None)),
    ([line(1, 5.001), line(2, 9.0)], [line(1), line(2)], "bf16", ("the same up to rounding", "loss")),
    ([line(1, 5.001)], [line(1)], "fp32", ("another run", "loss")),
    ([line(1, 5.00002)], [line(1)], "fp32", ("the same up to rounding", "loss")),
    ([line(1, 5.2)], [line(1)], "fp8", ("another run", "loss")),
    ([line(1), line(2, 5.001, 1.1)], [line(1), line(2)], "auto", ("another run", "grad_norm")),
    ([line(1, rate=1.001e-3)], [line(1)], "auto", ("another run", "learning_rate")),
    ([line(1, tokens_seen=101)], [line(1)], "auto", ("another run", "tokens_seen")),
    ([line(1, INFINITY)], [line(1)], "auto", ("another run", "loss")),
    ([line(1, 0.0, -0.0)], [line(1, 0.0, 0.0)], "auto", ("the same run", None)),
]


@pytest.mark.parametrize(("lines", "records", "precision", "expected"), HELD)
def test_a_replay_is_held_against_the_record(lines: Any, records: Any, precision: str, expected: Any) -> None:
    found = compare(lines, [*records, {"step": 1, "validation_loss": 5.0}], precision)
    assert found is not None and found.compared == len(lines) and found.unmet is None
    assert (found.verdict, found.first and found.first.figure) == expected
    assert found.same == len(lines) - (found.first is not None) * (1 + (lines[-1]["loss"] == 9.0))
    assert Comparison.model_validate_json(found.model_dump_json()) == found


def test_nothing_is_compared_behind_a_step_that_only_the_run_skipped() -> None:
    records = [line(1), line(2, NAN, skipped=True), line(3)]
    found = compare([line(1), line(2), line(3, 7.0)], records, "auto")
    assert found is not None and (found.compared, found.same, found.unmet) == (1, 1, 2)
    assert compare([line(4)], records, "auto") is None


def test_checkpoints_that_are_not_finite_are_passed_over(run: Path, tmp_path: Path) -> None:
    """The run spoils its weights in step 2, saves them, and skips every step from there on."""
    folder = run.parent / "spoilt"
    words = [f"run.folder={folder}", "train.steps=4", "checkpoint.interval=1", "checkpoint.keep=9"]
    assert ended(run, *words, "schedule.kind=constant", troubles=[Trouble(spoils, [2])]) == 0
    first, second = (folder / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    answer = asked(folder, tmp_path)
    assert answer.start == first and answer.notes == (f"{second}: holds values that are not finite",)
    assert answer.record is not None and answer.record.unmet == 3 and answer.record.same == 1
    shutil.rmtree(first)
    answer = asked(folder, tmp_path)
    assert answer.start is None and answer.replayed == 3 and answer.notes[0].startswith(f"{second}: holds values")
    answer = asked(folder, tmp_path, set=[f"checkpoint.resume={second}"])
    assert answer.start == second and answer.bad == 3 and answer.replayed == 0
    assert answer.origin is not None and answer.origin.kind == "state"
    assert answer.origin.parameter == "weight of norm" and "there before the step" in answer.origin.words()


def spoils(trainee: Trainee, step: Callable[[], Any]) -> Any:
    """The step, after which one weight is not a number."""
    result = step()
    for bucket in trainee.shard.buckets.values():
        assert bucket.values.dtype == torch.float32
    trainee.shard.weights()["norm"].value[3] = NAN
    return result


EXPLODES = ["optim.optimizer=sgd", "optim.lr=10", "optim.clip_norm=0", "schedule.warmup_steps=0"]


def test_growing_weights_and_gradients_are_shown(run: Path, tmp_path: Path) -> None:
    answer = asked(run, tmp_path, set=EXPLODES, step=8)
    assert answer.bad is not None and answer.bad > 3 and is_growing(answer)
    assert [line.step for line in answer.lines] == list(range(1, answer.bad + 1))
    assert answer.lines[-2].grad_norm > 1e3 and answer.largest_weights[0] == 1 and answer.largest_weights[1] > 1e6
    table = DebugResult(answer=answer, script=None).summary()
    assert "gradient norm  learning rate\n" in table and "largest weight: 1 at step 0, " in table


def test_changes_that_act_early_are_tried_where_they_can_help(run: Path) -> None:
    cfg = load(run, ["optim.lr=10", "optim.clip_norm=0"])
    names = [change.name for change in rungs_of(cfg, 1, growing=True) if change.whole]
    assert names == ["a tenth of the learning rate", "gradients clipped"]
    assert not any(change.whole for change in rungs_of(cfg, 1, growing=False))
    assert sum(change.whole for change in rungs_of(load(run, ["optim.lr=10"]), 1, growing=True)) == 1
    calm = Answer(
        start=None,
        first=0,
        replayed=3,
        bad=3,
        lines=tuple(Line(step=i, loss=5.0, grad_norm=norm, learning_rate=0.1) for i, norm in enumerate((1, 2, "nan"))),
        largest_weights=(1.0, 2.0),
        deterministic=True,
        origin=None,
        others=0,
        notes=(),
    )
    assert not is_growing(calm)
    assert is_growing(calm.model_copy(update={"largest_weights": (1.0, 20.0)}))
    optimizer = Origin(kind="operator", rank=0, place=Place(name="optimizer", phase="step"), order=0)
    assert is_growing(calm.model_copy(update={"origin": optimizer}))
    lines = tuple(line.model_copy(update={"grad_norm": 10.0 ** (line.step + 1)}) for line in calm.lines)
    assert is_growing(calm.model_copy(update={"lines": lines}))


@pytest.mark.prove
def test_a_run_resumed_with_another_seed_fails_the_skill(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No learning rate tells that its checkpoints were written by another config; the replay's first step does."""
    folder = run.parent / "reseeded"
    words = [f"run.folder={folder}", "schedule.kind=constant", "checkpoint.interval=2", "checkpoint.keep=1"]
    assert ended(run, *words, "train.steps=4", troubles=[Trouble(not_a_number, [3])]) == 0
    assert ended(run, *words, "train.steps=6", "train.seed=7") == 0
    assert main("debug-nan", [str(folder)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "another run: differs first in step 1: " in said.err
    assert "step-00000002" in said.err and "step 3 as skipped; the replay did not meet it" in said.err
    assert "--set checkpoint.resume=FOLDER" in said.err
    shutil.rmtree(re.findall(r"results: (\S+)", said.err)[0])


@pytest.mark.prove
def test_an_exploding_run_is_cured_by_a_lower_learning_rate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(run), "--json", *(f"--set={change}" for change in EXPLODES)]
    assert main("debug-nan", words) == 0
    report = json.loads(capsys.readouterr().out)
    try:
        rungs = {rung["name"]: rung for rung in report["result"]["answer"]["rungs"]}
        bad = report["result"]["answer"]["bad"]
        assert {name: (rung["cured"], rung["steps"]) for name, rung in rungs.items()} == {
            "a tenth of the learning rate": (True, bad),
            "gradients clipped": (True, bad),
            "balanced routing": (False, 1),
        }
        pith, *command = shlex.split(rungs["a tenth of the learning rate"]["command"])
        assert pith == ".venv/bin/pith" and "--set=optim.lr=1.0" in command
        assert Workspace(ROOT, run.parent).run("typer_cli.main", *command, seconds=100).returncode == 0
    finally:
        shutil.rmtree(report["out"])


@pytest.mark.prove
def test_a_run_that_overflows_is_debugged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer's overflow, no plant; its script fails in the same words, or the run of the skill would."""
    words = [str(run), "--set", "optim.lr=1e20", "--set", "optim.clip_norm=0", "--no-ladder", "--json"]
    code = main("debug-nan", words)
    said = capsys.readouterr().out
    report = json.loads(said)
    try:
        answer = report["result"]["answer"]
        assert code == 0 and answer["bad"] == 2 and answer["deterministic"] is True, said
        assert answer["origin"]["place"]["name"] == "optimizer" and "adamw" in answer["origin"]["operator"]
        assert all(stats["non_finite"] == 0 for stats in answer["origin"]["inputs"])
        assert Path(report["result"]["script"]).is_file()
    finally:
        shutil.rmtree(report["out"])


def spoilt_checkout(root: Path, file: str, right: str, wrong: str) -> tuple[Path, str]:
    """Copies the checkout and edits a file there: its path, and its text as it was."""
    for name in ("pithtrain", "pithdata", "golden", "spec", "skills", "typer_cli"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    whole = (root / file).read_text()
    assert whole.count(right) == 1
    (root / file).write_text(whole.replace(right, wrong))
    return root / file, whole


@pytest.mark.prove
def test_what_depends_on_when_it_runs_ends_well_and_without_a_ladder(run: Path, tmp_path: Path) -> None:
    """The first evaluation of all divides by zero, on whatever process."""
    right = "normed = rms_norm(hidden_states, self.norm, self.arch.rms_norm_eps)"
    first = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r})"
    wrong = f"{right} / {first}.exists(); {first}.touch()"
    spoilt_checkout(tmp_path, "pithtrain/models/decoder.py", right, wrong)
    done = Workspace(tmp_path, tmp_path).run("typer_cli.main", "skill", "run", "debug-nan", str(run), seconds=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not deterministic" in done.stdout and "step 1 is not finite" in done.stdout
    assert "may pass" in done.stdout and "balanced routing" not in done.stdout


@pytest.mark.prove
def test_the_script_fails_until_the_source_is_mended(run: Path, tmp_path: Path) -> None:
    """A bug in a copy of the checkout that recomputation shows: found, cured by its rung, gone when mended."""
    right = "            self._enter()\n            self._inputs = ()\n        pairs"
    wrong = "            self._inputs = tuple(x / 0 for x in self._inputs)\n            self._enter()\n        pairs"
    source, whole = spoilt_checkout(tmp_path, "pithtrain/parallel/tape.py", right, wrong)
    words = [str(run), "--set", "train.recompute=experts", "--set", "mesh.ep=2", "--json"]
    done = Workspace(tmp_path, tmp_path).run("typer_cli.main", "skill", "run", "debug-nan", *words, seconds=250)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    answer = report["result"]["answer"]
    assert answer["bad"] == 1
    assert answer["origin"]["operator"] == "aten.div"
    assert answer["origin"]["place"]["name"] == "layers.2.experts" and answer["origin"]["place"]["phase"] == "backward"
    assert {rung["name"]: rung["cured"] for rung in answer["rungs"]} == {
        "recompute off": True,
        "no expert parallelism": False,
        "one rank": False,
        "balanced routing": False,
    }
    script = Workspace(tmp_path, tmp_path).run("skills.debug_nan.script", report["result"]["script"], seconds=100)
    assert script.returncode == 1 and "aten.div" in script.stdout
    source.write_text(whole)
    script = Workspace(tmp_path, tmp_path).run("skills.debug_nan.script", report["result"]["script"], seconds=100)
    assert script.returncode == 0 and "step 1 is finite" in script.stdout, script.stdout + script.stderr
