"""pith export"""

from pathlib import Path
from typing import Annotated

import typer

DROP_BIASES = typer.Option("--drop-biases", help="Leave routing biases behind; the model then routes without them.")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, as in RUN/checkpoints/step-00000100.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    drop_biases: Annotated[bool, DROP_BIASES] = False,
) -> None:
    """Copy a checkpoint as a plain Hugging Face model folder.

    Says what of the checkpoint the model family cannot express, or refuses.
    """
    from pithtrain.checkpoint import export as export_checkpoint

    typer.echo(export_checkpoint(checkpoint, out, drop_biases=drop_biases))
