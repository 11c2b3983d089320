"""pith schedule"""

from pathlib import Path
from typing import Annotated

import typer

KIND = typer.Argument(metavar="KIND", help="1f1b, interleaved, zbv or dualpipev; or compare: all of them in one table.")
PP = typer.Option("--pp", metavar="N", min=1, show_default="4; compare: 4, 8", help="Ranks of the pipeline.")
MICROBATCHES = typer.Option(
    "--microbatches", metavar="N", min=1, show_default="16; compare: 8, 16, 32, 64", help="Micro-batches of a step."
)
CHUNKS = typer.Option(
    "--chunks", metavar="N", min=1, show_default="2", help="Stages on each rank, for interleaved; others have theirs."
)
FORWARD = typer.Option("--forward", min=0, help="Time of the forward of all of a rank's layers, for one micro-batch.")
INPUT_GRAD = typer.Option("--input-grad", min=0, help="Time of their input gradients.")
WEIGHT_GRAD = typer.Option("--weight-grad", min=0, help="Time of their weight gradients.")
TRANSFER = typer.Option("--transfer", min=0, help="Time of one message between two ranks of the pipeline.")
EXCHANGE = typer.Option(
    "--exchange", min=0, help="Of a forward, and of an input gradient, what a pair can hide: exchanges between experts."
)
SVG = typer.Option("--svg", metavar="FILE", show_default=False, help="Also write the picture to this file.")


def schedule(
    kind: Annotated[str, KIND],
    pp: Annotated[int | None, PP] = None,
    microbatches: Annotated[int | None, MICROBATCHES] = None,
    chunks: Annotated[int | None, CHUNKS] = None,
    forward: Annotated[float, FORWARD] = 1.0,
    input_grad: Annotated[float, INPUT_GRAD] = 1.0,
    weight_grad: Annotated[float, WEIGHT_GRAD] = 1.0,
    transfer: Annotated[float, TRANSFER] = 0.0,
    exchange: Annotated[float, EXCHANGE] = 0.5,
    svg: Annotated[Path | None, SVG] = None,
) -> None:
    """Show a pipeline schedule as a chart over time.

    With it the share of time in which ranks are idle (bubble), how many stages' activations a rank keeps at most,
    and the critical path, all for the times given.
    """
    from typer_cli.checkout import use_checkout

    use_checkout()
    from spec.chart import run

    run(kind, pp, microbatches, chunks, forward, input_grad, weight_grad, transfer, exchange, svg)
