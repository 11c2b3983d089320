"""The packages type-check: a test, to take its turn among the workers, as long as the longest of them."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_mypy_is_content() -> None:
    command = [sys.executable, "-m", "mypy"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
