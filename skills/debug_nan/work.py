"""The investigation: the replay, and the ladder of changes that might cure it. `python -m skills.debug_nan.work FOLDER`
reads FOLDER/order.json and writes FOLDER/answer.json; `check` does the same step again for the script that is written.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from golden.world import WorldError, run_world
from pithtrain.checkpoint.folder import step_folders
from pithtrain.config import RunConfig, load, resolve_mesh
from pithtrain.train.plan import CHECKPOINTS
from skills.debug_nan.answer import ANSWER, ORDER, Answer, Line, Order, Rung
from skills.debug_nan.order import steps_of
from skills.debug_nan.record import compare, number
from skills.debug_nan.replay import Job, Replayed, replay

PRELOAD = ("skills.debug_nan.replay",)
SHOWN = 8  # of the last steps
GROWTH = 10


class Change(NamedTuple):
    """A change to the run that might cure it. whole: it has to act from the start, not on the bad step alone."""

    name: str
    overrides: tuple[str, ...]
    ranks: int
    whole: bool = False


def work(folder: Path) -> Answer:
    """Collects it all. folder: with the order; it gets the state before the step as a checkpoint."""
    order = Order.model_validate_json((folder / ORDER).read_text())
    job = Job(order.run, order.overrides, order.starts, order.last, folder, save=True)
    done = run_world(order.ranks, replay, job, seconds=order.seconds, preload=PRELOAD)[0]
    cfg = load(order.run, order.overrides)
    record = compare(done.lines, steps_of(order.recorded), cfg.train.precision)
    answer = describe(done).model_copy(update={"record": record, "changed": order.changed})
    answer = answer.model_copy(update={"notes": (*order.notes, *answer.notes)})
    saved = step_folders(folder / CHECKPOINTS)
    if done.bad is None or not saved:
        return answer
    answer = answer.model_copy(update={"state": saved[0]})
    if not order.ladder or not answer.deterministic or answer.is_another_run:
        return answer
    job = replace(job, folder=folder / "ladder", last=done.bad, save=False, watched=False)
    rungs = tuple(_climb(job, rung, order, answer) for rung in rungs_of(cfg, order.ranks, is_growing(answer)))
    return answer.model_copy(update={"rungs": rungs})


def describe(done: Replayed) -> Answer:
    """The answer without its ladder."""
    found = done.found[0] if done.found else []
    repeats = [(figures, runs[0].words() if runs else "") for figures, runs in zip(done.again, done.found, strict=True)]
    same = all(repr(repeat) == repr(repeats[0]) for repeat in repeats)
    return Answer(
        start=done.start,
        first=done.first,
        replayed=len(done.lines),
        bad=done.bad,
        lines=tuple(_line(line) for line in done.lines[-SHOWN:]),
        largest_weights=(number(done.largest_weights[0]), number(done.largest_weights[1])),
        deterministic=None if done.bad is None or not repeats else same and not done.again[0][0],
        origin=found[0] if found else None,
        others=max(len(found) - 1, 0),
        notes=tuple(done.state),
    )


def _line(line: Mapping[str, Any]) -> Line:
    figures = {name: number(line[name]) for name in ("loss", "grad_norm")}
    return Line(step=line["step"], learning_rate=line["learning_rate"], **figures)


def is_growing(answer: Answer) -> bool:
    """Whether a lower learning rate or clipping may help: the optimizer made the value, or the steps before led to it,
    the norm of gradients or the largest weight having grown by a clear factor.
    """
    norms = [norm for norm in (float(line.grad_norm) for line in answer.lines) if isfinite(norm)]
    before, after = map(float, answer.largest_weights)
    optimizer = answer.origin is not None and answer.origin.place.name == "optimizer"
    return optimizer or after > GROWTH * before or (len(norms) > 1 and norms[-1] > GROWTH * median(norms[:-1]))


def rungs_of(cfg: RunConfig, ranks: int, growing: bool) -> Iterator[Change]:
    """The changes worth a try, one at a time."""
    precision = cfg.train.precision
    if growing:
        yield Change("a tenth of the learning rate", (f"optim.lr={cfg.optim.lr / 10}",), ranks, whole=True)
    if growing and not cfg.optim.clip_norm:
        yield Change("gradients clipped", ("optim.clip_norm=1.0",), ranks, whole=True)
    if precision == "fp8":
        yield Change("FP8 off", ("train.precision=bf16",), ranks)
    if precision in ("fp8", "bf16") or (precision == "auto" and torch.cuda.is_available()):
        yield Change("bf16 off", ("train.precision=fp32",), ranks)
    if cfg.train.recompute != "none":
        yield Change("recompute off", ("train.recompute=none",), ranks)
    mesh = resolve_mesh(cfg.mesh, ranks)
    plain = ("pipeline.schedule=1f1b", "pipeline.chunks=auto")
    if mesh.ep > 1:
        yield Change("no expert parallelism", ("mesh.ep=1", f"mesh.dp={mesh.dp * mesh.ep}"), ranks)
    if mesh.pp > 1:
        yield Change("no pipeline", ("mesh.pp=1", *plain), ranks // mesh.pp)
    if ranks > 1:
        yield Change("one rank", ("mesh.pp=1", "mesh.dp=1", "mesh.ep=1", *plain), 1)
    if cfg.train.routing != "balanced":
        yield Change("balanced routing", ("train.routing=balanced",), ranks)


def _climb(job: Job, change: Change, order: Order, answer: Answer) -> Rung:
    """The bad step with the change, or, for a change that has to act earlier, all steps replayed."""
    assert answer.bad is not None
    start, steps = (answer.start, answer.bad - answer.first) if change.whole else (answer.state, 1)
    job = replace(job, starts=(start,), overrides=(*job.overrides, *change.overrides))
    rung = Rung(name=change.name, overrides=change.overrides, steps=steps, cured=None)
    try:
        done = run_world(change.ranks, replay, job, seconds=order.seconds, preload=PRELOAD)[0]
    except WorldError as error:
        return rung.model_copy(update={"note": str(error).partition("\n---")[0]})
    new = job.folder.parent / change.name.replace(" ", "-")
    sets = (*job.overrides, f"checkpoint.resume={start or 'never'}", f"run.folder={new}")
    words = [str(order.run), f"--nproc={change.ranks}", *(f"--set={text}" for text in sets)]
    command = f".venv/bin/pith train {shlex.join(words)}" if done.bad is None else ""
    return rung.model_copy(update={"cured": done.bad is None, "command": command})


def check(run: str, overrides: tuple[str, ...], state: str, step: int, ranks: int, folder: str) -> int:
    """Takes the one step as the trainer does: 0 if it is finite, else 1, and says where it is not."""
    job = Job(Path(run), overrides, (Path(state),), step, Path(folder))
    answer = describe(run_world(ranks, replay, job, seconds=3600, preload=PRELOAD)[0])
    if answer.bad is None:
        print(f"step {step} is finite")
        return 0
    print(answer.headline())
    print(answer.origin.words() if answer.origin else "no operator was seen to begin it")
    return 1


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / ANSWER).write_text(json.dumps(work(out).model_dump(mode="json"), indent=1) + "\n")
