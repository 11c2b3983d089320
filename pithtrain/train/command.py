"""python -m pithtrain.train RUN.toml: one rank, from its arguments to its exit code."""

import argparse
import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pithtrain.config import ConfigError, RunConfig, load, smallest_world
from pithtrain.data import bigram_entropy
from pithtrain.train.loop import Ending, train
from pithtrain.train.plan import CHECKPOINTS, RESOLVED, Plan, dry_run, make_plan, resolved_toml
from pithtrain.train.watch import COMPLETE, FAILED, REFUSED, Status, Watch


class Place(NamedTuple):
    """This rank's place in the world; a machine's ranks follow one another."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int


def _place() -> Place:
    """As torchrun tells it; alone, a world of one."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 1}
    return Place(*(int(os.environ.get(name, default)) for name, default in alone.items()))


def main(argv: Sequence[str]) -> int:
    """Trains as this rank; the exit code is one of watch.py's. Of a run that is refused or ends as it should, only the
    first rank says anything: the others return 0.
    """
    parser = argparse.ArgumentParser(prog="python -m pithtrain.train", description="Train what RUN.toml describes.")
    parser.add_argument("run", type=Path, metavar="RUN.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the run file"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the run and print what it would be")
    arguments = parser.parse_args(argv)
    place, source = _place(), str(arguments.run)
    cfg: RunConfig | None = None
    try:
        cfg = load(arguments.run, arguments.set)
        if arguments.dry_run:
            world_size = place.world_size if "WORLD_SIZE" in os.environ else smallest_world(cfg.mesh)
            described = dry_run(cfg, world_size, source)
            if place.rank == 0:
                print(described)
            return COMPLETE
        plan, device = make_plan(cfg, source, place.world_size), _device(place)
    except ValueError as error:
        if place.local_rank:  # every rank of a machine finds the same, and the first one there says it
            return COMPLETE
        print(error, file=sys.stderr, flush=True)
        if cfg is not None:
            with contextlib.suppress(OSError):  # the run folder itself may be what was refused
                Status(cfg.run.folder / "status.json", place.rank).write(REFUSED, str(error), 0)
        return REFUSED
    return _run(plan, place, device)


def _device(place: Place) -> torch.device:
    """A GPU of this machine's for each of its ranks, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if place.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{place.local_world_size} ranks on this machine need as many GPUs, got {torch.cuda.device_count()}; "
            "start fewer, or train on CPUs with CUDA_VISIBLE_DEVICES="
        )
    return torch.device("cuda", place.local_rank)


def _run(plan: Plan, place: Place, device: torch.device) -> int:
    folder = plan.cfg.run.folder
    status = Status(folder / "status.json", place.rank)
    if place.rank == 0:
        status.path.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        resolved = f"# fingerprint {plan.fingerprint}\n{resolved_toml(plan.cfg)}"
        (folder / RESOLVED).write_text(resolved, encoding="utf-8")
    first = place.rank - place.local_rank
    with Watch(status, plan.cfg.train.hang_timeout) as watch:
        try:
            _prepare_torch(plan, place, device)
            ending = train(plan, device, watch, range(first, first + place.local_world_size))
        except BaseException as error:  # noqa: BLE001 - whatever ended this rank is shown and recorded
            error.add_note(f"on rank {place.rank} of {place.world_size}, in the step after step {watch.step}")
            traceback.print_exc()
            status.write(FAILED, f"{type(error).__name__}: {error}", watch.step)
            return FAILED
    if place.rank == 0:
        status.write(ending.exit_code, ending.reason, ending.step)
        print(_last_words(plan, ending), flush=True)
    if place.world_size > 1:
        dist.destroy_process_group()
    return ending.exit_code if place.rank == 0 else COMPLETE


def _prepare_torch(plan: Plan, place: Place, device: torch.device) -> None:
    """Threads, determinism, and the process group of a world of several ranks."""
    torch.set_num_threads(plan.cfg.train.threads)
    cuda = device.type == "cuda"
    torch.set_deterministic_debug_mode("warn" if cuda else "error")
    # else every new buffer is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if cuda:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # products add up in fp32
        torch.cuda.set_device(device)
    if place.world_size > 1:
        patience = timedelta(seconds=plan.cfg.train.hang_timeout + 30)  # the watch comes first: it says more
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=patience)


def _last_words(plan: Plan, ending: Ending) -> str:
    """What the run left and how to go on, for its user."""
    folder, pith = _shown(plan.cfg.run.folder), _shown(Path(sys.executable).with_name("pith"))
    newest = f"{CHECKPOINTS}/step-{ending.step:08d}"
    again = f"{pith} train {_shown(plan.cfg.run.folder / RESOLVED)} --nproc {prod(plan.shape)}"
    if plan.cfg.checkpoint.resume != "latest":
        again += " --set checkpoint.resume=latest"
    lines = [f"step {ending.step}: {ending.reason}"]
    if ending.validation_loss is not None:
        lines.append(f"loss on held-out data: {ending.validation_loss:.4f} nats a token")
        if plan.train.vocab_size <= 1024:
            lines[-1] += f" (bigram entropy of the training data: {bigram_entropy(plan.train):.4f})"
    if ending.skipped:
        lines.append(f"skipped so far: {ending.skipped} of {ending.step} steps had a loss or gradient norm not finite")
    lines += [
        f"run folder: {folder}",
        f"  {newest}  the model as a Hugging Face folder, and all a resume needs",
        f"  metrics.jsonl  every step     {RESOLVED}  the whole run file     status.json  how it ended",
        "what next:",
    ]
    if ending.skipped:
        lines.append(f"  {pith} skill run debug-nan {folder}  finds the first value that was not finite")
    if ending.exit_code == COMPLETE:
        lines.append(f"  {pith} export {_shown(plan.cfg.run.folder / newest)} OUT  the model alone")
        lines.append(f"  {again} --set train.steps={2 * ending.step}  train longer from here")
    else:
        lines.append(f"  {again}  goes on from the newest whole checkpoint")
    return "\n".join(lines)


def _shown(path: Path) -> str:
    """A path as one would type it here."""
    path = Path(os.path.normpath(path))
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
