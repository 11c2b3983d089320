"""pith skill"""

import json
import sys
from typing import Annotated

import typer

from typer_cli.checkout import use_checkout

app = typer.Typer(help="Procedures with a contract: list, read, run, check them.", no_args_is_help=True)

NAME = typer.Argument(metavar="NAME", help="A skill, as `pith skill list` shows it.")
WORDS = typer.Argument(metavar="NAME [ARG]", help="A skill, then its own arguments; NAME --help shows them.")
NAMES = typer.Argument(metavar="[NAME]...", show_default="all", help="Skills.")
JSON = typer.Option("--json", help="Print JSON: description, and schemas of parameters and result.")
# What follows NAME is read by the skill's own parser, --help included.
RAW = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}


def _enter() -> None:
    """Goes to the checkout, and first finishes or undoes what a killed run may have left there."""
    root = use_checkout()
    from skills.frame.staging import recover

    if told := recover(root):
        sys.stderr.write(f"{told}\n")


@app.command("list")
def list_skills() -> None:
    """List the skills of this checkout, and what each is for."""
    _enter()
    from skills.frame.catalog import show_list

    show_list()


@app.command()
def show(name: Annotated[str, NAME], json: Annotated[bool, JSON] = False) -> None:
    """Print a skill's page, then its arguments."""
    _enter()
    from skills.frame.catalog import show_skill

    show_skill(name, json)


@app.command(context_settings=RAW)
def run(context: typer.Context, words: Annotated[list[str] | None, WORDS] = None) -> None:
    """Run a skill.

    Every skill takes --dry-run and --json; its files land together, or none. Exit code: 0 done, 1 failed and rolled
    back, 2 precondition missing, 3 bad parameters, 130 interrupted.
    """
    rest = list(words or [])
    name = next((word for word in rest if not word.startswith("-")), None)
    if name is None and ("--json" not in rest or "--help" in rest):
        typer.echo(context.get_help())
        raise typer.Exit(0 if "--help" in rest else 3)
    if name is not None:
        rest.remove(name)
    try:
        use_checkout()
    except ValueError as error:
        if "--json" in rest:
            report = {"exit_code": 2, "skill": name, "status": "precondition missing", "failures": [str(error)]}
            typer.echo(json.dumps(report, indent=1))
        raise
    from skills.frame.running import main

    raise typer.Exit(main(name or "", rest))


@app.command()
def check(context: typer.Context, names: Annotated[list[str] | None, NAMES] = None) -> None:
    """Prove skills: page, paths, commands and symbols, a dry run, own tests.

    Exit code: 0 when all hold, 1 when something is wrong.
    """
    _enter()
    from skills.frame.checking import run as run_checks

    raise typer.Exit(run_checks(context.find_root().command, names or []))
