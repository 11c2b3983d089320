"""Training under torchrun, started by `pith train`: a stop signal from outside, and a rank killed from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pithtrain.metrics import read_metrics
from pithtrain.train.watch import COMPLETE, FAILED, STOPPED
from tests.runs import make_run

PITH = str(Path(sys.executable).with_name("pith"))
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def start(run: Path, *overrides: str) -> "subprocess.Popen[str]":
    command = [PITH, "train", str(run), "--set=mesh.ep=2", *(f"--set={override}" for override in overrides)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_steps(process: "subprocess.Popen[str]", folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) >= steps:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError("\n".join(process.communicate()))


def processes_of(run: Path) -> dict[int, int]:
    """Rank -> process id of the ranks that train `run`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = dict(item.split(b"=", 1) for item in (entry / "environ").read_bytes().split(b"\0") if item)
        except (OSError, ValueError):
            continue
        if os.fsencode(run) in command and b"LOCAL_RANK" in environment:
            found[int(environment[b"LOCAL_RANK"])] = int(entry.name)
    return found


def test_sigterm_to_pith_train_saves_and_returns_its_own_code(run: Path) -> None:
    out = run.parent / "out"
    process = start(run, "train.steps=100000", "train.eval_interval=0", "pipeline.schedule=dualpipev")
    wait_for_steps(process, out, 3)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED, said + errors
    status = json.loads((out / "status.json").read_text())
    assert status["exit_code"] == STOPPED and "SIGTERM" in status["reason"]
    assert "goes on from here" in said
    assert "pipeline: dualpipev on 1 ranks is published for 2 micro-batches, not for 1" in said
    step = read_metrics(out)[-1]["step"]
    assert (out / f"checkpoints/step-{step:08d}/pith/manifest.json").exists() and status["step"] == step

    process = start(run, f"train.steps={step + 6}")
    said, errors = process.communicate(timeout=120)
    assert process.returncode == COMPLETE, said + errors
    assert f"resumed from {out}/checkpoints/step-{step:08d}" in said
    assert [r["step"] for r in read_metrics(out) if "loss" in r] == list(range(1, step + 7))


PIPELINE = ("mesh.ep=1", "mesh.pp=2", "pipeline.schedule=1f1b", "batch.num_microbatches=4")


@pytest.mark.prove
@pytest.mark.parametrize("layout", [(), PIPELINE], ids=["experts", "pipeline"])
def test_a_rank_killed_from_outside_ends_pith_train_within_ten_seconds(run: Path, layout: tuple[str, ...]) -> None:
    process = start(run, "train.steps=100000", "train.eval_interval=0", *layout)
    wait_for_steps(process, run.parent / "out", 3)
    os.kill(processes_of(run)[1], signal.SIGKILL)
    began = time.monotonic()
    said, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    assert seconds < 10, f"{seconds} s\n{said}\n{errors}"
    assert process.returncode == FAILED, said + errors
    assert "on rank 0 of 2, in the step after step" in errors
    assert not processes_of(run)
