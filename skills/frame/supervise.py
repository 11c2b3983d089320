"""Runs a command and leaves nothing of it behind: `supervise.py SECONDS LIFELINE COMMAND...`.

LIFELINE is the reading end of a pipe whose other end the process that wants the command holds: it closes when that
process ends, be it by kill -9. The command's descendants are found by their parents, so a session of their own does
not hide them; on Linux orphans come back here, so neither does a parent's death. Only the standard library is imported.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

TIMED_OUT = 124
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GLANCE = 0.02  # seconds between two looks at the command


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _parents() -> Iterator[tuple[int, int]]:
    """(process, its parent) of all processes."""
    if Path("/proc/self/stat").is_file():
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            yield int(folder.name), int(fields[1])
    else:
        table = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        for line in table.splitlines():
            pid, parent = line.split()
            yield int(pid), int(parent)


def descendants(ancestor: int) -> set[int]:
    """Processes below `ancestor`, ended ones that nobody has waited for included."""
    pairs, found = list(_parents()), {ancestor}
    while more := {pid for pid, parent in pairs if parent in found} - found:
        found |= more
    return found - {ancestor}


def end_all(patience: float = 10) -> None:
    """Kills every descendant of this process, again until none is left, at most `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def supervise(seconds: float, lifeline: int, command: list[str]) -> int:
    """The command's exit code, 128 + N where signal N ended it, or TIMED_OUT."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    deadline = time.monotonic() + seconds
    child = subprocess.Popen(command, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    while child.poll() is None and time.monotonic() < deadline:
        if select.select([lifeline], [], [], _GLANCE)[0]:
            break
    code = child.returncode
    end_all()
    if code is None:
        print(f"no answer within {seconds:g} s: ended", file=sys.stderr, flush=True)
        return TIMED_OUT
    return code if code >= 0 else 128 - code


def _stay(signum: int, frame: FrameType | None) -> None:
    """Signals are for the command's owner; the lifeline tells of its end."""


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stay)
    seconds, lifeline, *command = sys.argv[1:]
    sys.exit(supervise(float(seconds), int(lifeline), command))


if __name__ == "__main__":
    main()
