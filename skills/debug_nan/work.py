"""The investigation: the replay, and the ladder of changes that might cure it. `python -m skills.debug_nan.work FOLDER`
reads FOLDER/order.json and writes FOLDER/answer.json; `check` does the same step again for the script that is written.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from golden.world import WorldError, run_world
from pithtrain.checkpoint.folder import step_folders
from pithtrain.config import RunConfig, load, resolve_mesh
from pithtrain.metrics import read_metrics
from pithtrain.train.plan import CHECKPOINTS
from skills.debug_nan.answer import ANSWER, ORDER, Answer, Order, Rung
from skills.debug_nan.replay import Job, Replayed, replay

PRELOAD = ("skills.debug_nan.replay",)


def work(folder: Path) -> Answer:
    """Collects it all. folder: with the order; it gets the state before the step as a checkpoint."""
    order = Order.model_validate_json((folder / ORDER).read_text())
    job = Job(order.run, order.overrides, order.starts, order.last, folder, save=True)
    done = run_world(order.ranks, replay, job, seconds=order.seconds, preload=PRELOAD)[0]
    answer = describe(done, order.recorded)
    saved = step_folders(folder / CHECKPOINTS)
    if done.bad is None or not saved:
        return answer
    answer = answer.model_copy(update={"state": saved[0]})
    if not order.ladder:
        return answer
    job = replace(job, starts=(saved[0],), last=done.bad, save=False, watched=False)
    cfg = load(order.run, order.overrides)
    rungs = tuple(_climb(job, rung, order) for rung in rungs_of(cfg, order.ranks))
    return answer.model_copy(update={"rungs": rungs})


def describe(done: Replayed, recorded: Path | None) -> Answer:
    """The answer without its ladder."""
    found = done.found[0] if done.found else []
    repeats = [(figures, runs[0].words() if runs else "") for figures, runs in zip(done.again, done.found, strict=True)]
    same = all(repr(repeat) == repr(repeats[0]) for repeat in repeats)
    deterministic = None if done.bad is None or not repeats else same and not done.again[0][0]
    line = done.lines[-1] if done.bad is not None and done.lines else None
    records = {record["step"]: record for record in read_metrics(recorded) if "loss" in record} if recorded else {}
    compared = [line for line in done.lines if line["step"] in records]
    return Answer(
        start=done.start,
        first=done.first,
        replayed=len(done.lines),
        bad=done.bad,
        loss=None if line is None else _number(line["loss"]),
        grad_norm=None if line is None else _number(line["grad_norm"]),
        same=sum(
            all(_number(line[key]) == _number(records[line["step"]][key]) for key in ("loss", "grad_norm"))
            for line in compared
        ),
        compared=len(compared),
        deterministic=deterministic,
        origin=found[0] if found else None,
        others=max(len(found) - 1, 0),
        notes=tuple(done.state),
        state=None,
    )


def _number(value: float | str) -> float | str:
    """As JSON takes it: a number, or the word for one that is not finite."""
    value = float(value)
    return value if abs(value) < float("inf") else str(value)


def rungs_of(cfg: RunConfig, ranks: int) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """(name, overrides, ranks) of the changes worth a try, one at a time."""
    precision = cfg.train.precision
    if precision == "fp8":
        yield "FP8 off", ("train.precision=bf16",), ranks
    if precision in ("fp8", "bf16") or (precision == "auto" and torch.cuda.is_available()):
        yield "bf16 off", ("train.precision=fp32",), ranks
    if cfg.train.recompute != "none":
        yield "recompute off", ("train.recompute=none",), ranks
    mesh = resolve_mesh(cfg.mesh, ranks)
    plain = ("pipeline.schedule=1f1b", "pipeline.chunks=auto")
    if mesh.ep > 1:
        yield "no expert parallelism", ("mesh.ep=1", f"mesh.dp={mesh.dp * mesh.ep}"), ranks
    if mesh.pp > 1:
        yield "no pipeline", ("mesh.pp=1", *plain), ranks // mesh.pp
    if ranks > 1:
        yield "one rank", ("mesh.pp=1", "mesh.dp=1", "mesh.ep=1", *plain), 1
    if cfg.train.routing != "balanced":
        yield "balanced routing", ("train.routing=balanced",), ranks


def _climb(job: Job, rung: tuple[str, tuple[str, ...], int], order: Order) -> Rung:
    name, overrides, ranks = rung
    job = replace(job, overrides=(*job.overrides, *overrides))
    try:
        done = run_world(ranks, replay, job, seconds=order.seconds, preload=PRELOAD)[0]
    except WorldError as error:
        return Rung(name=name, overrides=overrides, cured=None, note=str(error).partition("\n---")[0])
    return Rung(name=name, overrides=overrides, cured=done.bad is None)


def check(run: str, overrides: tuple[str, ...], state: str, step: int, ranks: int, folder: str) -> int:
    """Takes the one step as the trainer does: 0 if it is finite, else 1, and says where it is not."""
    job = Job(Path(run), overrides, (Path(state),), step, Path(folder))
    answer = describe(run_world(ranks, replay, job, seconds=3600, preload=PRELOAD)[0], None)
    if answer.bad is None:
        print(f"step {step} is finite")
        return 0
    print(f"step {step}: loss {answer.loss}, gradient norm {answer.grad_norm}")
    print(answer.origin.words() if answer.origin else "no operator was seen to begin it")
    return 1


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / ANSWER).write_text(json.dumps(work(out).model_dump(mode="json"), indent=1) + "\n")
