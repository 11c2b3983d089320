"""pith bench"""

from typing import Annotated

import typer

ROUNDS = typer.Option("--rounds", metavar="N", min=1, help="Timed rounds of each trainer, in turn.")
THREADS = typer.Option("--threads", metavar="N", min=1, help="CPU threads; may be given again.")


def bench(
    rounds: Annotated[int, ROUNDS] = 15,
    threads: Annotated[list[int], THREADS] = [1, 2],  # noqa: B006  typer copies it
) -> None:
    """Time a training step against the same model in transformers.

    Same weights, same batches, losses compared; prints medians, spread and ratio.
    """
    from typer_cli.checkout import use_checkout

    use_checkout()
    from golden.bench import run

    raise typer.Exit(run(rounds=rounds, threads=threads))
