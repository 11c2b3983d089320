"""profile-bottleneck: where time goes by the spans of ranks, and slow-downs planted in every place of a real step."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from golden.world import run_world
from pithtrain import passes
from pithtrain.data import Samples
from pithtrain.layers.attention import Attention
from pithtrain.layers.balance import Objective
from pithtrain.layers.moe import LocalExperts
from pithtrain.layers.router import Router
from pithtrain.models.decoder import SparseLayer
from pithtrain.ops.linear import Compute
from pithtrain.optim import AdamW
from pithtrain.parallel import expert
from pithtrain.parallel.shard import Shard
from pithtrain.parallel.tape import Phase
from pithtrain.parallel.transport import AllToAll, Pending, Receive, Request, Transport
from pithtrain.step import gradients, learned
from pithtrain.timeline import TIMELINE
from pithtrain.train.checkpoints import Checkpoints
from skills.frame import Failed
from skills.frame.running import main
from skills.profile_bottleneck.attribution import Step, World, attribute
from skills.profile_bottleneck.evaluation import evaluate
from skills.profile_bottleneck.probe import Job, record, watched
from skills.profile_bottleneck.profile import Profile
from skills.profile_bottleneck.ranking import bubbles, table_of
from tests.runs import make_run
from tests.whole_model import new_batch, new_trainee

PRELOAD = ("pithtrain.train", "skills.profile_bottleneck.probe", "tests.skills.test_profile")
ROOT = Path(__file__).parents[2]
EP2 = ("mesh.ep=2", "batch.num_microbatches=2")
PP2 = ("mesh.pp=2", "batch.num_microbatches=4")

# --- planting: functions of the program that sleep a little longer

CALLS: dict[str, tuple[Any, str]] = {
    "data": (Samples, "microbatch"),
    "attention": (Attention, "__call__"),
    "router": (Router, "__call__"),
    "experts": (LocalExperts, "__call__"),
    "aggregate": (SparseLayer, "aggregate"),
    "loss": (passes, "head_loss"),
    "optimizer": (AdamW, "step"),
    "gradient reduction": (Shard, "reduce"),
    "checkpoint": (Checkpoints, "save"),
    "host reads": (expert, "read_ints"),
}


@contextmanager
def planted(place: str, seconds: float) -> Iterator[None]:
    """Every call at `place` takes `seconds` more; of an exchange, its arrival."""
    if place not in CALLS:
        real = Transport.launch

        def launch(self: Transport, request: Request) -> Pending:
            pending = real(self, request)
            ours = isinstance(request, Receive) if place == "pipeline bubble" else isinstance(request, AllToAll)
            if not ours or (place in ("dispatch", "combine") and f".{place}" not in request.name):
                return pending

            def wait() -> Any:
                time.sleep(seconds)
                return pending()

            return wait

        with patch.object(Transport, "launch", launch):
            yield
        return
    owner, name = CALLS[place]
    function: Callable[..., Any] = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    with patch.object(owner, name, slow):
        yield


def measured(job: Job, plants: dict[str, float]) -> None:
    with ExitStack() as stack:
        for place, seconds in plants.items():
            stack.enter_context(planted(place, seconds))
        record(job)


@dataclass(frozen=True)
class Bench:
    """A run to plant in."""

    run: Path
    folder: Path

    def profile(self, name: str, sets: tuple[str, ...], plants: dict[str, float], steps: int = 16) -> Path:
        folder = self.folder / name
        folder.mkdir()
        job = Job(self.run, sets, "never", steps, folder)
        run_world(2, measured, job, plants, preload=PRELOAD)
        return folder


def calls(place: str, sets: tuple[str, ...]) -> int:
    """How often a rank passes a place in a step of the tiny model: three layers, two of them sparse."""
    pp = "mesh.pp=2" in sets
    n, sparse = (4, 1) if pp else (2, 2)
    layers = 2 if pp else 3
    exchanges = dict.fromkeys(("dispatch", "combine"), 2 * n * sparse) | {"pipeline bubble": n}
    once = dict.fromkeys(("optimizer", "gradient reduction", "checkpoint"), 1)
    each = dict.fromkeys(("router", "experts", "aggregate", "host reads"), n * sparse)
    return ({"data": n, "loss": n, "attention": n * layers} | exchanges | once | each)[place]


def first_causes(bench: Bench, sets: tuple[str, ...], places: tuple[str, ...], base: Profile, name: str) -> list[str]:
    """What ranks first, without and with the base to compare with, where each place takes 20% of the base's step."""
    step = max(sum(row.values()) for row in base.table.values()) / 1e3
    plants = {place: 0.2 * step / calls(place, sets) for place in places}
    if "checkpoint" in plants:
        plants["checkpoint"] *= INTERVAL
        sets = (*sets, f"checkpoint.interval={INTERVAL}")
    folder = bench.profile(name, sets, plants)
    found = []
    for earlier in (None, base):
        profile = evaluate(folder, earlier)
        top = [f"{row.cause} {row.milliseconds:.1f} ({row.expected:.1f})" for row in profile.causes[: len(places) + 1]]
        print(f"{sets[0]} {' and '.join(places)}, {'compared' if earlier else 'alone'}: {', '.join(top)}")
        found.append(",".join(sorted(row.cause for row in profile.causes[: len(places)])))
        assert all(row.too_much for row in profile.causes[: len(places)])
    return found


INTERVAL = 6  # steps between the checkpoints of a run in which they are slow
SHARED = tuple(CALLS)
MATRIX = [
    (EP2, [*((place,) for place in (*SHARED, "dispatch", "combine")), ("data", "experts"), ("router", "combine")]),
    (
        PP2,
        [*((place,) for place in (*SHARED, "pipeline bubble")), ("loss", "pipeline bubble"), ("router", "optimizer")],
    ),
]


@pytest.mark.prove
@pytest.mark.parametrize(("sets", "plants"), MATRIX, ids=["ep2", "pp2"])
def test_what_is_planted_ranks_first(tmp_path: Path, sets: tuple[str, ...], plants: list[tuple[str, ...]]) -> None:
    bench = Bench(make_run(tmp_path), tmp_path)
    base = evaluate(bench.profile("base", sets, {}))
    wrong = {}
    for number, places in enumerate(plants):
        found = first_causes(bench, sets, places, base, str(number))
        if found != [",".join(sorted(places))] * 2:
            wrong[places] = found
    assert not wrong


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two expert-parallel ranks, data and router slow by 60 ms a step."""
    folder = tmp_path_factory.mktemp("profile")
    sets = (*EP2, "run.peak_flops=1e12")
    return Bench(make_run(folder), folder).profile("slow", sets, {"data": 0.03, "router": 0.015}, steps=4)


def test_two_slow_places_rank_first(slow_run: Path) -> None:
    profile = evaluate(slow_run)
    assert {row.cause for row in profile.causes[:2]} == {"data", "router"}
    for row in profile.causes[:2]:
        assert row.too_much and row.milliseconds > 60
    assert profile.unaccounted < 1e-3
    assert set(profile.table) == {0, 1} and set(profile.expert_load) == {"layers.0", "layers.2"}
    assert all(1 <= load <= 4 for load in profile.expert_load.values()) and profile.padding == 0
    length = profile.step_milliseconds / 1e3
    assert profile.tokens_per_second == pytest.approx(8 * 16 / length)
    facts = json.loads((slow_run / "facts-00000.json").read_text())
    assert profile.mfu == pytest.approx(8 * 16 / length * facts["flops_per_token"] / 2e12)
    assert "data: " in profile.summary() and "batch.num_microbatches" in profile.summary()


def test_an_earlier_profile_is_what_should_be(slow_run: Path) -> None:
    """Compared with itself nothing costs too much; compared with one without a slow router, the router does."""
    earlier = evaluate(slow_run)
    same = evaluate(slow_run, earlier)
    assert not [row for row in same.causes if row.too_much] and same.baseline == "the earlier profile"
    table = {rank: row | {"router": 1.0} for rank, row in earlier.table.items()}
    found = evaluate(slow_run, earlier.model_copy(update={"table": table})).causes
    assert found[0].cause == "router" and [row.cause for row in found if row.too_much] == ["router"]
    with pytest.raises(Failed, match="of one mesh"):
        evaluate(slow_run, earlier.model_copy(update={"mesh": "pp2 dp1 cp1 ep1"}))


MS = 1_000_000


def spans(folder: Path, rank: int, *rows: tuple[str, str, float, float]) -> None:
    """Spans in milliseconds, as a recorder notes them: inner ones first."""
    (folder / TIMELINE).mkdir(exist_ok=True)
    marks = [(name, phase, int(start * MS), int(end * MS)) for name, phase, start, end in rows]
    text = json.dumps({"rank": rank, "spans": marks})
    (folder / TIMELINE / f"step-00000001.rank-{rank:05d}.json").write_text(text)


def test_every_moment_has_one_cause(tmp_path: Path) -> None:
    """Rank 1 comes 20 ms late to an exchange: rank 0 waits for it, and only what follows is the exchange's."""
    name = "layers.0"
    spans(
        tmp_path,
        0,
        ("data", "step", 0, 5),
        (f"{name}.router", "forward", 11, 14),
        (f"{name}.attention", "forward", 6, 14.5),
        (f"{name}.counts", "launch", 15, 16),
        (f"{name}.counts", "wait", 16, 20),
        (f"{name}.sizes", "host", 20, 22),
        (f"{name}.dispatch", "launch", 25, 26),
        (f"{name}.dispatch", "wait", 26, 50),
        (f"{name}.experts", "forward", 50, 60),
        ("hidden1.0", "wait", 60, 67),
        ("F0.0", "action", 5, 70),
        ("figures", "host", 78, 79),
        ("reduce", "step", 70, 80),
        ("step 1", "step", 0, 90),
    )
    spans(
        tmp_path,
        1,
        (f"{name}.counts", "launch", 10, 11),
        (f"{name}.dispatch", "launch", 46, 47),
        ("F0.0", "action", 5, 47),
    )
    step = attribute(tmp_path, World(2, 1, 2))[0]
    assert step.causes == pytest.approx(
        {
            "data": 5,
            "attention": 5.5,
            "router": 3,
            "dispatch": 5.5 + 4 + 4,  # packing and counts; packing and launch; the wait from when rank 1 has come
            "waiting for other ranks": 20,
            "host reads": 3,
            "experts": 10,
            "pipeline bubble": 7,
            "gradient reduction": 9,
            "other": 1 + 3 + 10,
        }
    )
    assert step.total == 90 == pytest.approx(sum(step.causes.values()))
    assert step.actions == {"F0.0": pytest.approx(58)}


def test_a_bubble_that_the_schedule_has_is_expected() -> None:
    """Two ranks, two micro-batches, 1f1b: rank 0 idles for the last stage's two passes, 10 + 20 ms."""
    actions = {0: {"F0.0": 10.0, "F0.1": 10.0, "B0.0": 20.0, "B0.1": 20.0}}
    actions[1] = {name.replace("0.", "1.", 1): milliseconds for name, milliseconds in actions[0].items()}
    steps = [Step(rank, 1, 90.0, {}, {}, row) for rank, row in actions.items()]
    assert bubbles(steps, "1f1b", 2, 1, [0, 1]) == pytest.approx([30, 30])


def test_a_checkpoint_is_spread_over_its_interval() -> None:
    """And what comes once in a while is not in the quiet figure of a step."""
    steps = [Step(0, n, 0.0, {"data": 5.0}, {("data", "data", "step"): 5.0}, {}) for n in range(1, 12)]
    names = {("data", "data", "step"): 90.0, ("checkpoint", "checkpoint", "step"): 40.0}
    steps.append(Step(0, 12, 130.0, {"data": 90.0, "checkpoint": 40.0}, names, {}))
    row = table_of(steps, {"checkpoint_interval": 8})[0]
    assert row["checkpoint"] == 5 and row["data"] == 5
    assert table_of(steps, {"checkpoint_interval": 0})[0]["checkpoint"] == 0


def test_watching_changes_no_bit_and_sees_the_router_both_ways() -> None:
    trainee, batch = new_trainee(8), new_batch(2, 8)
    seen = set[tuple[str, str]]()

    def observe(name: str, phase: Phase, run: Callable[[], Any], /) -> Any:
        seen.add((name, phase))
        return run()

    grads = []
    for one in (trainee, watched(trainee, observe)):
        found = gradients(one, [batch], Objective(), learned(one, 1, None), Compute())
        grads.append({name: bucket.clone() for name, bucket in found.flat.items()})
    for name, bucket in grads[0].items():
        assert torch.equal(bucket, grads[1][name]), name
    names = [layer.name for layer in trainee.stages[0].layers if isinstance(layer, SparseLayer)]
    assert seen == {(f"{name}.router", phase) for name in names for phase in ("forward", "backward")}


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("profile-bottleneck", [str(tmp_path / "none.toml")]) == 2
    assert "name a run file" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text((ROOT / "examples" / "small.toml").read_text())
    assert main("profile-bottleneck", [str(tmp_path / "run.toml"), "--compare", "none.json"]) == 2
    said = capsys.readouterr().err
    assert "data.train" in said and "pith data prepare" in said and "none.json" in said
    assert main("profile-bottleneck", [str(tmp_path / "run.toml"), "--set", "mesh.eq=2"]) == 3
    for words, says in (
        (("--set", "mesh.ep=3"), "num_experts = 8"),
        (("--compare", str(tmp_path / "run.toml")), "run.toml is no profile"),
    ):
        assert main("profile-bottleneck", [str(tmp_path / "run.toml"), *words]) == 3
        assert says in capsys.readouterr().err


@pytest.mark.prove
def test_the_command_profiles_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run file under torchrun, then compared with the profile that it wrote."""
    words = [str(make_run(tmp_path)), "--steps", "4", "--set", "mesh.ep=2", "--json"]
    assert main("profile-bottleneck", words) == 0
    report = json.loads(capsys.readouterr().out)
    profile = Path(report["out"]) / "profile.json"
    assert set(report["result"]["table"]) == {"0", "1"} and not (profile.parent / "run").exists()
    assert main("profile-bottleneck", [*words, "--compare", str(profile)]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["baseline"] == "the earlier profile"
