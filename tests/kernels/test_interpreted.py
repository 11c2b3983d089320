"""Runs the tests of `interpreted/` in one process of their own, in which Triton interprets its kernels."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    files = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
    report = tmp_path / "report.xml"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.kernels.mending"]
    done = subprocess.run(
        [*pytest, f"--junitxml={report}", *map(str, files)],
        cwd=FOLDER.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {case.attrib["classname"].rpartition(".")[2] for case in ET.parse(report).iter("testcase")}
    assert ran == {path.stem for path in files}
