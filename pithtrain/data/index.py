"""What a prepared folder looks like on disk: its index read and checked, a split written.

    <out>/train/index.json         format, tokenizer, counts, and each shard's size and checksum
    <out>/train/shard-00000.bin    token ids, little endian, uint16 where the vocabulary fits, else uint32
    <out>/validation/...           the same, only where some documents were held out

The index holds a checksum of itself, so any change to it is noticed; no time, path or worker count is in it,
so the same inputs give the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pithtrain.data.tokenizer import Tokenizer, Tokens

FORMAT = "pith-tokens"
VERSION = 1
INDEX_NAME = "index.json"
REMEDY = "prepare the dataset again with `pith data prepare`"


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    file: str
    num_tokens: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """Everything a reader must know of one split; written as index.json beside the shards."""

    split: str
    dtype: str  # "uint16" or "uint32", little endian
    vocab_size: int
    end_of_document: int  # the token written after every document
    tokenizer: str  # "bytes", or the name of the tokenizer file
    tokenizer_sha256: str
    inputs_sha256: str  # every source byte and every option that decides the tokens
    num_tokens: int
    num_documents: int
    num_empty: int  # documents without text, left out
    num_invalid: int  # documents not valid UTF-8, replaced or skipped as asked
    shards: tuple[Shard, ...]

    def __str__(self) -> str:
        return (
            f"{self.split}: {self.num_tokens:,} tokens of {self.vocab_size:,} ({self.tokenizer}) in "
            f"{len(self.shards)} shards; {self.num_documents:,} documents, {self.num_empty:,} empty ones left out, "
            f"{self.num_invalid:,} not valid UTF-8"
        )


def read_index(folder: Path) -> Index:
    """Reads and checks `folder`/index.json. Raises ValueError where it is missing, foreign or changed."""
    path = folder / INDEX_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(_missing(folder)) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {REMEDY}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f"{path} is not the index of a token dataset (no format {FORMAT!r}); {REMEDY}")
    if fields.get("version") != VERSION:
        raise ValueError(f"{path}: version {fields.get('version')!r}, this pith reads {VERSION}; {REMEDY}")
    if fields.pop("checksum", None) != _checksum(fields):
        raise ValueError(f"{path}: its content does not match its own checksum; {REMEDY}")
    del fields["format"], fields["version"]
    return Index(**{**fields, "shards": tuple(Shard(**shard) for shard in fields["shards"])})


def check_shards(folder: Path, index: Index, content: bool = False) -> None:
    """Raises ValueError, naming the file, where a shard is missing or its size, or `content`, is not the index's."""
    for shard in index.shards:
        path = folder / shard.file
        if not path.is_file():
            raise ValueError(f"{path} is missing, the index lists it; {REMEDY}")
        if (size := path.stat().st_size) != shard.num_bytes:
            raise ValueError(f"{path} has {size} bytes, the index says {shard.num_bytes}; {REMEDY}")
        if content and hashlib.sha256(path.read_bytes()).hexdigest() != shard.sha256:
            raise ValueError(f"{path}: its checksum is not the index's; {REMEDY}")


class SplitWriter:
    """Cuts one split's tokens into shards of equal length; at most one shard waits in memory."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._folder, self._tokenizer, self._shard_tokens = folder, tokenizer, shard_tokens
        self._waiting: list[Tokens] = []
        self._num_waiting = 0
        self._shards: list[Shard] = []

    def add(self, tokens: Tokens) -> None:
        """Takes the next tokens, and writes every shard that is full."""
        self._waiting.append(tokens)
        self._num_waiting += tokens.size
        while self._num_waiting >= self._shard_tokens:
            self._write_shard()

    def finish(self, inputs_sha256: str, num_documents: int, num_empty: int, num_invalid: int) -> None:
        """Writes the last shard and the index. Raises ValueError where the split has no token."""
        if self._num_waiting:
            self._write_shard()
        if not self._shards:
            raise ValueError(
                f"the {self._folder.name} split has no tokens ({num_empty} empty and {num_invalid} invalid "
                "documents fell into it); give more text, or change holdout"
            )
        index = Index(
            split=self._folder.name,
            dtype=self._tokenizer.dtype,
            vocab_size=self._tokenizer.vocab_size,
            end_of_document=self._tokenizer.end_of_document,
            tokenizer=self._tokenizer.name,
            tokenizer_sha256=self._tokenizer.sha256,
            inputs_sha256=inputs_sha256,
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=num_documents,
            num_empty=num_empty,
            num_invalid=num_invalid,
            shards=tuple(self._shards),
        )
        fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(index)}
        text = json.dumps({**fields, "checksum": _checksum(fields)}, indent=1, sort_keys=True) + "\n"
        self._write(INDEX_NAME, text.encode())

    def _write_shard(self) -> None:
        tokens = np.concatenate(self._waiting)
        tokens, rest = tokens[: self._shard_tokens], tokens[self._shard_tokens :]
        self._waiting, self._num_waiting = [rest], rest.size
        name = f"shard-{len(self._shards):05d}.bin"
        data = tokens.astype(tokens.dtype.newbyteorder("<")).tobytes()
        self._write(name, data)
        self._shards.append(Shard(name, tokens.size, len(data), hashlib.sha256(data).hexdigest()))

    def _write(self, name: str, data: bytes) -> None:
        """Writes a file and waits until the disk has it, so that the rename publishes whole files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _missing(folder: Path) -> str:
    splits = [name for name in ("train", "validation") if (folder / name / INDEX_NAME).is_file()]
    if splits:
        return f"{folder} holds the splits {splits}; name one of them, such as {folder / splits[0]}"
    return f"{folder} is not a token dataset: it has no {INDEX_NAME}; make one with `pith data prepare`"
