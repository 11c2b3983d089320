"""Text to token ids: the built-in bytes, or a Hugging Face `tokenizers` file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32

BYTES = "bytes"
BYTES_VOCAB_SIZE = 257  # 256 byte values, then the end of a document
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


@dataclass(frozen=True)
class Tokenizer:
    """What is known of a tokenizer without loading it; small enough to send to another process."""

    name: str  # "bytes", or the file's name
    path: str  # "" for bytes
    sha256: str
    vocab_size: int
    end_of_document: int

    @property
    def dtype(self) -> str:
        """The smaller of the two token types that holds every id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def load(self) -> Callable[[str], Tokens]:
        """The function from a document's text, special tokens in it taken as text, to its ids and its end."""
        loaded = None if self.name == BYTES else _load(self.path)

        def encode(text: str) -> Tokens:
            if loaded is None:
                ids = np.frombuffer(text.encode(), dtype=np.uint8)
            else:
                ids = np.array(loaded.encode(text, add_special_tokens=False).ids)
            return np.concatenate([ids, [self.end_of_document]], dtype=self.dtype, casting="unsafe")

        return encode


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """`name` is "bytes" or the path of a tokenizer.json.

    `end_token` is the text of the token that ends a document; by default the first of END_TOKENS the file
    knows. Raises ValueError where the file is missing, not a tokenizer, or has no such token.
    """
    if name == BYTES:
        if end_token is not None:
            raise ValueError(f"end_token {end_token!r}: the bytes tokenizer ends documents with id 256; leave it out")
        return Tokenizer(BYTES, "", hashlib.sha256(b"pith bytes 1").hexdigest(), BYTES_VOCAB_SIZE, 256)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"tokenizer {name!r} is neither 'bytes' nor a file; give the path of a tokenizer.json")
    vocab = _load(name).get_vocab(with_added_tokens=True)
    known = [token for token in ([end_token] if end_token else END_TOKENS) if token in vocab]
    if not known:
        wanted = repr(end_token) if end_token else f"any of {', '.join(END_TOKENS)}"
        raise ValueError(f"{path} has no token {wanted} to end a document; name one that it has as end_token")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Tokenizer(path.name, str(path.resolve()), digest, max(vocab.values()) + 1, vocab[known[0]])


def _load(path: str) -> Any:
    """The `tokenizers` object of a file, set to return every token of a text and nothing else."""
    import tokenizers

    try:
        content = json.loads(Path(path).read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"tokenizer {path} is not valid JSON ({error}); give a tokenizer.json") from None
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"tokenizer {path} is JSON but has no 'model'; give a `tokenizers` tokenizer.json")
    loaded = tokenizers.Tokenizer.from_file(path)
    loaded.encode_special_tokens = True
    loaded.no_truncation()
    loaded.no_padding()
    return loaded
