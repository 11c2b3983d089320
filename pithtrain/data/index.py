"""What a prepared folder looks like on disk, and the one file that says so.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def index_text(index: Index) -> str:
    """The bytes of index.json: sorted keys, one final newline."""
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(index)}
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1, sort_keys=True) + "\n"


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


def check_sizes(folder: Path, index: Index) -> None:
    """Raises ValueError, naming the file, where a shard is missing or its size is not the index's."""
    for shard in index.shards:
        path = folder / shard.file
        if not path.is_file():
            raise ValueError(f"{path} is missing, the index lists it; {REMEDY}")
        if (size := path.stat().st_size) != shard.num_bytes:
            raise ValueError(f"{path} has {size} bytes, the index says {shard.num_bytes}; {REMEDY}")


def check_shards(folder: Path, index: Index) -> None:
    """Reads every byte; raises ValueError naming the first shard whose checksum is not the index's."""
    check_sizes(folder, index)
    for shard in index.shards:
        with open(folder / shard.file, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise ValueError(f"{folder / shard.file}: its checksum is not the index's; {REMEDY}")


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _missing(folder: Path) -> str:
    splits = [name for name in ("train", "validation") if (folder / name / INDEX_NAME).is_file()]
    if splits:
        return f"{folder} holds the splits {splits}; name one of them, such as {folder / splits[0]}"
    return f"{folder} is not a token dataset: it has no {INDEX_NAME}; make one with `pith data prepare`"
