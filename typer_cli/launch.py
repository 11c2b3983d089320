"""Runs one process per rank under torchrun as a child, passes signals on, and finds the run's exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType


def launch(arguments: Sequence[str], num_processes: int, status: Path, threads: int, grace: int) -> int:
    """Runs `python -m pithtrain.train ARGUMENTS` in `num_processes` ranks here; returns the exit code.

    SIGTERM and SIGINT are passed on; the ranks then have `grace` seconds to end before torchrun kills them.
    `status`: the file in which the run leaves its exit code (see `exit_code`); an earlier run's is removed.
    """
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
    ]
    # torchrun reads these: its wait after a signal, and the threads per rank (it warns where they are unset).
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace), "OMP_NUM_THREADS": str(threads)}
    status.unlink(missing_ok=True)
    # A session of its own, or Ctrl-C would reach torchrun twice: from the terminal and from here.
    child = subprocess.Popen([*torchrun, "-m", "pithtrain.train", *arguments], env=environment, start_new_session=True)
    return exit_code(wait(child), status)


def wait(child: "subprocess.Popen[bytes]") -> int:
    """Waits for `child`, passing SIGTERM and SIGINT on; its return code is -N if signal N killed it."""

    def forward(signum: int, frame: FrameType | None) -> None:
        child.send_signal(signum)

    before = {signum: signal.signal(signum, forward) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        return child.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def exit_code(returncode: int, status: Path) -> int:
    """The code that the run asks for under "exit_code" in its status file.

    torchrun itself knows only success and failure. Where the run left no code, or left success although
    torchrun failed, it is torchrun's: 128 + N if signal N killed it.
    """
    asked = json.loads(status.read_text(encoding="utf-8")).get("exit_code") if status.is_file() else None
    own = returncode if returncode >= 0 else 128 - returncode
    return asked if isinstance(asked, int) and (asked or not own) else own
