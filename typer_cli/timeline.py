"""pith timeline"""

from pathlib import Path
from typing import Annotated

import typer

OUT = typer.Option("--out", metavar="FILE", show_default="RUN/timeline.json", help="The file to write.")


def timeline(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with run.timeline_steps above 0.")],
    out: Annotated[Path | None, OUT] = None,
) -> None:
    """Join what the ranks of a run recorded into one file for Perfetto.

    Prints the share of its time that each rank spent in compute, in waits for others, and elsewhere.
    """
    import json

    from pithtrain.timeline import merge

    if not (events := merge(run)):
        raise ValueError(
            f"{run}: no step recorded there, expected one or more; train with --set run.timeline_steps=1 or "
            "more, and at least one step longer: the first one of a start is left out"
        )
    out = out or run / "timeline.json"
    out.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    spans = [event for event in events if event["ph"] == "X"]
    ranks = sorted({span["pid"] for span in spans})
    steps = len({span["name"] for span in spans if span["cat"] == "steps" and span["name"].startswith("step ")})
    typer.echo(f"{out}: {len(spans)} spans of {len(ranks)} ranks in {steps} steps; open it at https://ui.perfetto.dev")
    typer.echo("\nrank  compute  waits  other")
    for rank in ranks:
        own = [span for span in spans if span["pid"] == rank]
        time = max(span["ts"] + span["dur"] for span in own) - min(span["ts"] for span in own)
        compute, waits = (sum(s["dur"] for s in own if s["cat"] == row) / time for row in ("compute", "waits"))
        typer.echo(f"{rank:>4}  {compute:>7.1%}  {waits:>5.1%}  {1 - compute - waits:>5.1%}")
