"""What a prepared folder looks like on disk; its index read and checked.

    <out>/train/index.json         format, tokenizer, counts, and each shard's length and checksum
    <out>/train/shard-00000.bin    token ids, little endian, uint16 where the vocabulary fits, else uint32
    <out>/validation/...           the same, only where some documents were held out

The index holds a checksum of itself, so any change to it is noticed; no time, path or worker count is in it, so the
same inputs give the same bytes.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "pith-tokens-1"
INDEX_NAME = "index.json"
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
    if fields.pop("checksum", None) != checksum_of(fields):
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


def checksum_of(fields: dict[str, Any]) -> str:
    """What index.json holds as its own checksum."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
