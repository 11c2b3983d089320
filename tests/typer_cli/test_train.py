"""`pith train`: what is refused before anything starts, how torchrun is started, signals, exit codes.

torchrun is replaced by a stand-in found first on PYTHONPATH, which says how it was called and does as asked.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from typer_cli.launch import exit_code

PITH = str(Path(sys.executable).with_name("pith"))

RUN = """
[model]
config = "qwen3-moe-tiny"
[data]
train = "data"
sequence_length = 16
[batch]
global_batch_size = 8
[mesh]
ep = 2
[train]
steps = 100
threads = 3
hang_timeout = 77
[run]
folder = "out"
"""

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
plan = json.loads(os.environ["PLAN"])
status = Path("out/status.json")
seen = {
    "argv": sys.argv[1:],
    "grace": os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
    "threads": os.environ["OMP_NUM_THREADS"],
    "stale": status.exists(),
    "own_session": os.getsid(0) == os.getpid(),
    "signals": [],
}
def note(signum, frame):
    seen["signals"].append(signal.Signals(signum).name)
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, note)
Path("started").touch()
deadline = time.monotonic() + 30
while len(seen["signals"]) < plan.get("await", 0) and time.monotonic() < deadline:
    time.sleep(0.01)
Path("seen.json").write_text(json.dumps(seen))
if "status" in plan:
    status.write_text(json.dumps(plan["status"]))
if "kill" in plan:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), plan["kill"])
sys.exit(plan.get("exit", 0))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    for folder in ("data", "out", "stand_in/torch/distributed"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "distributed/__init__.py": "",
        "distributed/run.py": STAND_IN,
    }.items():
        (tmp_path / "stand_in/torch" / name).write_text(text)
    return tmp_path


def start(place: Path, plan: dict[str, object], *arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(place / "stand_in"), "PLAN": json.dumps(plan)}
    command = [PITH, "train", "run.toml", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=place, env=environment, text=True, stdout=pipe, stderr=pipe)


def train(place: Path, plan: dict[str, object], *arguments: str) -> tuple[int, str]:
    process = start(place, plan, *arguments)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def seen(place: Path) -> dict[str, object]:
    return dict(json.loads((place / "seen.json").read_text()))


def test_torchrun_is_started_with_the_meshs_size_and_every_override(place: Path) -> None:
    code, errors = train(place, {}, "--set", "optim.lr=1e-4", "--set", "mesh.dp=2")
    assert code == 0, errors
    call = seen(place)
    assert call["argv"] == [
        *("--standalone", "--nproc-per-node=4", "-m", "pithtrain.train", "run.toml"),
        *("--set=optim.lr=1e-4", "--set=mesh.dp=2"),
    ]
    assert (call["grace"], call["threads"], call["own_session"]) == ("77", "3", True)


def test_nproc_fills_the_rest_of_the_mesh(place: Path) -> None:
    assert train(place, {}, "--nproc", "6")[0] == 0
    argv = seen(place)["argv"]
    assert isinstance(argv, list) and argv[1] == "--nproc-per-node=6"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ("--nproc", "3"),
            "pith: mesh = pp 1 x dp rest x cp 1 x ep 2: needs a multiple of 2 processes, got 3",
        ),
        (("--set", "optim.lr=0"), "optim.lr = 0: expected a number greater than 0"),
        (("--set", "data.train=none"), "none: no such folder; make it with `pith data prepare`"),
        (("--set", "mesh.cp=2"), "mesh.cp = 2: expected 1"),
        (("--nproc", "0"), "--nproc"),
    ],
)
def test_an_impossible_run_starts_nothing(place: Path, arguments: tuple[str, ...], wanted: str) -> None:
    code, errors = train(place, {}, *arguments)
    assert code == 2 and wanted in errors and "Traceback" not in errors
    assert not (place / "started").exists()


def test_the_status_file_says_the_exit_code(place: Path) -> None:
    assert train(place, {"exit": 1, "status": {"exit_code": 75}})[0] == 75


def test_a_status_file_of_an_earlier_run_says_nothing(place: Path) -> None:
    (place / "out/status.json").write_text('{"exit_code": 75}')
    assert train(place, {"exit": 3})[0] == 3
    assert seen(place)["stale"] is False


def test_torchrun_killed_by_a_signal(place: Path) -> None:
    assert train(place, {"kill": int(signal.SIGKILL)})[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_the_run_is_waited_for(place: Path, signum: signal.Signals) -> None:
    process = start(place, {"await": 2, "exit": 1, "status": {"exit_code": 75}})
    for count in range(2):
        deadline = time.monotonic() + 30
        while not (place / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1 * count)  # two at once would arrive as one
        process.send_signal(signum)
    assert process.wait(timeout=60) == 75, process.communicate()
    assert seen(place)["signals"] == [signum.name] * 2


@pytest.mark.parametrize(
    ("returncode", "status", "expected"),
    [
        (0, None, 0),
        (1, None, 1),
        (-15, None, 143),
        (0, "{}", 0),
        (1, '{"exit_code": 75}', 75),
        (0, '{"exit_code": 75}', 75),
        (0, '{"exit_code": 0}', 0),
        (1, '{"exit_code": 0}', 1),
        (1, '{"exit_code": null}', 1),
    ],
)
def test_exit_code(returncode: int, status: str | None, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    if status is not None:
        path.write_text(status)
    assert exit_code(returncode, path) == expected
