"""Files found, cut into pieces of work, and decoded into documents.

A `.jsonl` file holds one document a line, in its field "text"; any other file is one document. What a piece
holds does not depend on how many processes share the work. A file's name is its path below the source that it
was found in, so moving a source changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

PIECE_BYTES = 2**24  # about what one task reads; a longer .jsonl is cut, a longer text is one piece

Invalid = Literal["error", "replace", "skip"]


@dataclass(frozen=True)
class Piece:
    """A whole text file, or the lines of a .jsonl file that start at a byte in [start, stop)."""

    path: str
    name: str
    start: int
    stop: int
    is_json_lines: bool


@dataclass(frozen=True)
class Document:
    """`text` is None where the document is not valid UTF-8 and such are skipped."""

    key: str  # unique among the documents of a source; decides whether it is held out
    text: str | None
    is_valid: bool


def find_files(sources: Sequence[Path], suffixes: Sequence[str], exclude: Sequence[str]) -> list[tuple[Path, str]]:
    """(path, name) of every file: sources in the given order, each folder's files sorted by name.

    A source that is a file is taken whatever its suffix. Folders whose own name is in `exclude` are not
    entered; links to folders are not followed. Raises ValueError for a missing source, no file, or a file met
    twice.
    """
    found: list[tuple[Path, str]] = []
    for source in sources:
        if source.is_file():
            found.append((source, source.name))
        elif source.is_dir():
            found.extend(sorted(_walk(source, tuple(suffixes), exclude), key=lambda item: item[1]))
        else:
            raise ValueError(f"source {source} is neither a file nor a folder; check its path")
    if not found:
        listed = ", ".join(map(str, sources)) or "no source"
        raise ValueError(f"no file with suffix {', '.join(suffixes)} in {listed}; name another suffix or source")
    times = Counter(path.resolve() for path, _ in found)
    if twice := [str(path) for path, count in times.items() if count > 1]:
        raise ValueError(f"{twice[0]} is reached twice, its tokens would count twice; name it in one source")
    return found


def cut(files: Sequence[tuple[Path, str]], piece_bytes: int = PIECE_BYTES) -> list[tuple[Piece, ...]]:
    """Tasks in the order of `files`: long .jsonl files cut, short files joined up to `piece_bytes`."""
    tasks: list[list[Piece]] = [[]]
    total = 0
    for piece in (piece for path, name in files for piece in _pieces(path, name, piece_bytes)):
        size = piece.stop - piece.start
        if tasks[-1] and total + size > piece_bytes:
            tasks.append([])
            total = 0
        tasks[-1].append(piece)
        total += size
    return [tuple(task) for task in tasks]


def read_piece(piece: Piece) -> tuple[int, bytes, bytes]:
    """The offset of the piece's first byte in its file, its bytes, and a digest of both and the file's name."""
    with open(piece.path, "rb") as file:
        begin, end = piece.start, piece.stop
        if piece.is_json_lines:
            begin, end = _line_start(file, begin), _line_start(file, end)
        file.seek(begin)
        data = file.read(end - begin)
    return begin, data, hashlib.sha256(os.fsencode(f"{piece.name}\0{begin}\0") + data).digest()


def documents(piece: Piece, begin: int, data: bytes, invalid: Invalid) -> Iterator[Document]:
    """The documents of a piece in order. Raises ValueError naming file and place where one cannot be read."""
    if not piece.is_json_lines:
        yield _decode(piece, piece.name, data, 0, invalid)
        return
    offset = begin
    for line in data.split(b"\n"):
        if line.strip():
            yield _decode(piece, f"{piece.name}:{offset}", _json_text(piece, line, offset), offset, invalid)
        offset += len(line) + 1


def _json_text(piece: Piece, line: bytes, offset: int) -> bytes:
    """The field "text"; what no UTF-8 can hold (a bad byte, half a surrogate pair) stays in it as bad bytes."""
    try:
        content = json.loads(line.decode(errors="surrogateescape"))
    except json.JSONDecodeError as error:
        _refuse_line(piece, offset, f"is not valid JSON ({error})")
    if not isinstance(content, dict) or not isinstance(text := content.get("text"), str):
        _refuse_line(piece, offset, 'is not an object with a string "text"')
    return text.encode(errors="surrogatepass")


def _decode(piece: Piece, key: str, data: bytes, offset: int, invalid: Invalid) -> Document:
    try:
        return Document(key, data.decode(), True)
    except UnicodeDecodeError as error:
        if invalid == "error":
            raise ValueError(
                f"{piece.path}: the document at byte {offset} is not valid UTF-8 ({error.reason} at its byte "
                f"{error.start}); convert it, or choose invalid='replace' (U+FFFD for bad bytes) or 'skip'"
            ) from None
    return Document(key, data.decode(errors="replace") if invalid == "replace" else None, False)


def _walk(source: Path, suffixes: tuple[str, ...], exclude: Sequence[str]) -> Iterator[tuple[Path, str]]:
    def refuse(error: OSError) -> NoReturn:
        raise ValueError(f"folder {error.filename} cannot be read ({error.strerror}); check its permissions")

    for folder, subfolders, names in os.walk(source, onerror=refuse):
        subfolders[:] = [name for name in subfolders if name not in exclude]
        for name in names:
            path = Path(folder, name)
            if name.endswith(suffixes) and path.is_file():
                yield path, path.relative_to(source).as_posix()


def _pieces(path: Path, name: str, piece_bytes: int) -> Iterator[Piece]:
    size = path.stat().st_size
    is_json_lines = path.suffix == ".jsonl"
    step = piece_bytes if is_json_lines else max(size, 1)
    for start in range(0, max(size, 1), step):
        yield Piece(str(path), name, start, min(start + step, size), is_json_lines)


def _line_start(file: BinaryIO, offset: int) -> int:
    """Where the first line that starts at or after `offset` starts."""
    if offset > 0:
        file.seek(offset - 1)
        file.readline()
        return file.tell()
    return 0


def _refuse_line(piece: Piece, offset: int, what: str) -> NoReturn:
    with open(piece.path, "rb") as file:
        line = file.read(offset).count(b"\n") + 1
    raise ValueError(f'{piece.path} line {line} {what}; each line must be an object like {{"text": "..."}}')
