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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pithtrain.data.index import VERSION, Index, SplitWriter, check_shards, read_index
from pithtrain.data.sources import Invalid, Piece, cut, documents, find_files, read_piece
from pithtrain.data.tokenizer import Tokenizer, Tokens, open_tokenizer

SPLITS = ("train", "validation")
Task = tuple[Piece, ...]


@dataclass(frozen=True)
class DatasetInfo:
    """What `prepare` made, or found already made."""

    folder: Path
    created: bool  # False where the same dataset was there already and was left as it is
    train: Index
    validation: Index | None

    def __str__(self) -> str:
        verb = "prepared" if self.created else "already there, same inputs:"
        return "\n  ".join([f"{verb} {self.folder}", *(str(split) for split in (self.train, self.validation) if split)])


@dataclass(frozen=True)
class _Options:
    """All that decides the tokens beside the sources; sent to the workers."""

    tokenizer: Tokenizer
    holdout: float
    invalid: Invalid
    shard_tokens: int


@dataclass(frozen=True)
class _Result:
    """What a worker makes of one task; each pair is (train, validation)."""

    digest: bytes
    tokens: tuple[Tokens, Tokens]
    counts: NDArray[np.int64]  # [2, 3]: documents, empty ones, invalid ones


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
    if not 0 <= holdout < 1:
        raise ValueError(f"holdout must be a share of the documents in [0, 1), got {holdout}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    options = _Options(open_tokenizer(tokenizer, end_token), holdout, invalid, shard_tokens)
    tasks = cut(find_files(sources, suffixes, exclude))
    if _occupied(out) and not overwrite:
        return _existing(out, _inputs((read_piece(piece)[2] for task in tasks for piece in task), options), holdout)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{secrets.token_hex(8)}.tmp"
    try:
        inputs = _write(temporary, tasks, options, workers, progress)
        created = _publish(temporary, out, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return dataclasses.replace(_existing(out, inputs, holdout), created=created)


def _tokenize_task(task: Task, options: _Options) -> _Result:
    """Runs in a worker: reads, splits and tokenizes the pieces of one task."""
    encode = options.tokenizer.load()
    digests: list[bytes] = []
    empty = np.empty(0, dtype=options.tokenizer.dtype)
    tokens = ([empty], [empty])
    counts = np.zeros((2, 3), dtype=np.int64)
    for piece in task:
        begin, data, digest = read_piece(piece)
        digests.append(digest)
        for document in documents(piece, begin, data, options.invalid):
            split = int(_fraction(document.key) < options.holdout)
            counts[split] += (bool(document.text), document.text == "", not document.is_valid)
            if document.text:
                tokens[split].append(encode(document.text))
    return _Result(b"".join(digests), (np.concatenate(tokens[0]), np.concatenate(tokens[1])), counts)


def _inputs(digests: Iterable[bytes], options: _Options) -> str:
    """One checksum over every source byte and every option that decides the tokens."""
    recipe = [VERSION, options.tokenizer.sha256, options.tokenizer.end_of_document]
    recipe += [options.holdout, options.invalid, options.shard_tokens]
    return hashlib.sha256(json.dumps(recipe).encode() + b"".join(digests)).hexdigest()


def _fraction(key: str) -> float:
    """A hash of `key` spread evenly over [0, 1)."""
    return int.from_bytes(hashlib.sha256(os.fsencode(key)).digest()[:6], "little") / 2**48


def _run(tasks: Sequence[Task], job: Callable[[Task], _Result], workers: int) -> Iterator[_Result]:
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


def _write(folder: Path, tasks: Sequence[Task], options: _Options, workers: int, progress: bool) -> str:
    """Writes both splits into `folder`; returns the checksum of the inputs."""
    writers = [SplitWriter(folder / split, options.tokenizer, options.shard_tokens) for split in SPLITS]
    counts = np.zeros((2, 3), dtype=np.int64)
    digests: list[bytes] = []
    sizes = [sum(piece.stop - piece.start for piece in task) for task in tasks]
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not progress) as bar:
        line = bar.add_task("", total=sum(sizes))
        results = _run(tasks, functools.partial(_tokenize_task, options=options), workers)
        for result, size in zip(results, sizes, strict=True):
            digests.append(result.digest)
            counts += result.counts
            for writer, tokens in zip(writers, result.tokens, strict=True):
                writer.add(tokens)
            bar.advance(line, size)
    inputs = _inputs(digests, options)
    writers[0].finish(inputs, *counts[0].tolist())
    if options.holdout:
        writers[1].finish(inputs, *counts[1].tolist())
    return inputs


def _occupied(out: Path) -> bool:
    """Whether something stands at `out`. ValueError where it is no dataset: only those are replaced."""
    if not out.exists():
        return False
    if not out.is_dir() or any(path.name not in SPLITS for path in out.iterdir()):
        raise ValueError(f"{out} is there and is not a token dataset; choose another place, it is never replaced")
    return any(out.iterdir())


def _existing(out: Path, inputs: str, holdout: float) -> DatasetInfo:
    """The dataset at `out` if it is whole and made from these inputs, else ValueError."""
    found: list[Index] = []
    for split in SPLITS if holdout else SPLITS[:1]:
        try:
            found.append(read_index(out / split))
            check_shards(out / split, found[-1])
        except ValueError as error:
            raise ValueError(f"{out} holds a damaged dataset: {error}, with overwrite to replace it") from None
        if found[-1].inputs_sha256 != inputs:
            raise ValueError(f"{out} was made from other sources or options; choose another folder, or overwrite")
    return DatasetInfo(out, False, found[0], found[1] if holdout else None)


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
