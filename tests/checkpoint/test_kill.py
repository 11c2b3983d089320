"""kill -9 at every point of a save where it could matter leaves a whole checkpoint to resume from."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from pithtrain.checkpoint import ONE_RANK, latest
from pithtrain.checkpoint.folder import step_folders, verify
from tests.checkpoint.fakes import save

_POINTS = ("fsync", "rename", "unlink", "rmdir")


def _arm(countdown: int) -> None:
    """From now on the countdown-th call of one of these system functions kills this process instead.

    A file about to be made durable is cut in half first, as if the kill had come while it was written.
    """
    left = [countdown]

    def deadly(name: str):
        real = getattr(os, name)

        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if name == "fsync" and stat.S_ISREG(os.fstat(args[0]).st_mode):
                    os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in _POINTS:
        setattr(os, name, deadly(name))


def in_child(body: Callable[[], object]) -> int:
    """The wait status of a forked process that runs `body`."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def sweep(folder: Path, step: int) -> int:
    """Save `step` (seed 2) over and over beside step 1 (seed 1), killed one call later each time; the kills.

    After each kill one of the two must be there, and nothing but whole checkpoints under a checkpoint's name;
    the next save cleans up.
    """
    first = save(folder / "first", 1, seed=1, max_file_bytes=200_000)
    second = save(folder / "second", step, seed=2, max_file_bytes=200_000)
    manifests = [(path / "pith/manifest.json").read_bytes() for path in (first, second)]
    for kills in range(1000):
        here = folder / f"kill-{kills}"
        shutil.copytree(first, here / first.name)

        def killed(here: Path = here, countdown: int = kills + 1) -> None:
            _arm(countdown)
            save(here, step, seed=2, keep=1, max_file_bytes=200_000)

        status = in_child(killed)
        assert status in (0, signal.SIGKILL), status
        path, _ = latest(here)
        assert path is not None, f"nothing whole is left after the kill at call {kills + 1}"
        assert (path / "pith/manifest.json").read_bytes() in manifests
        for left in step_folders(here):
            verify(left, ONE_RANK)  # no partial folder has a step's name
        if status == 0:
            assert [p.name for p in here.iterdir()] == [second.name] and path.name == second.name
            return kills
        if kills % 4 == 0:
            assert in_child(lambda here=here: save(here, 3, keep=1)) == 0
            assert [p.name for p in here.iterdir()] == ["step-00000003"]
    raise AssertionError("the save never came to its end")


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.prove)])
def test_every_kill_leaves_a_whole_checkpoint(tmp_path, step):
    command = [
        sys.executable,
        "-c",
        f"from tests.checkpoint.test_kill import *; print(sweep(Path({str(tmp_path)!r}), {step}))",
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 20
