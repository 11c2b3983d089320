"""The `pith` command. Sub-commands import in their bodies what they call, so `pith --help` is quick."""

import sys

import typer

from typer_cli import bench, data, export, mutants, ops, schedule, skill, spec, timeline, train, verify

app = typer.Typer(
    help="Train Mixture-of-Experts language models, and prove that the trainer is right.",
    epilog="Start with: make train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.add_typer(data.app, name="data")
app.command("export")(export.export)
app.command("verify")(verify.verify)
app.command("mutants")(mutants.mutants)
app.command("schedule")(schedule.schedule)
app.command("timeline")(timeline.timeline)
app.command("ops")(ops.ops)
app.command("bench")(bench.bench)
app.add_typer(spec.app, name="spec")
app.add_typer(skill.app, name="skill")


def main() -> None:
    """Runs `pith`. A ValueError is the user's to mend: its message goes to stderr, and the exit code is 2."""
    try:
        app()
    except ValueError as error:
        sys.stderr.write(f"pith: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
