"""`pith verify`: replays the golden cases on one rank and on meshes, compares, and says what differs.

A case's one-rank trace is compared with its file, all steps; every other layout with the first steps of the one-rank
trace of the same run, so that a change of the arithmetic shows once and a fault of a mesh shows where it is. What the
first step cost (matrix products, values rounded to bf16 and FP8, memory, collectives) is compared with the file.
"""

import json as jsonlib
import math
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from golden import trace
from golden.cases import LAYOUT_STEPS, Case, Layout, select
from golden.compare import BANDS, SAME, Band, Difference, compare, compare_costs
from golden.replay import replay_layouts
from golden.trace import Golden, Trace, TraceError
from golden.world import WorldError, run_world

AGREE, DIFFER, COULD_NOT_CHECK = 0, 1, 2
WORLD_SECONDS = 300  # a world takes about one on an idle machine; a crowded one is no difference
PRELOAD = ("golden.replay", "torch._dynamo")  # the second for counting: seconds in every rank otherwise
SPEC = Path(__file__).parents[1] / "spec"
Item = tuple[Case, Layout]
Replayed = dict[Item, Trace | str]  # the trace, or why there is none


@dataclass(frozen=True)
class Verdict:
    """One row of the table. error: why it could not be checked."""

    case: str
    layout: str
    num_steps: int = 0
    largest: float = 0.0
    differences: tuple[Difference, ...] = ()
    error: str | None = None

    @property
    def word(self) -> str:
        return "could not check" if self.error else "differs" if self.differences else "same"


def exit_code(verdicts: Sequence[Verdict]) -> int:
    if any(verdict.differences for verdict in verdicts):
        return DIFFER
    return COULD_NOT_CHECK if any(verdict.error for verdict in verdicts) else AGREE


def worlds(cases: Sequence[Case]) -> Iterator[tuple[list[Item], int]]:
    """(what runs in one world, for how many steps): each one-rank trace alone, layouts by their mesh."""
    by_mesh: dict[str, list[Item]] = {}
    for case in cases:
        for layout in case.layouts:
            by_mesh.setdefault(layout.mesh, []).append((case, layout))
    for items in sorted(by_mesh.values(), key=lambda items: -items[0][1].world_size):
        yield items, LAYOUT_STEPS
    for case in cases:
        yield [(case, case.one_rank)], case.steps


def replay_all(cases: Sequence[Case]) -> Replayed:
    """Every layout of every case, two worlds at a time."""
    replayed: Replayed = {}
    with ThreadPoolExecutor(2) as pool:
        for part in pool.map(lambda world: replay_world(*world), list(worlds(cases))):
            replayed |= part
    return replayed


def replay_world(items: list[Item], num_steps: int) -> Replayed:
    """Replays items in one world; the rank that ended it is named where it failed."""
    size = items[0][1].world_size
    with tempfile.TemporaryDirectory() as folder:
        job = (tuple(items), num_steps, Path(folder))
        try:
            traces = run_world(size, replay_layouts, *job, seconds=WORLD_SECONDS, preload=PRELOAD)[0]
        except WorldError as error:
            return dict.fromkeys(items, str(error))
    return dict(zip(items, traces, strict=True))


def run(
    cases: list[str],
    json: bool = False,
    update: bool = False,
    reason: str | None = None,
    folder: Path = trace.FOLDER,
    replay: Callable[[Sequence[Case]], Replayed] = replay_all,
) -> int:
    """Checks (or, with `update`, rewrites) the named cases' traces, all when none is named; prints what it found.

    Returns 0 when all agree, 1 on a difference, 2 when something could not be checked and nothing differs.
    """
    start, console = time.perf_counter(), Console(highlight=False)
    try:
        chosen = select(cases)
        if update and not (reason or "").strip():
            raise ValueError('--update needs a reason, kept in the traces; add --reason "..."')
        replayed = replay(chosen)
        verdicts = [verdict for case in chosen for verdict in judge(case, replayed, None if update else folder)]
        code = exit_code(verdicts)
        written = write(chosen, replayed, str(reason), folder) if update and code == AGREE else []
    except (ValueError, OSError) as error:
        console.print(f"pith verify: {error}", style="red", markup=False, soft_wrap=True)
        return COULD_NOT_CHECK
    except Exception:  # noqa: BLE001 - whatever went wrong, nothing was checked, and exit code 1 would say otherwise
        console.print(traceback.format_exc(), style="red", markup=False, soft_wrap=True)
        return COULD_NOT_CHECK
    seconds = time.perf_counter() - start
    if json:
        print(jsonlib.dumps(as_json(verdicts, code, seconds), indent=1, allow_nan=False))
    else:
        show(console, verdicts, seconds)
        for path in written:
            console.print(f"wrote {path}", markup=False)
        if update and code != AGREE:
            console.print("Nothing was written: every layout must agree with one rank first.", style="red")
    return code


def judge(case: Case, replayed: Replayed, folder: Path | None) -> Iterator[Verdict]:
    """The verdict on one rank, against the file in `folder`, then on each layout. folder None: layouts alone."""
    golden: Golden | None = None
    if folder is not None:
        try:
            golden = read_golden(case, folder)
        except TraceError as error:
            yield Verdict(case.name, str(case.one_rank), error=str(error))
        else:
            yield judge_one(case.one_rank, replayed[case, case.one_rank], golden)
    for layout in case.layouts:
        yield judge_layout(case, layout, replayed, golden)


def judge_one(layout: Layout, got: Trace | str, golden: Golden) -> Verdict:
    """One rank against the file, every step."""
    if isinstance(got, str):
        return Verdict(golden.trace.case, str(layout), error=got)
    found, costs = compare(golden.trace, got), compare_costs(golden, str(layout), got.costs)
    return Verdict(golden.trace.case, str(layout), found.num_steps, found.largest, (*found.differences, *costs))


def references(case: Case, layout: Layout) -> Iterator[tuple[Layout, int, Band]]:
    """What a layout is compared with, over how many of its first steps, and how closely: one rank in fp32; and in a
    lower precision, whose gradient norms drift with the weights and have a band in the first step alone, one rank in
    the same, where no token's sum is rounded on several ranks and no weight rounded since.
    """
    band = BANDS[layout.precision]
    if layout.precision == "fp32":
        yield case.one_rank, LAYOUT_STEPS, band
        return
    yield case.one_rank, 1, band
    yield case.one_rank, LAYOUT_STEPS, replace(band, norms=math.inf)
    if layout.ep == 1:
        yield replace(case.one_rank, precision=layout.precision), 1, SAME


def judge_layout(case: Case, layout: Layout, replayed: Replayed, golden: Golden | None) -> Verdict:
    """golden None: costs are not compared."""
    got, name = replayed[case, layout], str(layout)
    if isinstance(got, str):
        return Verdict(case.name, name, error=got)
    num_steps, largest, differences = 0, 0.0, list[Difference]()
    for reference, steps, band in references(case, layout):
        expected = replayed[case, reference]
        if isinstance(expected, str):
            return Verdict(case.name, name, error=f"{reference} gave no trace to compare with: {expected}")
        found = compare(expected, got, steps, band)
        num_steps, largest = max(num_steps, found.num_steps), max(found.largest, largest)
        differences += found.differences
    costs = () if golden is None else compare_costs(golden, name, got.costs)
    return Verdict(case.name, name, num_steps, largest, (*differences, *costs))


def read_golden(case: Case, folder: Path) -> Golden:
    """The case's file. TraceError when it is of another configuration than the case now has."""
    golden = trace.read(case.name, folder)
    if golden.trace.fingerprint != case.fingerprint():
        raise TraceError(
            f"{trace.path_of(case.name, folder)}: made for another configuration (fingerprint "
            f"{golden.trace.fingerprint[:12]}, the case has {case.fingerprint()[:12]}); {trace.REMEDY}"
        )
    return golden


def write(cases: Sequence[Case], replayed: Replayed, reason: str, folder: Path) -> list[Path]:
    """Every case's file anew, its history kept and `reason` added. Each file is whole or as it was."""
    paths = []
    for case in cases:
        layouts = (case.one_rank, *case.layouts)
        costs = {str(layout): got.costs for layout in layouts if isinstance(got := replayed[case, layout], Trace)}
        one = replayed[case, case.one_rank]
        assert isinstance(one, Trace)
        golden = Golden(one, costs, provenance(case), (*history(case, folder), entry(reason)))
        path = trace.path_of(case.name, folder)
        draft = path.with_suffix(".tmp")
        draft.write_text(trace.to_text(golden))
        os.replace(draft, path)
        paths.append(path)
    return paths


def history(case: Case, folder: Path) -> tuple[dict[str, str], ...]:
    return trace.read(case.name, folder).history if trace.path_of(case.name, folder).exists() else ()


def entry(reason: str) -> dict[str, str]:
    return {"date": time.strftime("%Y-%m-%d", time.gmtime()), "reason": reason.strip()}


def provenance(case: Case) -> dict[str, Any]:
    """What the trace was made with and from. `spec` is a digest of the statements and reference equations."""
    files = sorted([*SPEC.glob("*.toml"), *SPEC.glob("reference/*.py")])
    return {
        "command": f'pith verify --update --case {case.name} --reason "..."',
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, fp32",
        "spec": sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
        "config": case.config(),
    }


def as_json(verdicts: Sequence[Verdict], code: int, seconds: float) -> dict[str, Any]:
    """What `--json` prints. Numbers that JSON lacks are written as words."""
    results = [asdict(verdict) | {"verdict": verdict.word} for verdict in verdicts]
    values: dict[str, Any] = jsonlib.loads(jsonlib.dumps(results, default=str), parse_constant=str)
    return {"exit_code": code, "seconds": round(seconds, 2), "results": values}


def show(console: Console, verdicts: Sequence[Verdict], seconds: float) -> None:
    table = Table("case", "layout", "steps", "largest difference", "verdict")
    for verdict in verdicts:
        largest = "" if verdict.error else f"{verdict.largest:.1e}"
        style = "green" if verdict.word == "same" else "red"
        table.add_row(verdict.case, verdict.layout, str(verdict.num_steps), largest, f"[{style}]{verdict.word}[/]")
    console.print(table)
    for verdict in verdicts:
        where = f"{verdict.case}, {verdict.layout}"
        if verdict.error:
            console.print(f"{where}: {verdict.error}", style="red", markup=False, soft_wrap=True)
        elif verdict.differences:
            first, number = verdict.differences[0], len(verdict.differences)
            console.print(f"{where}: first of {number} differing: {first}", markup=False, soft_wrap=True)
    console.print(f"{len(verdicts)} layouts checked in {seconds:.1f} s")
