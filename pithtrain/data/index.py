"""What a prepared folder looks like on disk: its index read and checked, a split written.

    <out>/train/index.json         format, tokenizer, counts, and each shard's length and checksum
    <out>/train/shard-00000.bin    token ids, little endian, uint16 where the vocabulary fits, else uint32
    <out>/validation/...           the same, only where some documents were held out

The index holds a checksum of itself, so any change to it is noticed; no time, path or worker count is in it, so the
same inputs give the same bytes.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pithtrain.data.tokenizer import Tokenizer, Tokens

FORMAT = "pith-tokens-1"
INDEX_NAME = "index.json"
BATCH_CHARACTERS = 2**23  # what is tokenized at once
REMEDY = "remove the dataset and prepare it again with `pith data prepare`"


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    file: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """Everything a reader must know of one split; written as index.json beside the shards."""

    tokenizer: str  # "bytes", or the name of the tokenizer file
    tokenizer_sha256: str
    inputs_sha256: str  # every source byte and every option that decides the tokens
    dtype: str  # "uint16" or "uint32", little endian
    vocab_size: int
    end_of_document: int  # the token written after every document
    num_tokens: int
    num_documents: int
    num_empty: int  # documents without text, left out
    num_invalid: int  # documents not valid UTF-8, left out
    shards: tuple[Shard, ...]


def read_index(folder: Path) -> Index:
    """Reads and checks `folder`/index.json. Raises ValueError where it is missing, foreign or changed."""
    path = folder / INDEX_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        splits = sorted(index.parent for index in folder.glob(f"*/{INDEX_NAME}"))
        hint = f"its folders are, name one of them: {splits[0]}" if splits else "make one with `pith data prepare`"
        raise ValueError(f"{folder} is not a token dataset: it has no {INDEX_NAME}; {hint}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {REMEDY}") from None
    found = fields.get("format") if isinstance(fields, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} is not the index of a token dataset: format {found!r} is not {FORMAT!r}; {REMEDY}")
    if fields.pop("checksum", None) != _checksum(fields):
        raise ValueError(f"{path}: its content does not match its own checksum; {REMEDY}")
    del fields["format"]
    return Index(**{**fields, "shards": tuple(Shard(**shard) for shard in fields["shards"])})


def check_shards(folder: Path, index: Index, content: bool = False) -> None:
    """Raises ValueError, naming the file, where a shard is missing or its size, or `content`, is not the index's."""
    for shard in index.shards:
        path, expected = folder / shard.file, shard.num_tokens * np.dtype(index.dtype).itemsize
        if not path.is_file():
            raise ValueError(f"{path} is missing, the index lists it; {REMEDY}")
        if (size := path.stat().st_size) != expected:
            raise ValueError(f"{path} has {size} bytes, the index says {expected}; {REMEDY}")
        if content and hashlib.sha256(path.read_bytes()).hexdigest() != shard.sha256:
            raise ValueError(f"{path}: its checksum is not the index's; {REMEDY}")


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
        text = json.dumps({**fields, "checksum": _checksum(fields)}, indent=1, sort_keys=True) + "\n"
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


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
