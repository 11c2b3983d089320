"""The `pith` command as a user runs it: quick help, forwarding to a checkout's packages, exit codes."""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from typer_cli.checkout import find_root

PITH = str(Path(sys.executable).with_name("pith"))
ROOT = Path(__file__).parents[2]

# Stands for golden.verify.run and its like: prints how it was called, returns 1 so that the code can be seen.
RECORDER = """
import json
def run(**arguments):
    print(json.dumps([__name__, arguments]))
    return 1
"""
REFUSER = """
def run(**arguments):
    raise ValueError("trace moe.json: written by format 9, expected 1; write it again")
"""


def pith(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([PITH, *arguments], cwd=cwd, text=True, capture_output=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "pith"\n')
    for module in ("golden/verify.py", "golden/bench.py", "spec/check.py", "tests/mutants/runner.py"):
        path = tmp_path / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECORDER)
    (tmp_path / "some/folder").mkdir(parents=True)
    return tmp_path


# --- help


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from typer_cli.main import app; app(['--help'], standalone_mode=False);"
        "print(sorted({'torch', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert output.startswith("Usage: ") and output.splitlines()[-1] == "[]"


def test_help_takes_at_most_two_and_a_half_times_importing_typer() -> None:
    commands = {"typer": [sys.executable, "-c", "import typer"], "pith": [PITH, "--help"]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(9):
        for name, command in commands.items():
            begin = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            seconds[name].append(time.perf_counter() - begin)
    ratio = statistics.median(seconds["pith"]) / statistics.median(seconds["typer"])
    assert ratio <= 2.5, f"pith --help takes {ratio:.2f} x import typer"


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "data",
        "data prepare",
        "export",
        "verify",
        "mutants",
        "bench",
        "spec",
        "spec check",
        "spec schema",
        "schedule",
        "timeline",
        "ops",
        "skill",
        "skill run",
    ],
)
def test_every_command_explains_itself(command: str, tmp_path: Path) -> None:
    result = pith(*command.split(), "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Usage: pith {command} ")


# --- the checkout


def test_root_is_found_upwards(checkout: Path) -> None:
    for start in (checkout, checkout / "spec", checkout / "some/folder"):
        assert find_root(start) == checkout


def test_the_nearest_checkout_wins_and_other_projects_are_passed(checkout: Path) -> None:
    inner = checkout / "some"
    (inner / "spec").mkdir()
    (inner / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert find_root(inner / "folder") == checkout
    (inner / "pyproject.toml").write_text('[project]\nname = "pith"\n')
    assert find_root(inner / "folder") == inner


def test_a_folder_without_spec_is_no_checkout(checkout: Path) -> None:
    shutil.rmtree(checkout / "spec")
    with pytest.raises(ValueError, match="no checkout of pith at or above"):
        find_root(checkout)


@pytest.mark.parametrize(
    "command", ["verify", "mutants", "bench", "schedule 1f1b", "spec check", "spec schema --write", "skill list"]
)
def test_outside_a_checkout_the_remedy_is_given(command: str, tmp_path: Path) -> None:
    result = pith(*command.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        f"pith: no checkout of pith at or above {tmp_path}; this command needs its spec/, golden/ and "
        "tests/: go into a checkout and run it there\n"
    )


@pytest.mark.parametrize(
    ("command", "module", "arguments"),
    [
        ("verify", "golden.verify", {"cases": [], "json": False, "update": False, "reason": None}),
        (
            "verify --case a --case b --json --update --reason why",
            "golden.verify",
            {"cases": ["a", "b"], "json": True, "update": True, "reason": "why"},
        ),
        ("mutants", "tests.mutants.runner", {"only": [], "resume": False}),
        (
            "mutants --only m1 --only m2 --resume",
            "tests.mutants.runner",
            {"only": ["m1", "m2"], "resume": True},
        ),
        ("bench", "golden.bench", {"rounds": 15, "threads": [1, 2]}),
        ("bench --rounds 3 --threads 4", "golden.bench", {"rounds": 3, "threads": [4]}),
        ("spec check", "spec.check", {}),
    ],
)
def test_commands_call_the_checkouts_own_packages(
    command: str, module: str, arguments: dict[str, object], checkout: Path
) -> None:
    result = pith(*command.split(), cwd=checkout / "some/folder")
    assert json.loads(result.stdout) == [module, arguments], result.stderr
    assert result.returncode == 1


def test_a_value_error_is_one_message_and_exit_code_2(checkout: Path) -> None:
    (checkout / "golden/verify.py").write_text(REFUSER)
    result = pith("verify", cwd=checkout)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "pith: trace moe.json: written by format 9, expected 1; write it again\n"


def test_a_bug_keeps_its_traceback(checkout: Path) -> None:
    (checkout / "golden/verify.py").write_text("def run(**arguments):\n    assert False, 'invariant'\n")
    result = pith("verify", cwd=checkout)
    assert result.returncode == 1 and "AssertionError: invariant" in result.stderr


def test_schema_is_printed_and_written(checkout: Path) -> None:
    printed = pith("spec", "schema", cwd=checkout.parent)
    assert printed.stdout == (ROOT / "spec/run.schema.json").read_text()
    assert pith("spec", "schema", "--write", cwd=checkout).returncode == 0
    assert (checkout / "spec/run.schema.json").read_text() == printed.stdout


def test_data_prepare(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / f"text/{number}.md").write_text(f"document {number}\n" * 5)
    (tmp_path / "text/left.txt").write_text("not taken")
    options = ("--suffix", ".md", "--holdout", "0.3")
    result = pith("data", "prepare", "text", "--out", "data", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    documents = [json.loads((tmp_path / "data" / s / "index.json").read_text()) for s in ("train", "validation")]
    assert sum(index["num_documents"] for index in documents) == 40
    assert result.stdout.startswith("prepared ")


def test_data_prepare_refuses_what_is_not_there(tmp_path: Path) -> None:
    result = pith("data", "prepare", "none", "--out", "data", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("pith: ") and "none" in result.stderr and "Traceback" not in result.stderr
