"""The checker finds each kind of violation planted in a small house, and nothing in the house as it stands.

The planted packages have names of their own, since the checker reads packages from where Python finds them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from spec.check import ROOT, check, run

HOUSE = {
    "top/__init__.py": "",
    "top/main.py": "from house.train import start\n",
    "house/__init__.py": "",
    "house/config.py": "LIMIT = 3\n",
    "house/train.py": "import os\n\nfrom house import config, left, right\n\n\ndef start() -> None:\n"
    "    print(os.environ['RANK'], config, left, right)\n",
    "house/left.py": "import json\n",
    "house/right.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import house.train\n\n\n"
    "class Gate:\n    width: int = 1\n\n    def swing(self) -> None: ...\n",
    "house/wire.py": "import torch.distributed as dist\n\n\ndef ring() -> None:\n    dist.barrier()\n",
    "tests/test_gate.py": "def test_swings() -> None: ...\n",
    "tests/mutants/first.toml": '[[mutant]]\nid = "stuck"\nfile = "house/right.py"\ntext = "1"\n'
    'replacement = "2"\ncatcher = "tests/test_gate.py::test_swings"\nstatement = "gate.swings"\n',
    "spec/gate.toml": '[[statement]]\nid = "gate.swings"\ntitle = "A gate swings"\ntext = "It swings."\n'
    'source = "pith"\ncode = ["house.right:Gate.swing", "house.right:Gate.width", "house.config:LIMIT"]\n'
    'check = ["tests/test_gate.py::test_swings"]\nreference = "house.right:Gate"\n',
    "spec/architecture.toml": """
room = [
    { name = "train", paths = ["house/train.py", "house/config.py", "house/__init__.py"], budget = 20 },
    { name = "rest", paths = ["house/left.py", "house/right.py", "house/wire.py"], budget = 30 },
]
total = { path = "house", lines = 60 }

[imports]
packages = ["top", "house"]
layers = [["top"], ["house.train"], ["house.left", "house.right"], ["house.wire"], ["house.config"]]
only = { "house.config" = ["house.train"] }
allowed = { "house.left" = ["json"] }
without = { "house.left" = ["html"] }

[[restricted_name]]
name = "torch.distributed"
path = "house"
why = "only the wire communicates"
files = { "house/wire.py" = ["barrier"] }

[[restricted_name]]
name = "os.environ"
path = "house"
why = "the environment changes no meaning"
files = { "house/train.py" = ["", "get"] }

[[restricted_call]]
name = "getattr"
paths = ["house"]
arguments = ["cfg"]
why = "a config field is read by its name"

[[restricted_call]]
name = ".item"
paths = ["house"]
why = "reads a device value"
files = ["house/wire.py"]
""",
}

Plant = Callable[[dict[str, str]], list[str]]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Builds the house with some files replaced or added, and gives the problems found as text."""
    monkeypatch.syspath_prepend(tmp_path)

    def build(changes: dict[str, str]) -> list[str]:
        for name, text in {**HOUSE, **changes}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return [str(problem) for problem in check(tmp_path)]

    return build


def swapped(file: str, old: str, new: str) -> dict[str, str]:
    assert HOUSE[file].count(old) == 1
    return {file: HOUSE[file].replace(old, new)}


def test_the_house_as_it_stands_is_clean(plant: Plant) -> None:
    assert plant({}) == []


STATEMENTS = [
    (("spec/gate.toml", "Gate.swing", "Gate.slam"), "gate.swings: house.right:Gate.slam: no Gate.slam in"),
    (("spec/gate.toml", "Gate.width", "Gate.swing.width"), "no Gate.swing.width in house/right.py"),
    (("spec/gate.toml", "house.config:LIMIT", "house.nowhere:LIMIT"), "no module house.nowhere"),
    (("spec/gate.toml", '"house.right:Gate"', '"house.right:Door"'), "house.right:Door: no Door in"),
    (("spec/gate.toml", "::test_swings", "::test_slams"), "no such test in tests/test_gate.py"),
    (("spec/gate.toml", "tests/test_gate.py", "tests/test_door.py"), "no file tests/test_door.py"),
    (
        ("spec/gate.toml", '["tests/test_gate.py::test_swings"]', "[]"),
        "gate.swings: check: Tuple should have at least 1",
    ),
    (
        ("spec/gate.toml", 'source = "pith"', 'source = ""'),
        "gate.swings: source: String should have at least 1",
    ),
    (("spec/gate.toml", "title", "titel"), "gate.swings: titel: Extra inputs are not permitted"),
    (("spec/gate.toml", "gate.swings", "Gate swings"), "Gate swings: id: String should match pattern"),
    (("spec/gate.toml", "gate.swings", "door.swings"), "id door.swings, expected gate.<slug>"),
    (("spec/gate.toml", "[[statement]]", "[[statment]]"), "unknown tables ['statment']"),
    (("spec/gate.toml", "[[statement]]", "[[statement]"), "not TOML"),
    (("tests/mutants/first.toml", "gate.swings", "gate.slams"), "mutant stuck: no statement gate.slams"),
    (("spec/architecture.toml", "[imports]", "[exports]"), "no rule was checked"),
]


@pytest.mark.parametrize(("swap", "expected"), STATEMENTS)
def test_a_false_statement_is_reported(plant: Plant, swap: tuple[str, str, str], expected: str) -> None:
    problems = plant(swapped(*swap))
    assert any(expected in problem for problem in problems), problems


def test_ids_are_unique_across_files(plant: Plant) -> None:
    twice = {"spec/gate.toml": HOUSE["spec/gate.toml"] * 2}
    assert plant(twice) == ["gate.swings: 2 statements or mutants have this id"]


IMPORTS = [
    ({"house/left.py": "from house import train\n"}, "left, line 1: imports house.train, which stands above"),
    ({"house/right.py": HOUSE["house/right.py"] + "import house.left\n"}, "which stands beside it"),
    ({"house/right.py": HOUSE["house/right.py"] + "def f() -> None:\n    import house.left\n"}, "beside it"),
    ({"house/wire.py": "import house.config\n"}, "imports house.config, which only house.train may import"),
    ({"house/left.py": "import csv\n"}, "imports csv, but house.left may import only json"),
    ({"house/left.py": "import house.wire\n", "house/wire.py": "import html\n"}, "left > house.wire > html"),
    ({"house/attic.py": ""}, "house.attic: has no place in the layers"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), IMPORTS)
def test_an_import_against_the_rule_is_reported(plant: Plant, changes: dict[str, str], expected: str) -> None:
    problems = plant(changes)
    assert any(expected in problem for problem in problems), problems


def test_a_package_found_elsewhere_is_reported(plant: Plant) -> None:
    problems = plant(swapped("spec/architecture.toml", '["top", "house"]', '["top", "house", "golden"]'))
    assert len(problems) == 1 and problems[0].startswith("golden: found at")


BUDGETS = [
    (("spec/architecture.toml", "budget = 20", "budget = 2"), "train: 8 lines, budget 2"),
    (("spec/architecture.toml", "lines = 60", "lines = 9"), "house: 24 lines, at most 9"),
    (("spec/architecture.toml", "budget = 20", "budget = 31"), "budgets add up to 61, at most 60"),
    (
        ("spec/architecture.toml", '"house/left.py", ', ""),
        "house/left.py: in the rooms [], expected exactly one",
    ),
]


@pytest.mark.parametrize(("swap", "expected"), BUDGETS)
def test_lines_over_budget_are_reported(plant: Plant, swap: tuple[str, str, str], expected: str) -> None:
    problems = plant(swapped(*swap))
    assert any(expected in problem for problem in problems), problems


CODE = [
    ("from torch import distributed\n\ndistributed.all_reduce(1)\n", "uses torch.distributed.all_reduce"),
    ("import torch\n\ntorch.distributed.all_gather(1)\n", "right.py:3: uses torch.distributed.all_gather"),
    ("from torch.distributed import all_reduce as sum_up\n", "uses torch.distributed.all_reduce"),
    ("import torch.distributed.algorithms as join\n\njoin.wait(1)\n", "uses torch.distributed.algorithms"),
    ("import os\n\nprint(os.environ['MODE'])\n", "uses os.environ: the environment changes no meaning"),
    ("from os import environ\n", "uses os.environ"),
    ("cfg = 1\nprint(getattr(cfg, 'x', None))\n", "house/right.py:2: calls getattr: a config field"),
    ("class A:\n    cfg = 1\n\nprint(getattr(A.cfg, 'x', None))\n", "house/right.py:4: calls getattr"),
    ("def f(x):\n    return x.sum().item()\n", "house/right.py:2: calls .item: reads a device value"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CODE)
def test_restricted_code_is_reported(plant: Plant, text: str, expected: str) -> None:
    problems = plant({"house/right.py": text, "spec/gate.toml": ""})
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    "text", ["import torch.distributed\n", "getattr(1, 'x')\n", "import os\n\nos.getcwd()\n", "item = 1\n"]
)
def test_code_that_is_not_restricted_passes(plant: Plant, text: str) -> None:
    assert [p for p in plant({"house/right.py": text}) if p.startswith("house/right.py")] == []


def test_a_folder_may_be_allowed_to_use_a_name(plant: Plant) -> None:
    text = HOUSE["spec/architecture.toml"].replace('"house/train.py" = ["", "get"]', '"house" = ["*"]')
    reader = "import os\n\nprint(os.environ['MODE'])\n"
    assert plant({"house/left.py": reader, "spec/architecture.toml": text.replace('["json"]', '["os"]')}) == []


def test_an_attribute_that_the_file_may_not_use_is_reported(plant: Plant) -> None:
    text = HOUSE["house/wire.py"] + "    dist.all_reduce(1)\n"
    assert plant({"house/wire.py": text}) == [
        "house/wire.py:6: uses torch.distributed.all_reduce: only the wire communicates"
    ]


def test_run_prints_problems_and_returns_1(plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(swapped("spec/gate.toml", "[[statement]]", "[[statment]]"))
    assert run(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "spec/gate.toml: unknown tables ['statment'], expected [[statement]]" in printed


def test_run_of_a_clean_house_returns_0(plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant({})
    assert run(tmp_path) == 0
    assert "The spec is clean." in capsys.readouterr().out


def test_spec_check_is_clean() -> None:
    assert [str(problem) for problem in check(ROOT)] == []
