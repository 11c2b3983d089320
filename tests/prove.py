"""What takes longer than `make test` allows: long tests and every planted bug. `make prove` runs this.

An interrupted run goes on where it stopped, as long as the commit is the same. The outcome goes to PROOF.md, with the
commit it was reached on; commit that file with the change it proves.
"""

import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from io import StringIO

from rich.console import Console

from spec.document import read
from tests.mutants import runner

ROOT = runner.ROOT
REPORT = ROOT / "PROOF.md"
STATE = ROOT / "runs" / "prove" / "state.json"


def long_tests(commit: str) -> str:
    """The summary line of the long tests; run again unless they passed on this commit."""
    if STATE.is_file():
        kept = json.loads(STATE.read_text())
        if kept["commit"] == commit:
            return str(kept["summary"])
    command = [sys.executable, "-m", "pytest", "-m", "prove", "-q"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    summary = done.stdout.strip().splitlines()[-1].strip("= ")
    if done.returncode:
        raise SystemExit(f"the long tests failed: {summary}")
    STATE.parent.mkdir(parents=True, exist_ok=True)
    STATE.write_text(json.dumps({"commit": commit, "summary": summary}))
    return summary


def report(commit: str, summary: str, minutes: float) -> str:
    """PROOF.md: what ran, on which commit, and what came of it."""
    mutants, verdicts = read(ROOT).mutants, runner.kept(commit)
    text = StringIO()
    Console(file=text, width=140).print(runner.table(mutants, verdicts))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return "\n".join(
        [
            "# Proof",
            "",
            "Written by `make prove`; not by hand.",
            "",
            f"- commit: {commit}",
            f"- date: {time.strftime('%Y-%m-%d', time.gmtime())}",
            f"- Python {platform.python_version()}, {versions}, CPU",
            f"- long tests: {summary}",
            f"- planted bugs: {runner.score(verdicts)}",
            f"- minutes, this run: {minutes:.0f}",
            "",
            "```",
            text.getvalue().rstrip(),
            "```",
            "",
        ]
    )


def main() -> int:
    """Runs everything that is left, writes the report, and returns 0 when all held."""
    start, commit = time.monotonic(), runner.commit()
    summary = long_tests(commit)
    code = runner.run(resume=True)
    if code != 2:
        REPORT.write_text(report(commit, summary, (time.monotonic() - start) / 60))
        print(f"wrote {REPORT.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
