"""A schedule as a chart over time with its figures, or all of them in one table: what `pith schedule` prints."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from itertools import groupby, product
from pathlib import Path
from typing import cast, get_args

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pithtrain.parallel.pipeline.schedule import ScheduleKind, actions, make_schedule
from spec.simulate import Costs, Simulation, simulate

COLOURS = {
    "F": ("#8ab4f8", "#5a86d6"),
    "B": ("#81c995", "#4f9f68"),
    "I": ("#7fd8d8", "#4fa6a6"),
    "W": ("#fdd663", "#d1a52c"),
}
LABEL = 9  # characters before a chart's rows


def run(
    kind: str,
    pp: int | None,
    microbatches: int | None,
    chunks: int | None,
    forward: float,
    input_grad: float,
    weight_grad: float,
    transfer: float,
    exchange: float,
    svg: Path | None,
) -> None:
    """Prints the chart of `kind`, or the table of all kinds for "compare"; writes the picture to `svg` too.

    The times are of all of a rank's layers for one micro-batch. Raises ValueError for what cannot be shown.
    """
    kinds = (*get_args(ScheduleKind), "compare")
    if kind not in kinds:
        raise ValueError(f"schedule {kind}: no such schedule, expected one of {', '.join(kinds)}; choose one of them")
    if not exchange <= min(forward, input_grad) or forward + input_grad + weight_grad == 0:
        raise ValueError(
            f"costs: got an exchange of {exchange:g}, a forward of {forward:g}, an input gradient of {input_grad:g}, "
            "expected an exchange that is part of both, and not all 0; give a smaller --exchange or longer times"
        )
    if svg and not svg.absolute().parent.is_dir():
        raise ValueError(f"--svg {svg}: no folder {svg.absolute().parent}, expected one that is there; make it first")
    costs = Costs(forward, input_grad, weight_grad, transfer, exchange)
    if kind == "compare":
        numbers = (microbatches,) if microbatches else (8, 16, 32, 64)
        table = _comparison((pp,) if pp else (4, 8), numbers, chunks, costs)
        _show(lambda _: [table], kind, svg)
    else:
        made = make_schedule(cast(ScheduleKind, kind), pp or 4, microbatches or 16, chunks)
        simulation = simulate(made, _per_stage(costs, made.num_chunks))
        _show(lambda width: [*_chart(simulation, width), *_figures(simulation)], kind, svg)


def _show(draw: Callable[[int], Sequence[RenderableType]], kind: str, svg: Path | None) -> None:
    """Prints what `draw` makes for the terminal's width; the picture is as wide as it needs to be."""
    console = Console(highlight=False)
    console.print(*draw(console.width), sep="\n")
    if svg:
        parts = draw(10**6)
        width = max([100, *(len(part) for part in parts if isinstance(part, Text))])
        console = Console(
            record=True, file=StringIO(), width=width, force_terminal=True, color_system="truecolor", highlight=False
        )
        console.print(*parts, sep="\n")
        picture = console.export_svg(title=f"pith schedule {kind}")
        picture = re.sub(r"@font-face {.*?}", "", picture, flags=re.DOTALL)  # no font is fetched from elsewhere
        svg.write_text(picture, encoding="utf-8")


def _per_stage(costs: Costs, num_chunks: int) -> Costs:
    """A stage is one of its rank's `num_chunks` equal parts."""
    whole = (costs.forward, costs.input_grad, costs.weight_grad, costs.exchange)
    forward, input_grad, weight_grad, exchange = (cast(float, cost) / num_chunks for cost in whole)
    return Costs(forward, input_grad, weight_grad, costs.transfer, exchange)


def _chart(run: Simulation, width: int) -> list[Text]:
    """A row per rank, time to the right, in as many bands as the width asks for."""
    table = run.schedule
    least = min(span.end - span.start for row in run.spans for span in row if span.end > span.start)
    cell = 2 + len(str(table.num_microbatches - 1))
    scale = min(cell / least, 2 * cell / max(span.end - span.start for row in run.spans for span in row))
    rows = [_row(run, rank, scale) for rank in range(table.num_ranks)]
    columns = max(map(len, rows))
    band = max(cell, (width - LABEL) // cell * cell)
    lines = []
    for begin in range(0, columns, band):
        until = min(run.time, (begin + band) / scale)
        lines.append(Text(f"time {begin / scale:g} to {until:g} of {run.time:g}", style="dim"))
        lines += [Text(f"rank {rank:<3} ") + row[begin : begin + band] for rank, row in enumerate(rows)]
    legend = "F forward, B backward, I and W its input and weight gradient, with the micro-batch; idle is blank"
    if table.num_chunks > 1:
        legend += "; lower case: every second chunk of a rank"
    return [*lines, Text(legend, style="dim")]


def _row(run: Simulation, rank: int, scale: float) -> Text:
    line = Text()
    for step, span in zip(run.schedule.steps[rank], run.spans[rank], strict=True):
        begin, end = round(span.start * scale), round(span.end * scale)
        line.append(" " * (begin - len(line)))
        parts = actions(step)
        for number, action in enumerate(parts, start=1):
            late = action.stage // run.schedule.num_ranks % 2
            label = (action.kind.lower() if late else action.kind) + str(action.microbatch)
            room = begin + (end - begin) * number // len(parts) - len(line)
            line.append(label[:room].ljust(room), style=f"black on {COLOURS[action.kind][late]}")
    return line


def _figures(run: Simulation) -> list[str]:
    table = run.schedule
    path = []
    for rank, hop in groupby(run.critical_path, key=lambda place: place.rank):
        steps = [table.steps[rank][place.step] for place in hop]
        path.append(f"rank {rank} {steps[0]}" + (f" to {steps[-1]} ({len(steps)} steps)" if len(steps) > 1 else ""))
    unit = f" (of one stage and micro-batch; {table.num_chunks} stages on a rank)" if table.num_chunks > 1 else ""
    figures = [
        f"bubble: {run.bubble:.1%} of {table.num_ranks} ranks x time {run.time:g}",
        f"peak activations by rank: {' '.join(map(str, run.peak_activations))}{unit}",
        f"critical path, stage.micro-batch: {', '.join(path)}",
    ]
    return figures + ([f"note: {table.note}"] if table.note else [])


def _comparison(ranks: tuple[int, ...], microbatches: tuple[int, ...], chunks: int | None, costs: Costs) -> Table:
    table = Table(
        box=SIMPLE,
        padding=0,
        caption_justify="left",
        caption=f"times: forward {costs.forward:g}, input gradient {costs.input_grad:g}, weight gradient "
        f"{costs.weight_grad:g} of a rank's layers, message {costs.transfer:g}; overlapped: pairs hide an exchange of "
        f"{costs.exchange:g} in each half\npeak: activations of a rank's layers, for so many micro-batches\n"
        "* published for more micro-batches: what does not belong to these is left out",
    )
    names = ("ranks", "micro-\nbatches", "schedule", "bubble", "time", "overlapped:\nbubble", "\ntime", "peak")
    for name in names:
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for num_ranks, count in product(ranks, microbatches):
        for kind in get_args(ScheduleKind):
            made = make_schedule(kind, num_ranks, count, chunks if kind == "interleaved" else None)
            hidden = _per_stage(costs, made.num_chunks)
            runs = [simulate(made, each) for each in (replace(hidden, exchange=0.0), hidden)]
            figures = [text for run in runs for text in (f"{run.bubble:.1%}", f"{run.time:.2f}")]
            peak = max(runs[0].peak_activations) / made.num_chunks
            table.add_row(str(num_ranks), str(count), kind + "*" * bool(made.note), *figures, f"{peak:g}")
        table.add_section()
    return table
