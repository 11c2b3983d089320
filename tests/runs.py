"""Small runs for tests: a dataset and a run file, ranks that run `main` itself, and planted trouble."""

import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from golden.world import run_world
from pithdata import prepare
from pithtrain.config import load
from pithtrain.step import Trainee
from pithtrain.train import loop, main
from pithtrain.train.plan import make_plan
from pithtrain.train.watch import Status, Watch

PRELOAD = ("pithtrain.train",)

RUN = """
[model]
config = "config.json"
[data]
train = "data/train"
validation = "data/validation"
sequence_length = 16
[batch]
global_batch_size = 8
[optim]
lr = 1e-2
[schedule]
warmup_steps = 2
decay_steps = 3
[train]
steps = 10
eval_interval = 5
[run]
folder = "out"
"""


def make_run(folder: Path) -> Path:
    """A run file and what it reads: the tiny preset with a byte vocabulary, and counting as text."""
    preset = json.loads(resources.files("pithtrain.models").joinpath("presets/qwen3-moe-tiny.json").read_text())
    (folder / "config.json").write_text(json.dumps(preset | {"vocab_size": 257}))
    (folder / "text").mkdir()
    for name in range(30):
        (folder / "text" / f"{name}.txt").write_text(" ".join(str(name * 100 + i) for i in range(30)))
    prepare([folder / "text"], folder / "data", holdout=0.2)
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


def run_ranks(count: int, run: Path, *overrides: str, trouble: "Trouble | None" = None) -> loop.Ending:
    """Trains in a gloo world of `count` ranks; the ending, which all ranks must agree on."""
    endings = run_world(count, _train, run, overrides, trouble, preload=PRELOAD)
    assert len(set(endings)) == 1 or {e.validation_loss for e in endings[1:]} == {endings[0].validation_loss}, endings
    return endings[0]


def _train(run: Path, overrides: Sequence[str], trouble: "Trouble | None") -> loop.Ending:
    cfg = load(run, overrides)
    plan = make_plan(cfg, str(run), dist.get_world_size())
    torch.set_deterministic_debug_mode("error")
    if trouble is not None:
        trouble.plant()
    with Watch(Status(cfg.run.folder / "status.json", dist.get_rank()), cfg.train.hang_timeout) as watch:
        return loop.train(plan, torch.device("cpu"), watch, range(dist.get_world_size()))


@dataclass(frozen=True)
class Trouble:
    """At these train steps of a process, counted from 1, and on these ranks, `action(trainee, step)` stands for the
    step; `step()` does it as usual.
    """

    action: Callable[[Trainee, Callable[[], Any]], Any]
    steps: Sequence[int]
    ranks: Sequence[int] = range(64)

    def plant(self) -> None:
        real, calls = loop.train_step, [0]

        def troubled(trainee: Trainee, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] in self.steps and trainee.mesh.rank in self.ranks:
                return self.action(trainee, lambda: real(trainee, *args, **kwargs))
            return real(trainee, *args, **kwargs)

        loop.train_step = troubled


def not_a_number(trainee: Trainee, step: Callable[[], Any]) -> Any:
    """The step with a NaN in one weight, put right afterwards."""
    weight = trainee.shard.weights()["norm"].value
    before = weight.clone()
    weight[3] = float("nan")
    result = step()
    assert not result.applied
    weight.copy_(before)
    return result


def terminated(trainee: Trainee, step: Callable[[], Any]) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return step()


def raises(trainee: Trainee, step: Callable[[], Any]) -> Any:
    raise RuntimeError("planted")


def killed(trainee: Trainee, step: Callable[[], Any]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(trainee: Trainee, step: Callable[[], Any]) -> Any:
    time.sleep(600)


@dataclass(frozen=True, eq=False)
class Rank:
    """A process that runs `main` as one rank."""

    process: Any
    output: Path

    def wait(self, seconds: float) -> int | None:
        """Its exit code, -N if signal N killed it; None if it still runs after `seconds`."""
        self.process.join(seconds)
        code: int | None = self.process.exitcode
        return code


def start_ranks(count: int, run: Path, *overrides: str, troubles: Sequence[Trouble] = ()) -> list[Rank]:
    """`main` as torchrun would start it, `count` ranks, each with its output in a file beside `run`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pithtrain.step", *PRELOAD])
    argv = [str(run), *(f"--set={override}" for override in overrides)]
    ranks = []
    for rank in range(count):
        output = run.parent / f"rank{rank}.out"
        process = context.Process(target=_rank_main, args=(rank, count, port, argv, output, troubles), daemon=True)
        process.start()
        ranks.append(Rank(process, output))
    return ranks


def _rank_main(rank: int, count: int, port: int, argv: list[str], output: Path, troubles: Sequence[Trouble]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with open(output, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        for trouble in troubles:
            trouble.plant()
        os._exit(main(argv))
