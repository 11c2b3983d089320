"""`prepare`: text files become a dataset folder that is whole or absent.

Pieces are tokenized in processes and their tokens written in the order of the pieces, so the bytes do not
depend on the number of workers. Everything is written in a hidden folder beside `out` and published by one
rename.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pithtrain.data.index import VERSION, Index, check_sizes, read_index
from pithtrain.data.sources import Invalid, Piece, cut, digest, documents, find_files, read_piece
from pithtrain.data.tokenizer import Tokenizer, Tokens, open_tokenizer
from pithtrain.data.writing import SplitWriter, Tally

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DatasetInfo:
    """What `prepare` made, or found already made."""

    folder: Path
    created: bool  # False where the same dataset was there already and was left as it is
    train: Index
    validation: Index | None

    def __str__(self) -> str:
        verb = "prepared" if self.created else "already there, same inputs:"
        return "\n".join([f"{verb} {self.folder}", *(_describe(s) for s in (self.train, self.validation) if s)])


@dataclass(frozen=True)
class _Options:
    """All that decides the tokens beside the sources; sent to the workers."""

    tokenizer: Tokenizer
    holdout: float
    invalid: Invalid
    shard_tokens: int


@dataclass(frozen=True)
class _Result:
    digest: bytes
    splits: tuple[Tally, ...]  # in the order of SPLITS


def prepare(
    sources: Sequence[Path],
    out: Path,
    tokenizer: str = "bytes",
    workers: int = 1,
    suffixes: Sequence[str] = (".txt", ".jsonl"),
    progress: bool = False,
    holdout: float = 0.0,
    *,
    exclude: Sequence[str] = (),
    invalid: Invalid = "error",
    end_token: str | None = None,
    overwrite: bool = False,
    shard_tokens: int = 2**26,
) -> DatasetInfo:
    """Tokenizes `sources` into `out`/train, and into `out`/validation the documents held out.

    `tokenizer`: "bytes" or the path of a tokenizer.json, whose end of document is `end_token`. `holdout`: the
    share of documents held out, chosen by a hash of their name (a .jsonl line's name is the file's and its
    byte offset), in [0, 1). `exclude`: names of folders not to enter. `invalid`: what to do with a document
    that is not UTF-8. Empty documents are counted and left out.

    A whole dataset of the same inputs at `out` is left as it is; anything else there raises ValueError unless
    `overwrite`, which replaces a dataset and nothing else. A worker that dies raises BrokenProcessPool.
    """
    _check_arguments(workers, suffixes, holdout, shard_tokens)
    options = _Options(open_tokenizer(tokenizer, end_token), holdout, invalid, shard_tokens)
    tasks = cut(find_files(sources, suffixes, exclude))
    if _occupied(out) and not overwrite:
        return _existing(out, _inputs([_digest_task(task) for task in tasks], options))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{secrets.token_hex(8)}.tmp"
    try:
        inputs = _write(temporary, tasks, options, workers, progress)
        created = _publish(temporary, out, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return dataclasses.replace(_existing(out, inputs), created=created)


def _check_arguments(workers: int, suffixes: Sequence[str], holdout: float, shard_tokens: int) -> None:
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if isinstance(suffixes, str) or not suffixes or not all(s.startswith(".") for s in suffixes):
        raise ValueError(f"suffixes must be a list of endings such as ['.txt'], got {suffixes!r}")
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout must be a share of the documents in [0, 1), got {holdout}")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")


def _tokenize_task(task: Sequence[Piece], options: _Options) -> _Result:
    """Runs in a worker: reads, splits and tokenizes the pieces of one task."""
    encode = options.tokenizer.load()
    digests: list[bytes] = []
    tokens: list[list[Tokens]] = [[], []]
    counts = np.zeros((2, 3), dtype=np.int64)  # [split, (documents, empty, invalid)]
    for piece in task:
        begin, data = read_piece(piece)
        digests.append(digest(piece, begin, data))
        for document in documents(piece, begin, data, options.invalid):
            split = int(_fraction(document.key) < options.holdout)
            counts[split] += (bool(document.text), document.text == "", not document.is_valid)
            if document.text:
                tokens[split].append(encode(document.text))
    empty = np.empty(0, dtype=options.tokenizer.dtype)
    splits = (Tally(np.concatenate([empty, *tokens[s]]), *counts[s].tolist()) for s in range(2))
    return _Result(b"".join(digests), tuple(splits))


def _digest_task(task: Sequence[Piece]) -> bytes:
    return b"".join(digest(piece, *read_piece(piece)) for piece in task)


def _inputs(digests: Sequence[bytes], options: _Options) -> str:
    """One checksum over every source byte and every option that decides the tokens."""
    tokenizer = options.tokenizer
    recipe = [VERSION, tokenizer.sha256, tokenizer.end_of_document, options.holdout, options.invalid]
    recipe.append(options.shard_tokens)
    return hashlib.sha256(json.dumps(recipe).encode() + b"".join(digests)).hexdigest()


def _fraction(key: str) -> float:
    """A hash of `key` spread evenly over [0, 1)."""
    return int.from_bytes(hashlib.sha256(os.fsencode(key)).digest()[:6], "little") / 2**48


def _run(
    tasks: Sequence[Sequence[Piece]], job: Callable[[Sequence[Piece]], _Result], workers: int
) -> Iterator[_Result]:
    """Results in the order of `tasks`; at most two tasks a worker wait, so memory stays bounded."""
    if workers == 1 or len(tasks) == 1:
        yield from map(job, tasks)
        return
    waiting: deque[Future[_Result]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        for task in tasks:
            waiting.append(pool.submit(job, task))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _write(folder: Path, tasks: Sequence[Sequence[Piece]], options: _Options, workers: int, progress: bool) -> str:
    """Writes both splits into `folder`; returns the checksum of the inputs."""
    writers = [SplitWriter(folder / split, options.tokenizer, options.shard_tokens) for split in SPLITS]
    digests: list[bytes] = []
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not progress) as bar:
        line = bar.add_task("", total=sum(piece.stop - piece.start for task in tasks for piece in task))
        job = functools.partial(_tokenize_task, options=options)
        for task, result in zip(tasks, _run(tasks, job, workers), strict=True):
            digests.append(result.digest)
            for writer, tally in zip(writers, result.splits, strict=True):
                writer.add(tally)
            bar.advance(line, sum(piece.stop - piece.start for piece in task))
    inputs = _inputs(digests, options)
    wanted = writers if options.holdout else writers[:1]
    for writer in wanted:
        writer.finish(inputs)
    return inputs


def _occupied(out: Path) -> bool:
    """Whether something stands at `out`. ValueError where it is no dataset: only those are replaced."""
    if not out.exists():
        return False
    if not out.is_dir() or any(path.name not in SPLITS for path in out.iterdir()):
        raise ValueError(f"{out} is there and is not a token dataset; choose another place, it is never replaced")
    return any(out.iterdir())


def _existing(out: Path, inputs: str) -> DatasetInfo:
    """The dataset at `out` if it is whole and made from these inputs, else ValueError."""
    found: dict[str, Index] = {}
    try:
        for split in [split for split in SPLITS if split == "train" or (out / split).exists()]:
            found[split] = read_index(out / split)
            check_sizes(out / split, found[split])
    except ValueError as error:
        raise ValueError(f"{out} holds a damaged dataset: {error}, with overwrite to replace it") from None
    if any(index.inputs_sha256 != inputs for index in found.values()):
        raise ValueError(
            f"{out} holds a dataset made from other sources or options; choose another folder, or overwrite"
        )
    return DatasetInfo(out, False, found["train"], found.get("validation"))


def _publish(temporary: Path, out: Path, overwrite: bool) -> bool:
    """Renames the new dataset into place; False where another process published there in the meantime."""
    aside = temporary.with_suffix(".old")
    if overwrite and _occupied(out):
        os.rename(out, aside)
    try:
        os.rename(temporary, out)  # onto nothing or an empty folder; any other content makes it fail
        created = True
    except OSError:
        if not out.is_dir():
            if aside.is_dir():
                os.rename(aside, out)
            raise
        created = False
    shutil.rmtree(aside, ignore_errors=True)
    return created


def _describe(index: Index) -> str:
    extra = "".join(
        f", {count} {what}"
        for count, what in ((index.num_empty, "empty left out"), (index.num_invalid, "not valid UTF-8"))
        if count
    )
    return (
        f"  {index.split}: {index.num_tokens:,} tokens ({index.tokenizer}, vocabulary {index.vocab_size:,}), "
        f"{index.num_documents:,} documents, {len(index.shards)} shards{extra}"
    )
