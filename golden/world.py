"""Small worlds on one machine: a function run by N ranks over gloo, in processes forked from a server that has torch.

For verification, tests and skills; training itself is started by torchrun. A world costs about a tenth of a second
after the first. It cannot hang: it ends with the first rank's failure, or at its time limit, and both show what every
rank printed.
"""

import contextlib
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

# each rank would import the first again, and torch the last at the first backward pass, for most of a second
PRELOAD = ("__main__", "pithtrain.step", "torch.fx.experimental.symbolic_shapes")


class WorldError(RuntimeError):
    """A rank failed, died or did not finish in time. The message holds every rank's output."""


def run_world(
    world_size: int, function: Callable[..., Result], *args: Any, seconds: float = 120, preload: Sequence[str] = ()
) -> list[Result]:
    """function(*args) on every rank of a gloo world, torch on one thread: its results by rank.

    function and args are pickled; preload names modules the server should have imported already. Raises WorldError.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(context, rank, world_size, Path(folder), function, args) for rank in range(world_size)]
        try:
            return _collect(ranks, time.monotonic() + seconds, Path(folder))
        finally:
            for process, pipe in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
                pipe.close()


def _start(
    context: Any, rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(rank, world_size, folder, function, args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _collect(ranks: list[tuple[Any, Connection]], deadline: float, folder: Path) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {pipe.fileno(): rank for rank, (_, pipe) in enumerate(ranks) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorldError(f"ranks {sorted(waiting.values())} did not finish in time\n{_outputs(folder)}")
        for rank in sorted(rank for file, rank in waiting.items() if file in ready):
            try:
                succeeded, value = ranks[rank][1].recv()
            except EOFError:
                succeeded, value = False, "died without a word"
            if not succeeded:
                raise WorldError(f"rank {rank}: {value}\n{_outputs(folder)}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _outputs(folder: Path) -> str:
    parts = [f"--- rank {path.stem} ---\n{path.read_text(errors='replace')}" for path in sorted(folder.glob("*.out"))]
    return "\n".join(parts)


def _rank_main(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection
) -> None:
    with open(folder / f"{rank}.out", "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        try:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            result = function(*args)
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - whatever ended this rank is reported to the one who waits
            traceback.print_exc()
            with contextlib.suppress(OSError):
                pipe.send((False, f"{type(error).__name__}: {error}"))
            os._exit(1)
        pipe.send((True, result))
        pipe.close()
