"""pith ops"""

from typing import Annotated

import typer

TOKENS = typer.Option("--tokens", metavar="N", min=1, help="Tokens of a micro-batch.")
HIDDEN = typer.Option("--hidden", metavar="N", min=1, help="Hidden size.")
EXPERT_HIDDEN = typer.Option("--expert-hidden", metavar="N", min=1, help="Hidden size of an expert.")
EXPERTS = typer.Option("--experts", metavar="N", min=1, help="Experts of a layer.")
TOP_K = typer.Option("--top-k", metavar="N", min=1, help="Experts of a token.")


def ops(
    tokens: Annotated[int, TOKENS] = 16384,
    hidden: Annotated[int, HIDDEN] = 2048,
    expert_hidden: Annotated[int, EXPERT_HIDDEN] = 768,
    experts: Annotated[int, EXPERTS] = 128,
    top_k: Annotated[int, TOP_K] = 8,
) -> None:
    """Show every operator with a kernel: what the kernel takes on each GPU, and what the operator costs.

    Kernels are compiled here, without a GPU, as they are launched. Costs of products are of the experts' first (hidden
    to twice the expert hidden size), others of one layer or of the loss; times are computed from data sheets, not
    measured.
    """
    from importlib.util import find_spec

    from rich.console import Console

    from typer_cli.checkout import use_checkout

    root = use_checkout()
    if find_spec("triton") is None:
        raise ValueError("pith ops: got no module triton, expected one to compile kernels with; run it on Linux")
    from spec.kernels import Shape, cost_table, name_table, resource_table

    console = Console(highlight=False)
    console.print(name_table(), resource_table(root / "runs" / "kernels"), sep="\n")
    console.print(cost_table(Shape(tokens, hidden, expert_hidden, experts, top_k)))
