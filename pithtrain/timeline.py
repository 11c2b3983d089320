"""Timelines: what a rank did when, kept in memory for a step, written as a file a step and rank, merged for Perfetto.

On CUDA a time is that at which the compute stream gets there, by events that are read after the step. Ranks lie side by
side by the wall clock: that of one machine, or as well as the clocks of several agree.
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pithtrain.parallel.tape import Phase

Span = tuple[str, Phase, int, int]  # name, phase, start and end in nanoseconds
TIMELINE = "timeline"  # within a run folder
ROWS = ("steps", "compute", "waits", "communication")


class Recorder:
    """An `Observe` that notes when everything runs."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Phase, Any, Any]] = []

    def __call__(self, name: str, phase: Phase, run: Callable[[], Any], /) -> Any:
        start = self._mark()
        result = run()
        self._marks.append((name, phase, start, self._mark()))
        return result

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def write(self, run: Path, step: int, rank: int) -> None:
        """Writes this rank's file of a step into a run folder."""
        last = self._mark()
        if self._cuda:
            last.synchronize()
        now = time.time_ns()

        def at(mark: Any) -> Any:
            return now - (round(1e6 * mark.elapsed_time(last)) if self._cuda else last - mark)

        spans = [(name, phase, at(start), at(end)) for name, phase, start, end in self._marks]
        (run / TIMELINE).mkdir(parents=True, exist_ok=True)
        path = run / TIMELINE / f"step-{step:08d}.rank-{rank:05d}.json"
        path.write_text(json.dumps({"rank": rank, "spans": spans}))


def merge(run: Path) -> list[dict[str, Any]]:
    """Every rank's files as events of Chrome's trace format: a process a rank, a thread a row, microseconds."""
    ranks = defaultdict[int, list[Span]](list)
    for path in sorted((run / TIMELINE).glob("step-*.json")):
        file = json.loads(path.read_text())
        ranks[file["rank"]] += map(tuple, file["spans"])
    began = min((start for spans in ranks.values() for _, _, start, _ in spans), default=0)
    return [event for rank, spans in sorted(ranks.items()) for event in _events(rank, spans, began)]


def _events(rank: int, spans: list[Span], began: int) -> Iterator[dict[str, Any]]:
    """Exchanges under way at the same time take rows of their own."""
    ends: list[int] = []  # of each row of communication
    for start, minus_end, row, name in sorted((start, -end, row, name) for row, name, start, end in _rows(spans)):
        lane = 0
        if row == "communication":
            lane = next((i for i, end in enumerate(ends) if end <= start), len(ends))
            ends[lane : lane + 1] = [-minus_end]
        at = {"pid": rank, "tid": ROWS.index(row) + lane, "ts": (start - began) / 1e3}
        yield {"ph": "X", "name": name, "cat": row, **at, "dur": (-minus_end - start) / 1e3}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for thread, row in enumerate([*ROWS, *ROWS[-1:] * (len(ends) - 1)]):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": row}}


def _rows(spans: list[Span]) -> Iterator[tuple[str, str, int, int]]:
    """Row, name, start and end. An exchange lasts from its launch to the end of its wait, those of a name in order."""
    launched = defaultdict[str, deque[int]](deque)
    for name, phase, start, end in spans:
        match phase:
            case "action" | "step" | "host":
                yield "steps", name, start, end
            case "forward" | "backward":
                yield "compute", f"{name} {phase}", start, end
            case "launch":
                launched[name].append(start)
            case "wait":
                yield "waits", name, start, end
                yield "communication", name, launched[name].popleft() if launched[name] else start, end
