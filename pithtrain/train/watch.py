"""What runs beside the loop: stop signals, dead and hung ranks, and status.json, which says how the run ended.

torchrun sends SIGTERM to every rank both when someone stops the run and when one rank has died. A rank that waits for
a dead one cannot act on it, so a thread looks after the others: gloo notices a closed connection by itself, NCCL does
not.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
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

    def write(self, exit_code: int, reason: str, step: int) -> None:
        """Records how this rank ended, at once and whole; a failure never takes another's place."""
        failed = exit_code in (FAILED, HUNG)
        record = {"exit_code": exit_code, "reason": f"rank {self.rank}: {reason}" if failed else reason, "step": step}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_name(f".{self.path.name}.{self.rank}")
        written.write_text(json.dumps(record) + "\n", encoding="utf-8")
        if failed:
            with suppress(FileExistsError):
                os.link(written, self.path)
            written.unlink()
        else:
            os.replace(written, self.path)


class Watch:
    """Notes SIGTERM and SIGINT, and ends this rank if a peer died or nothing moved for `seconds`. Use as a context."""

    def __init__(self, status: Status, seconds: float) -> None:
        self.status, self.seconds = status, seconds
        self.stop_signal = ""  # the name of the last stop signal
        self.step = 0  # the last that ended
        self.peers: dict[int, int] = {}  # rank -> process id, of the others on this machine
        self.moved()
        self._closed = threading.Event()
        self._handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._look_after, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._handlers = {signum: signal.signal(signum, self._note) for signum in (signal.SIGTERM, signal.SIGINT)}
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def moved(self) -> None:
        """The run is alive."""
        self._moved = time.monotonic()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.stop_signal = signal.Signals(signum).name

    def _look_after(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if time.monotonic() - self._moved > self.seconds:
                self._end(HUNG, f"no step, evaluation or checkpoint ended within train.hang_timeout = {self.seconds} s")
            dead = [rank for rank, pid in self.peers.items() if not _is_alive(pid)]
            if dead and not self._closed.wait(LAST_WORDS_SECONDS):
                self._end(FAILED, f"rank {dead[0]} died; this rank was waiting for it or still in its step")

    def _end(self, exit_code: int, reason: str) -> None:
        print(f"rank {self.status.rank}: {reason}; it was here:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        self.status.write(exit_code, reason, self.step)
        os._exit(exit_code)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # no such process, or by now another user's
        return False
    return True
