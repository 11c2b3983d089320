"""pith mutants"""

from typing import Annotated

import typer

ONLY = typer.Option("--only", metavar="ID", help="Only this bug; may be given again. Default: all.")
RESUME = typer.Option("--resume", help="Go on with an interrupted run: skip what it has judged on this commit.")


def mutants(
    only: Annotated[list[str] | None, ONLY] = None,
    resume: Annotated[bool, RESUME] = False,
) -> None:
    """Plant each known bug in turn and check that something catches it.

    Works on a copy of the checkout. Exit code: 0 when every bug is caught, 1 when one survives.
    """
    from typer_cli.checkout import use_checkout

    use_checkout()
    from tests.mutants.runner import run

    raise typer.Exit(run(only=only or [], resume=resume))
