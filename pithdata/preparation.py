"""`prepare`: text files become a dataset, written in a hidden folder beside `out` and published by one rename."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pithdata.sources import Document, Files, Invalid, documents, find_files
from pithdata.tokenizer import open_tokenizer
from pithdata.writer import SplitWriter
from pithtrain.data.index import FORMAT, Index, check_shards, read_index

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DatasetInfo:
    """What `prepare` made, or found already made."""

    folder: Path
    created: bool  # False where the same dataset was there already and was left as it is
    train: Index
    validation: Index | None = None

    def __str__(self) -> str:
        lines = [f"{'prepared' if self.created else 'already there, same inputs:'} {self.folder}"]
        for name, split in zip(SPLITS, (self.train, self.validation), strict=True):
            if split:
                lines.append(
                    f"  {name}: {split.num_tokens:,} tokens of {split.vocab_size:,} ({split.tokenizer}) in "
                    f"{len(split.shards)} shards; {split.num_documents:,} documents, left out: {split.num_empty:,} "
                    f"empty, {split.num_invalid:,} not valid UTF-8"
                )
        return "\n".join(lines)


def prepare(
    sources: Sequence[Path],
    out: Path,
    tokenizer: str = "bytes",
    *,
    suffixes: Sequence[str] = (".txt", ".jsonl"),
    exclude: Sequence[str] = (),
    holdout: float = 0.0,
    invalid: Invalid = "error",
    end_token: str | None = None,
    shard_tokens: int = 2**26,
    progress: bool = False,
) -> DatasetInfo:
    """Tokenizes `sources` into `out`/train, and into `out`/validation the documents held out.

    `tokenizer`, `end_token`: as in `open_tokenizer`; `suffixes`, `exclude`: as in `find_files`; `invalid`: as in
    `documents`. `holdout`: the share of documents held out, chosen by a hash of their keys, in [0, 1). Empty and
    invalid documents are left out and counted. A whole dataset of the same inputs at `out` is left as it is; anything
    else there raises ValueError and is never replaced.
    """
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout must be a share of the documents in [0, 1), got {holdout}")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    opened = open_tokenizer(tokenizer, end_token)
    files = find_files(sources, suffixes, exclude)
    recipe = [FORMAT, opened.sha256, opened.end_of_document, holdout, invalid, shard_tokens]
    inputs = hashlib.sha256(json.dumps(recipe).encode())
    found = _read(files, invalid, inputs, progress)
    splits = SPLITS if holdout else SPLITS[:1]
    created = False
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        for _ in found:
            pass
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(".tmp", f".{out.name}.", out.parent, ignore_cleanup_errors=True) as temporary:
            whole = Path(temporary, "whole")
            writers = [SplitWriter(whole / split, opened, shard_tokens) for split in splits]
            for document in found:
                spread = int.from_bytes(hashlib.sha256(os.fsencode(document.key)).digest()[:6], "little") / 2**48
                writers[int(spread < holdout)].add(document.text)
            for writer in writers:
                writer.finish(inputs.hexdigest())
            try:
                os.rename(whole, out)  # onto nothing or an empty folder; any other content makes it fail
                created = True
            except OSError:
                if not out.is_dir():
                    raise
    indices = [_check(out, split, inputs.hexdigest(), content=not created) for split in splits]
    return DatasetInfo(out, created, *indices)


def _read(files: Files, invalid: Invalid, inputs: "hashlib._Hash", progress: bool) -> Iterator[Document]:
    """The documents, each taken into `inputs` and shown as it passes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not progress) as bar:
        line = bar.add_task("", total=sum(path.stat().st_size for path, _ in files))
        for document in documents(files, invalid):
            inputs.update(hashlib.sha256(os.fsencode(document.key) + b"\0" + document.data).digest())
            yield document
            bar.advance(line, len(document.data))


def _check(out: Path, split: str, inputs: str, content: bool) -> Index:
    """The index of a split at `out` if it is whole and made from these inputs, else ValueError."""
    try:
        index = read_index(out / split)
        check_shards(out / split, index, content)
    except ValueError as error:
        raise ValueError(f"{out} is there, is not a whole dataset and is never replaced: {error}") from None
    if index.inputs_sha256 != inputs:
        raise ValueError(f"{out} was made from other sources or options; choose another folder, or remove it first")
    return index
