"""README's commands work as written: in order, in a copy of the checkout. `make test` is left out, it is this run;
`make train` takes a few steps only, and `pith verify` one case, since tests/golden replays them all.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.runner import ROOT, copy_tree

FEW_STEPS = "--set train.steps=3 --set schedule.warmup_steps=1 --set schedule.decay_steps=1 --set train.eval_batches=1"


def readme_commands() -> list[str]:
    """What stands in README's sh blocks, one command a line, continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return "".join(blocks).replace("\\\n", " ").splitlines()


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    commands = readme_commands()
    assert {"make train", "make test"} <= set(commands) and len(commands) >= 8
    copy_tree(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MAKEFLAGS": "", "COLUMNS": "100"}
    for command in commands:
        if command == "make test":
            continue
        if command == "make train":  # the environment is the one this test runs in: not made again
            command = f"make -o .venv/.installed train ARGS='{FEW_STEPS}'"
        if command.endswith("/pith verify"):
            command += " --case base"
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
