"""pith spec"""

from typing import Annotated

import typer

app = typer.Typer(help="The contract in spec/: check it, or print the run file's schema.", no_args_is_help=True)


@app.command()
def check() -> None:
    """Check that spec/, code and tests agree.

    Statements and what they point to, the import rule, lines per room.

    Exit code: 0 when they do, 1 when something is wrong.
    """
    from typer_cli.checkout import use_checkout

    use_checkout()
    from spec.check import run

    raise typer.Exit(run())


@app.command()
def schema(
    write: Annotated[bool, typer.Option("--write", help="Write spec/run.schema.json instead of printing.")] = False,
) -> None:
    """Print the JSON schema of a run file.

    Every key, its type, its default and what it is.
    """
    import json

    from pithtrain.config import json_schema
    from typer_cli.checkout import use_checkout

    text = json.dumps(json_schema(), indent=2) + "\n"
    if write:
        (use_checkout() / "spec" / "run.schema.json").write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)
