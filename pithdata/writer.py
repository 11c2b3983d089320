"""One split of a dataset written: documents become tokens, tokens become shards, the index comes last."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from pithdata.tokenizer import Tokenizer, Tokens
from pithtrain.data.index import FORMAT, INDEX_NAME, Index, Shard, checksum_of

BATCH_CHARACTERS = 2**23  # what is tokenized at once


class SplitWriter:
    """Makes one split's folder, tokenizes its documents and cuts the tokens into shards of equal length."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        folder.mkdir(parents=True)
        self._folder, self._tokenizer, self._shard_tokens = folder, tokenizer, shard_tokens
        self._counts = dict.fromkeys(("num_documents", "num_empty", "num_invalid"), 0)
        self._texts: list[str] = []
        self._num_characters = 0
        self._tokens: Tokens = np.empty(0, dtype=tokenizer.dtype)
        self._shards: list[Shard] = []

    def add(self, text: str | None) -> None:
        """Takes the next document, None where its text is not valid."""
        self._counts["num_invalid" if text is None else "num_documents" if text else "num_empty"] += 1
        if text:
            self._texts.append(text)
            self._num_characters += len(text)
        if self._num_characters >= BATCH_CHARACTERS:
            self._write_shards(at_least=self._shard_tokens)

    def finish(self, inputs_sha256: str) -> None:
        """Writes what is left and the index. Raises ValueError where the split has no token."""
        self._write_shards(at_least=1)
        counts, tokenizer = self._counts, self._tokenizer
        if not self._shards:
            raise ValueError(
                f"the {self._folder.name} split has no tokens ({counts['num_empty']} empty and {counts['num_invalid']} "
                "invalid documents fell into it); give more text, or change holdout"
            )
        index = Index(
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            inputs_sha256=inputs_sha256,
            dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            shards=tuple(self._shards),
            **counts,
        )
        fields = {"format": FORMAT, **dataclasses.asdict(index)}
        text = json.dumps({**fields, "checksum": checksum_of(fields)}, indent=1, sort_keys=True) + "\n"
        self._write(INDEX_NAME, text.encode())

    def _write_shards(self, at_least: int) -> None:
        """Tokenizes the texts that wait; while `at_least` so many tokens wait, they fill a shard."""
        self._tokens = np.concatenate([self._tokens, *self._tokenizer.encode(self._texts)])
        self._texts, self._num_characters = [], 0
        while self._tokens.size >= at_least:
            tokens, self._tokens = np.split(self._tokens, [self._shard_tokens])
            data = tokens.astype(tokens.dtype.newbyteorder("<")).tobytes()
            shard = Shard(f"shard-{len(self._shards):05d}.bin", tokens.size, hashlib.sha256(data).hexdigest())
            self._write(shard.file, data)
            self._shards.append(shard)

    def _write(self, name: str, data: bytes) -> None:
        """Writes a file and waits until the disk has it, so that the rename publishes whole files."""
        with open(self._folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
