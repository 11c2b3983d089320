"""One split's tokens written as shards and an index."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pithtrain.data.index import INDEX_NAME, Index, Shard, index_text
from pithtrain.data.tokenizer import Tokenizer, Tokens


@dataclass(frozen=True)
class Tally:
    """One split's share of a task."""

    tokens: Tokens
    num_documents: int = 0
    num_empty: int = 0
    num_invalid: int = 0


class SplitWriter:
    """Cuts one split's tokens into shards of equal length; at most one shard waits in memory."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._folder, self._tokenizer, self._shard_tokens = folder, tokenizer, shard_tokens
        self._waiting: list[Tokens] = []
        self._num_waiting = 0
        self._shards: list[Shard] = []
        self._counts = np.zeros(3, dtype=np.int64)

    def add(self, tally: Tally) -> None:
        """Takes the next tokens, and writes every shard that is full."""
        self._counts += (tally.num_documents, tally.num_empty, tally.num_invalid)
        self._waiting.append(tally.tokens)
        self._num_waiting += tally.tokens.size
        while self._num_waiting >= self._shard_tokens:
            self._write_shard()

    def finish(self, inputs: str) -> None:
        """Writes the last shard and the index. Raises ValueError where the split has no token."""
        if self._num_waiting:
            self._write_shard()
        num_documents, num_empty, num_invalid = self._counts.tolist()
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
            inputs_sha256=inputs,
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=num_documents,
            num_empty=num_empty,
            num_invalid=num_invalid,
            shards=tuple(self._shards),
        )
        self._write(INDEX_NAME, index_text(index).encode())

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
