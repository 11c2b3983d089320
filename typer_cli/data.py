"""pith data"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Prepare token datasets.", no_args_is_help=True)

SOURCES = typer.Argument(help="Folders (searched by --suffix), .txt or .jsonl files.")
OUT = typer.Option("--out", metavar="DIR", help="Folder to make: DIR/train, and DIR/validation with --holdout.")
TOKENIZER = typer.Option("--tokenizer", help='"bytes" (257 tokens), or the path of a tokenizer.json.')
END_TOKEN = typer.Option("--end-token", show_default="<|endoftext|>", help="End of document in that tokenizer.json.")
HOLDOUT = typer.Option("--holdout", min=0.0, max=1.0, help="Share of the documents held out for validation.")
SUFFIX = typer.Option("--suffix", help="Ending of the files to take; may be given again.")
EXCLUDE = typer.Option("--exclude", metavar="NAME", help="Folder not to enter; may be given again.")
INVALID = typer.Option("--invalid", help="What to do with a document that is not UTF-8.")


@app.command()
def prepare(
    sources: Annotated[list[Path], SOURCES],
    out: Annotated[Path, OUT],
    tokenizer: Annotated[str, TOKENIZER] = "bytes",
    end_token: Annotated[str | None, END_TOKEN] = None,
    holdout: Annotated[float, HOLDOUT] = 0.0,
    suffix: Annotated[list[str], SUFFIX] = [".txt", ".jsonl"],  # noqa: B006  typer copies it
    exclude: Annotated[list[str] | None, EXCLUDE] = None,
    invalid: Annotated[Literal["error", "skip"], INVALID] = "error",
) -> None:
    """Turn text into token shards.

    A whole dataset of the same inputs is left as it is; nothing else in DIR is ever replaced.
    """
    from pithdata import prepare as prepare_dataset

    info = prepare_dataset(
        sources,
        out,
        tokenizer=tokenizer,
        suffixes=suffix,
        progress=sys.stderr.isatty(),
        holdout=holdout,
        exclude=exclude or (),
        invalid=invalid,
        end_token=end_token,
    )
    typer.echo(str(info))
