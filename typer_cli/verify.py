"""pith verify"""

from typing import Annotated

import typer

CASE = typer.Option("--case", metavar="NAME", help="Only this case; may be given again. Default: all.")
UPDATE = typer.Option("--update", help="Write what was computed as the new traces; needs --reason.")
REASON = typer.Option("--reason", show_default=False, help="Why the traces change; kept in them.")


def verify(
    cases: Annotated[list[str] | None, CASE] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    update: Annotated[bool, UPDATE] = False,
    reason: Annotated[str | None, REASON] = None,
) -> None:
    """Replay the golden traces and compare.

    Prints a table and names the first field and step that differ. Exit code: 0 when all agree, 1 when
    something differs, 2 when it could not check.
    """
    from typer_cli.checkout import use_checkout

    use_checkout()
    from golden.verify import run

    raise typer.Exit(run(cases=cases or [], json=json, update=update, reason=reason))
