"""The device script on a CPU: what it writes, that it needs little, and that it sees wrong kernels and lost rows."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pithtrain.metrics import flops_per_token
from pithtrain.ops import fp8_gemm, swiglu
from spec.kernels import OPERATORS, Shape
from tests.device import exact, model, training
from tests.device.__main__ import SECTIONS, verdict
from tests.device.measure import different, worst
from tests.device.report import QWEN3_30B_A3B, SMALL, Function, Place, Row, Section, each, run_section

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
WITHOUT = """
import runpy, sys
from transformers import Qwen3MoeForCausalLM  # which may need what the script must not
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT or name == "pithtrain.config":
            raise ModuleNotFoundError(name)
ABSENT = ("pydantic", "typer", "rich")
for name in list(sys.modules):
    if name.split(".")[0] in ABSENT:
        del sys.modules[name]
sys.meta_path.insert(0, Absent())
runpy.run_module("tests.device", run_name="__main__", alter_sys=True)
"""


def place(seconds: float = 60) -> Place:
    return Place(CPU, small=True, deadline=time.monotonic() + seconds)


def test_every_section_runs_without_the_packages_of_the_command(tmp_path: Path) -> None:
    out, environment = tmp_path / "made" / "device.json", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT, str(out), "--device", "cpu", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(out.read_text())
    assert list(written["sections"]) == list(written["seconds"]) == [section.name for section in SECTIONS]
    rows = {(name, row["name"]): row for name, rows in written["sections"].items() for row in rows}
    assert all(any(row["status"] in ("ok", "measured") for row in rows) for rows in written["sections"].values())
    assert {row["status"] for row in rows.values()} == {"ok", "measured", "not run"}
    absent = [("products", "MXFP8 product"), ("speed", "dense FP8, torch scaled_mm")]
    assert [at for at, row in rows.items() if row["status"] == "not run"] == absent
    assert rows["training", "losses"]["figures"]["largest"] < 0.01, "against transformers"
    assert rows["card", "machine"]["figures"]["torch"] == torch.__version__
    for name, row in rows.items():
        assert name[1] in done.stdout and (row["status"] != "ok" or row["figures"]["bound"] >= 0), name
    shape = Shape(**dataclasses.asdict(SMALL))
    costs = {operator.name: max(operator.cost(shape)) for operator in OPERATORS}
    for name, operator in (("SwiGLU",) * 2, ("grouped FP8, gate and up, forward", "FP8 product, M-grouped")):
        figures = rows["speed", name]["figures"]
        assert figures["per second"] * figures["ms"] / 1e3 == pytest.approx(costs[operator])


def test_without_transformers_ours_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    absent, ours = training.training(place())
    assert (absent.name, absent.status) == ("transformers", "not run") and "not installed" in absent.note
    assert (ours.name, ours.status) == ("pith", "measured") and ours.figures["tokens/s"] > 0


def test_sizes_and_limits() -> None:
    """Shapes and FLOPs stand here again, since their homes import rich."""
    assert dataclasses.asdict(QWEN3_30B_A3B) == dataclasses.asdict(Shape())
    assert sum(section.seconds for section in SECTIONS) <= 360
    made = model.setup(small=False)
    assert model.flops_per_token(made.arch, made.length) == flops_per_token(made.arch, made.length)


def failed(rows: Iterator[Row]) -> set[str]:
    kept = list(rows)
    wrong = {row.name for row in kept if row.status == "failed"}
    assert verdict({"section": kept}) == (1 if wrong else 0)
    return wrong


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """SwiGLU off by 2^-20, in one direction; and a product of which one result is lost."""
    right, multiply = swiglu.swiglu, fp8_gemm.multiply
    assert not failed(exact.elementwise(place()))
    monkeypatch.setattr(swiglu, "swiglu", lambda x: right(x) * (1 - 2.0**-20))
    assert failed(exact.elementwise(place())) == {"SwiGLU", "SwiGLU backward"}

    def losing(*operands: object) -> torch.Tensor:
        output = multiply(*operands)  # type: ignore[arg-type]
        output.view(-1)[:1] = 0
        return output

    monkeypatch.setattr(fp8_gemm, "multiply", losing)
    assert failed(exact.products(place())) == {"FP8 forward", "FP8 input gradient"}


def test_comparisons() -> None:
    x = torch.tensor([1.0, -0.0, float("nan")])
    assert different(x, x.clone()) == 0
    assert different(x, torch.tensor([1.0, 0.0, float("nan")])) == 1
    assert different(x, x.double()) == 3 and different(x, x[:2]) == 3
    assert worst(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]), 2.0) == 0.5
    assert worst(torch.tensor([5.0]), torch.tensor([4.0]), 2.0) == 0.5
    assert worst(x, torch.tensor([1.0, 0.0, 0.0]), 1.0) == float("inf")
    assert worst(torch.ones(2), torch.ones(2), 0.0) == 0 and worst(torch.ones(1), torch.zeros(1), 0.0) == float("inf")


def breaking(place: Place) -> Iterator[Row]:
    yield from each(place, [("raises", lambda: 1 / 0), ("fine", lambda: [Row("fine", "ok")])])  # type: ignore[list-item, return-value]


def raising(place: Place) -> Iterator[Row]:
    yield Row("before", "ok")
    raise RuntimeError("planted")


def dying(place: Place) -> Iterator[Row]:
    yield Row("before", "ok")
    os._exit(7)


def silent(place: Place) -> Iterator[Row]:
    yield from ()


def hanging(place: Place) -> Iterator[Row]:
    yield Row("before", "ok")
    time.sleep(60)


@pytest.mark.parametrize(
    "function,kept,note",
    [
        (breaking, ["raises", "fine"], "ZeroDivisionError"),
        (raising, ["before", "raising"], "planted"),
        (dying, ["before", "dying"], "exit code 7"),
        (silent, ["silent"], "said nothing"),
        (hanging, ["before", "hanging"], "out of time"),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_a_section_that_breaks_keeps_what_it_had(function: Function, kept: list[str], note: str) -> None:
    start = time.monotonic()
    rows = run_section(Section(function.__name__, 1.0, function), CPU, small=True, found={})
    assert [row.name for row in rows] == kept and time.monotonic() - start < 10
    (wrong,) = (row for row in rows if row.status == "failed")
    assert note in wrong.note and verdict({"section": rows}) == 1


def test_a_case_that_comes_too_late_has_failed() -> None:
    assert failed(each(place(seconds=-1), [("late", lambda: [Row("late", "ok")])])) == {"late"}
