"""Text to token ids: the built-in bytes, or a Hugging Face `tokenizers` file."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


@dataclass(frozen=True)
class Tokenizer:
    """`loaded` is the `tokenizers` object, None for the bytes."""

    name: str  # "bytes", or the file's name
    sha256: str
    vocab_size: int
    end_of_document: int
    loaded: Any = None

    @property
    def dtype(self) -> str:
        """The smaller of the two token types that holds every id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, special tokens in it taken as text, with the end of a document after them.

        `tokenizers` shares the texts out among threads; the ids do not depend on how many.
        """
        if self.loaded is None:
            ids = [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        else:
            ids = [found.ids for found in self.loaded.encode_batch_fast(texts, add_special_tokens=False)]
        end = [self.end_of_document]
        return [np.concatenate([part, end], dtype=self.dtype, casting="unsafe") for part in ids]


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """`name` is "bytes" or the path of a tokenizer.json, where `end_token`, by default <|endoftext|>, ends a document.

    Raises ValueError where the file is missing, not a tokenizer, or has no such token.
    """
    if name == "bytes":
        if end_token is not None:
            raise ValueError(f"end_token {end_token!r}: the bytes tokenizer ends documents with id 256; leave it out")
        return Tokenizer("bytes", hashlib.sha256(b"pith bytes 1").hexdigest(), 257, 256)
    import tokenizers

    path, end_token = Path(name), end_token or "<|endoftext|>"
    if not path.is_file():
        raise ValueError(f"tokenizer {name!r} is neither 'bytes' nor a file; give the path of a tokenizer.json")
    data = path.read_bytes()
    problem = "is not valid JSON"
    try:
        content = json.loads(data)
        problem = "cannot be read" if isinstance(content, dict) and "model" in content else "has no 'model'"
        loaded = tokenizers.Tokenizer.from_buffer(data)
    except ValueError as error:
        raise ValueError(f"tokenizer {path} {problem} ({error}); give a `tokenizers` tokenizer.json") from None
    loaded.encode_special_tokens = True  # every token of a text and nothing else
    loaded.no_truncation()
    loaded.no_padding()
    vocab = loaded.get_vocab(with_added_tokens=True)
    if end_token not in vocab:
        raise ValueError(f"{path} has no token {end_token!r} to end a document; name one that it has as end_token")
    return Tokenizer(path.name, hashlib.sha256(data).hexdigest(), max(vocab.values()) + 1, vocab[end_token], loaded)
