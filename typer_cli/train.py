"""pith train"""

from pathlib import Path
from typing import Annotated

import typer

SET = typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the run file: --set optim.lr=1e-4")
NPROC = typer.Option(
    "--nproc", metavar="N", min=1, show_default=False, help="Processes. Default: what the mesh asks for."
)
DRY_RUN = typer.Option("--dry-run", help="Check the run and print what it would be; train nothing.")


def train(
    run: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    overrides: Annotated[list[str] | None, SET] = None,
    nproc: Annotated[int | None, NPROC] = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
) -> None:
    """Train the model that RUN.toml describes.

    Starts torchrun on this machine. Ctrl-C or SIGTERM finishes the step, saves a checkpoint and ends; the
    same command then goes on from there. Exit code: 0 when the run is complete, 2 when it is refused, else
    what status.json in the run folder says.
    """
    from pithtrain.config import check_files, load, refusal, resolve_mesh, smallest_world
    from typer_cli.launch import launch

    cfg = load(run, overrides or ())
    world_size = nproc or smallest_world(cfg.mesh)
    resolve_mesh(cfg.mesh, world_size)
    if problems := check_files(cfg):
        raise ValueError(refusal(str(run), problems))
    if dry_run:
        from pithtrain.train import dry_run as describe

        typer.echo(describe(cfg, world_size))
        return
    arguments = [str(run), *(f"--set={override}" for override in overrides or ())]
    status = cfg.run.folder / "status.json"
    raise typer.Exit(launch(arguments, world_size, status, cfg.train.threads, cfg.train.hang_timeout))
