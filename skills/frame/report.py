"""What a run of a skill came to: for people, and as JSON."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import BaseModel, Field

from skills.frame.contract import Missing, Result

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
    result: dict[str, Any] | None = None
    summary: str = Field(default="", exclude=True)
    """The result in words."""
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

    def take(self, result: Result, *, dry_run: bool = False) -> None:
        """Keeps a result as values and in words: before anything lands, since that is the skill's code."""
        self.result, self.summary = result.model_dump(mode="json"), result.outlook() if dry_run else result.summary()

    def as_json(self) -> str:
        fields = {"exit_code": CODES[self.status], **self.model_dump(mode="json")}
        fields |= {"params": _finite(self.params), "result": _finite(self.result), "changes": self.changes}
        return json.dumps(fields, indent=1, allow_nan=False)

    def lines(self) -> list[str]:
        """The short summary: on stdout where the run is done, else on stderr."""
        lines = [f"{self.skill}: {self.status} ({self.seconds:.1f} s)"]
        lines += [f"missing: {row.what}\n  remedy: {row.remedy}" for row in self.missing]
        lines += self.failures
        if self.status in ("done", "dry run"):
            lines += [f"  {kind:8} {_printable(path)}" for path, kind in self.changes.items()]
        lines += [self.diff] if self.diff else []
        lines += [f"results: {self.out}"] if self.out is not None else []
        return lines + [self.summary] * (self.result is not None and self.status in ("done", "dry run"))

    def show(self, as_json: bool, start: float) -> None:
        """Prints the report, and keeps it as result.json among the run's results."""
        self.seconds = round(time.monotonic() - start, 3)
        problems = self._keep()
        text, stream = self.as_json(), sys.stdout
        if not as_json:
            text, stream = "\n".join(self.lines()), sys.stdout if CODES[self.status] == 0 else sys.stderr
        problems += _put(text, stream)
        for problem in problems:
            _put(problem, sys.stderr)

    def _keep(self) -> list[str]:
        try:
            if self.out is not None:
                (self.out / "result.json").write_text(self.as_json() + "\n", encoding="utf-8")
        except OSError as error:
            return [f"result.json was not kept: {error}"]
        return []


def _put(text: str, stream: TextIO) -> list[str]:
    """Prints what the stream can show of a text; why it could not, if it could not."""
    try:
        encoding = "utf-8" if stream is None else stream.encoding  # None: it was closed before Python began
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that Python can end without trying again
        return [f"the report was not printed: {error}"]
    return []


def _finite(value: Any) -> Any:
    """A JSON value with texts in place of the floats that JSON does not have."""
    match value:
        case dict():
            return {key: _finite(part) for key, part in value.items()}
        case list():
            return [_finite(part) for part in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _printable(path: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


def shortened(diff: str) -> str:
    """A diff with at most DIFF_LINES of each file; of a new file of JSON its path and length."""
    files = ("\n" + diff.removesuffix("\n")).split("\ndiff --git ")[1:]
    shown = []
    for text in files:
        lines = ("diff --git " + text).split("\n")
        if lines[1].startswith("new file") and lines[0].endswith(".json"):
            added = sum(line.startswith("+") and not line.startswith("+++ ") for line in lines)
            shown.append(f"{lines[0].rpartition(' b/')[2]}: new, {added} lines")
            continue
        left = len(lines) - DIFF_LINES
        shown += lines[:DIFF_LINES] + ([f"... {left} more lines of this file"] if left > 0 else [])
    return "\n".join(shown)
