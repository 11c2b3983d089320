"""What a run of a skill came to: for people, and as JSON."""

import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, SerializeAsAny

from skills.frame.contract import Missing, Result
from skills.frame.landing import Change

Status = Literal["done", "dry run", "failed", "precondition missing", "bad parameters", "interrupted"]
CODES: dict[Status, int] = {
    "done": 0,
    "dry run": 0,
    "failed": 1,
    "precondition missing": 2,
    "bad parameters": 3,
    "interrupted": 130,
}
DIFF_LINES = 200  # of each file, for people; the whole diff is in a file


class Report(BaseModel):
    """Filled in while the run goes on; until it says otherwise, the run has failed."""

    skill: str
    status: Status = "failed"
    params: dict[str, Any] = {}
    missing: list[Missing] = []
    failures: list[str] = ["the skill broke off; stderr has the traceback. Nothing was changed."]
    changes: dict[str, str] = {}
    diff: str = ""
    """Of a dry run, with at most DIFF_LINES lines of each file; the whole is in change.diff."""
    result: SerializeAsAny[Result] | None = None
    out: Path | None = None
    """The folder of this run's results: result.json, and change.diff where files change."""
    seconds: float = 0.0

    def end(self, status: Status, *failures: str) -> int:
        """Sets the status and what failed; returns the exit code."""
        self.status, self.failures = status, list(failures)
        return CODES[status]

    def miss(self, missing: list[Missing]) -> int:
        """Ends for want of preconditions."""
        self.missing = missing
        return self.end("precondition missing")

    def note(self, changes: list[Change]) -> None:
        self.changes = {change.path: change.kind for change in changes}

    def as_json(self) -> str:
        return json.dumps({"exit_code": CODES[self.status], **self.model_dump(mode="json")}, indent=1)

    def lines(self) -> list[str]:
        """The short summary: on stdout where the run is done, else on stderr."""
        lines = [f"{self.skill}: {self.status} ({self.seconds:.1f} s)"]
        lines += [f"missing: {row.what}\n  remedy: {row.remedy}" for row in self.missing]
        lines += self.failures
        if self.status in ("done", "dry run"):
            lines += [f"  {kind:8} {path}" for path, kind in self.changes.items()]
        lines += [self.diff] if self.diff else []
        lines += [f"results: {self.out}"] if self.out is not None else []
        if self.result is not None and self.status in ("done", "dry run"):
            lines.append(self.result.summary() if self.status == "done" else self.result.outlook())
        return lines

    def show(self, as_json: bool, start: float) -> None:
        """Prints the report, and keeps it as result.json among the run's results."""
        self.seconds = round(time.monotonic() - start, 3)
        if self.out is not None:
            (self.out / "result.json").write_text(self.as_json() + "\n", encoding="utf-8")
        if as_json:
            print(self.as_json(), flush=True)
        else:
            print("\n".join(self.lines()), file=sys.stdout if CODES[self.status] == 0 else sys.stderr, flush=True)


def shortened(diff: str) -> str:
    """A diff with at most DIFF_LINES of each file; of a new file of JSON its path and length."""
    files = ("\n" + diff).split("\ndiff --git ")[1:]
    shown = []
    for text in files:
        lines = ("diff --git " + text).splitlines()
        if lines[1].startswith("new file") and lines[0].endswith(".json"):
            added = sum(line.startswith("+") for line in lines) - 1  # one is the header's
            shown.append(f"{lines[0].rpartition(' b/')[2]}: new, {added} lines")
            continue
        left = len(lines) - DIFF_LINES
        shown += lines[:DIFF_LINES] + ([f"... {left} more lines of this file"] if left > 0 else [])
    return "\n".join(shown)
