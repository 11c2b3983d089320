"""What the device script says: rows of sections, each section a process of its own with a time limit.

A card's fault ends the process that made it, so a section that fails, hangs or dies costs the others nothing. The
parent never touches the card, which is what lets its forks do so. Rows arrive as they are made: a section that is
ended keeps those it had.
"""

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

Status = Literal["ok", "failed", "measured", "not run"]
SHARE = 0.8  # of a section's time, after which it starts no further case; at the whole of it the process is killed


@dataclass(frozen=True)
class Row:
    """One result. ok, failed: of a check; measured: a figure without a verdict; not run: the note says why."""

    name: str
    status: Status
    figures: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Shape:
    """Sizes that kernels are measured at: a layer of experts, and the vocabulary."""

    tokens: int
    hidden: int
    expert_hidden: int
    experts: int
    top_k: int
    vocabulary: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


QWEN3_30B_A3B = Shape(16384, 2048, 768, 128, 8, 151936)
SMALL = Shape(24, 128, 64, 4, 2, 256)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a section runs. deadline: by time.monotonic. found: the rows of the sections before it, by section."""

    device: torch.device
    small: bool
    deadline: float
    found: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return SMALL if self.small else QWEN3_30B_A3B

    def rate(self, name: str) -> float | None:
        """A rate that the card's section measured (bytes/s or FLOP/s), None where it has none."""
        return next((row.figures["rate"] for row in self.found.get("card", ()) if row.name == name), None)


Case = tuple[str, Callable[[], Iterable[Row]]]
Function = Callable[[Place], Iterator[Row]]


@dataclass(frozen=True)
class Section:
    """seconds: the most it may take."""

    name: str
    seconds: float
    function: Function


def judged(name: str, case: str, ratio: float, bound: float, note: str = "") -> Row:
    """A check: `ratio`, the largest seen, is at most `bound`. NaN is not."""
    return Row(name, "ok" if ratio <= bound else "failed", {"case": case, "largest": ratio, "bound": bound}, note)


def each(place: Place, cases: Iterable[Case]) -> Iterator[Row]:
    """The rows of every case; one that raises, or comes too late, is a failed row, and the next one starts."""
    for name, case in cases:
        if time.monotonic() > place.deadline:
            yield Row(name, "failed", note="out of time: never started")
            continue
        try:
            yield from case()
        except Exception:  # noqa: BLE001 - whatever a case raised is its result
            yield Row(name, "failed", note=traceback.format_exc())


def run_section(section: Section, device: torch.device, small: bool, found: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The section's rows, from a process of its own, which is gone afterwards with all it started."""
    started = time.monotonic()
    place = Place(device, small, started + SHARE * section.seconds, found)
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(section, place, theirs))
    process.start()
    theirs.close()
    rows, problem = _collect(ours, started + section.seconds)
    if not rows and not problem:
        problem = "the section said nothing"
    if problem:
        process.join(1)  # gives a process that died the time to say of what
        rows.append(Row(section.name, "failed", note=f"{problem}; exit code {process.exitcode}"))
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return rows


def _collect(pipe: Connection, deadline: float) -> tuple[list[Row], str]:
    """Rows until the section's end, and what went wrong."""
    rows: list[Row] = []
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        try:
            row = pipe.recv()
        except EOFError:
            return rows, "the section's process died"
        if row is None:
            return rows, ""
        rows.append(row)
    return rows, "out of time: ended"


def _child(section: Section, place: Place, pipe: Connection) -> None:
    os.setsid()
    try:
        for row in section.function(place):
            pipe.send(row)
    except Exception:  # noqa: BLE001 - reported to the parent
        pipe.send(Row(section.name, "failed", note=traceback.format_exc()))
    pipe.send(None)


def table(found: Mapping[str, Sequence[Row]]) -> str:
    """All rows as text, a block a section, a column a figure."""
    blocks = []
    for section, rows in found.items():
        names = list(dict.fromkeys(name for row in rows for name in row.figures))
        cells = [[section, "status", *names, ""]]
        for row in rows:
            last = row.note.strip().splitlines()[-1] if row.note.strip() else ""
            cells.append([row.name, row.status, *(_shown(row.figures.get(name)) for name in names), last])
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]) - 1)]
        lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(line, [*widths, 0], strict=True)) for line in cells)
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
