"""What runs beside the loop: stop signals, dead and hung ranks, and status.json, which says how the run ended.

torchrun sends SIGTERM to every rank both when someone stops the run and when one rank has died. A rank that waits for
a dead one cannot act on it, so a thread looks after the others: gloo notices a closed connection by itself, NCCL does
not.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

COMPLETE, FAILED, REFUSED, NONFINITE, HUNG, STOPPED = 0, 1, 2, 3, 4, 75

POLL_SECONDS = 0.5
LAST_WORDS_SECONDS = 3.0  # what a rank whose peer died has to fail by itself, with its own traceback


@dataclass(frozen=True)
class Status:
    """`path` holds {"exit_code", "reason", "step"}: of a failure, the first that any rank met."""

    path: Path
    rank: int

    def clear(self) -> None:
        """Forgets how an earlier run in this folder ended."""
        self.path.unlink(missing_ok=True)

    def write(self, exit_code: int, reason: str, step: int) -> None:
        os.replace(self._written(exit_code, reason, step), self.path)

    def fail(self, exit_code: int, reason: str, step: int) -> None:
        """Records a failure unless another rank has recorded one."""
        written = self._written(exit_code, f"rank {self.rank}: {reason}", step)
        try:
            os.link(written, self.path)
        except FileExistsError:
            pass
        finally:
            written.unlink()

    def _written(self, exit_code: int, reason: str, step: int) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        path = self.path.with_name(f".{self.path.name}.{self.rank}")
        path.write_text(json.dumps({"exit_code": exit_code, "reason": reason, "step": step}) + "\n", encoding="utf-8")
        return path


def own_address() -> tuple[int, int]:
    """(machine, process id) of this rank. Ranks on one machine, in one process namespace, have one machine number."""
    namespace = Path("/proc/self/ns/pid")
    machine = f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"
    return zlib.crc32(machine.encode()), os.getpid()


class Watch:
    """Notes SIGTERM and SIGINT, and ends this rank if a peer died or nothing moved for `seconds`. Use as a context."""

    def __init__(self, status: Status, seconds: float) -> None:
        self.status, self.seconds = status, seconds
        self.stop_signal = ""  # the name of the last stop signal
        self.step = 0
        self._moved = time.monotonic()
        self._peers: dict[int, int] = {}  # rank -> process id, of those on this machine
        self._closed = threading.Event()
        self._handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._look_after, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._handlers = {signum: signal.signal(signum, self._note) for signum in (signal.SIGTERM, signal.SIGINT)}
        self.moved()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def moved(self, step: int | None = None) -> None:
        """The run is alive; at `step`, where given."""
        self.step = self.step if step is None else step
        self._moved = time.monotonic()

    def look_after(self, addresses: list[tuple[int, int]]) -> None:
        """From now on ends this rank when one on its machine dies. addresses: every rank's `own_address`."""
        machine, pid = own_address()
        self._peers = {rank: p for rank, (m, p) in enumerate(addresses) if m == machine and p != pid}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.stop_signal = signal.Signals(signum).name

    def _look_after(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if time.monotonic() - self._moved > self.seconds:
                self._end(HUNG, f"no step, evaluation or checkpoint ended within train.hang_timeout = {self.seconds} s")
            dead = [rank for rank, pid in self._peers.items() if not _is_alive(pid)]
            if dead and not self._closed.wait(LAST_WORDS_SECONDS):
                self._end(FAILED, f"rank {dead[0]} died; this rank was waiting for it or still in its step")

    def _end(self, exit_code: int, reason: str) -> None:
        print(f"rank {self.status.rank}: {reason}; it was here:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        self.status.fail(exit_code, reason, self.step)
        os._exit(exit_code)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
