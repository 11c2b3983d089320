"""Where the steps of a skill work, and how they start other processes."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from skills.frame import supervise

TAIL = 2000  # characters of a failed command's output that are shown


@dataclass(frozen=True)
class Workspace:
    """A tree to work in and a folder for results.

    root: the checkout, or the copy of it that a skill which `writes` works in.
    out: the folder of this run's results, runs/skills/<name>/<time> in the checkout; git ignores it. It exists.
    held: file descriptors that stay open until every process started here is gone.
    """

    root: Path
    out: Path
    held: tuple[int, ...] = ()

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        print(text, file=sys.stderr, flush=True)

    def run(self, *command: str, seconds: float) -> "subprocess.CompletedProcess[str]":
        """Runs `python -m COMMAND...` in `root`, whose packages come first, and waits; its output is captured.

        It ends, with all that it started, when `seconds` are over (returncode 124, and stderr says so), when it
        returns, and when this process ends in whatever way. A skill starts no process in another way. OpenMP takes one
        thread, unless the environment says otherwise: tests and small runs are slower with more.
        """
        own = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
        lifeline, ours = os.pipe()
        with subprocess.Popen(
            [sys.executable, "-I", supervise.__file__, str(seconds), str(lifeline), sys.executable, "-m", *command],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(lifeline, *self.held),
            start_new_session=True,
        ) as supervisor:
            os.close(lifeline)
            try:
                stdout, stderr = supervisor.communicate()
            finally:  # interrupted or not: once the lifeline is closed, the supervisor ends all and returns
                os.close(ours)
                supervisor.wait()
        return subprocess.CompletedProcess(command, supervisor.returncode, stdout, stderr)

    def failures(self, *command: str, seconds: float) -> list[str]:
        """Runs a command as `run` does; empty when it returned 0, else what it said last: a postcondition."""
        done = self.run(*command, seconds=seconds)
        said = (done.stdout + done.stderr).strip()[-TAIL:]
        return [f"`{' '.join(command)}` returned {done.returncode}, expected 0:\n{said}"] if done.returncode else []
