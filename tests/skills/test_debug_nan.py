"""The skill debug-nan names the place of values that are not finite, planted in the trainer's source."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from golden.world import run_world
from pithtrain.models.decoder import Attended
from skills.debug_nan.finding import Origin, Place
from skills.debug_nan.locate import origins
from skills.debug_nan.replay import Job
from skills.debug_nan.watcher import Seen
from skills.debug_nan.whereabouts import Whereabouts
from skills.debug_nan.work import Answer, describe
from skills.frame import Workspace
from skills.frame.running import main
from tests.runs import make_run
from tests.skills.plants import PLANTS, ROW, TOKEN, Plant, replay_planted
from tests.whole_model import new_trainee

ROOT = Path(__file__).parents[2]
PRELOAD = ("skills.debug_nan.replay", "tests.skills.plants")
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
    return describe(run_world(ranks, replay_planted, plant, rank, job, preload=PRELOAD)[0], None)


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


@pytest.mark.prove
def test_the_script_fails_until_the_source_is_mended(run: Path, tmp_path: Path) -> None:
    """A bug in a copy of the checkout that recomputation shows: found, cured by its rung, gone when mended."""
    for name in ("pithtrain", "pithdata", "golden", "spec", "skills", "typer_cli"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "pithtrain/parallel/tape.py"
    whole = source.read_text()
    right = "            self._enter()\n            self._inputs = ()\n        pairs"
    wrong = "            self._inputs = tuple(x / 0 for x in self._inputs)\n            self._enter()\n        pairs"
    assert whole.count(right) == 1
    source.write_text(whole.replace(right, wrong))
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
