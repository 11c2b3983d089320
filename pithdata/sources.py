"""Files found and read as documents.

A `.jsonl` file holds one document a line, in its field "text"; any other file is one document. A file's name is its
path below the source that it was found in, so moving a source changes nothing.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Files = list[tuple[Path, str]]  # each with its name
Invalid = Literal["error", "skip"]


class Document(NamedTuple):
    """One document. Its key, the file's name and in a .jsonl file the line's offset, is unique within a source."""

    key: str
    data: bytes  # the file, or the line
    text: str | None  # None where it is not UTF-8 and such are skipped


def find_files(sources: Sequence[Path], suffixes: Sequence[str], exclude: Sequence[str]) -> Files:
    """Every file: sources in the given order, each folder's files sorted by name. A source that is a file is taken
    whatever its suffix. Folders whose own name is in `exclude` are not entered; links to folders are not followed.
    Raises ValueError for a missing source, no file, or a file met twice.
    """
    found: Files = []
    for source in sources:
        if source.is_file():
            found.append((source, source.name))
        elif source.is_dir():
            found += sorted(_walk(source, tuple(suffixes), exclude), key=lambda item: item[1])
        else:
            raise ValueError(f"source {source} is neither a file nor a folder; check its path")
    if not found:
        listed = ", ".join(map(str, sources)) or "no source"
        raise ValueError(f"no file with suffix {', '.join(suffixes)} in {listed}; name another suffix or source")
    path, times = Counter(path.resolve() for path, _ in found).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{path} is reached twice, its tokens would count twice; name it in one source")
    return found


def _walk(source: Path, suffixes: tuple[str, ...], exclude: Sequence[str]) -> Files:
    found: Files = []
    errors: list[OSError] = []
    for folder, subfolders, names in os.walk(source, onerror=errors.append):
        subfolders[:] = [name for name in subfolders if name not in exclude]
        paths = [Path(folder, name) for name in names if name.endswith(suffixes)]
        found += [(path, path.relative_to(source).as_posix()) for path in paths if path.is_file()]
    if errors:
        raise ValueError(f"folder {errors[0].filename} cannot be read ({errors[0].strerror}); check its permissions")
    return found


def documents(files: Files, invalid: Invalid) -> Iterator[Document]:
    """The documents in the order of `files`, one in memory at a time; ValueError naming file and line where a line is
    no document, or where text is not UTF-8 and `invalid` does not ask to skip it.
    """
    for path, name in files:
        if path.suffix != ".jsonl":
            data = path.read_bytes()
            yield Document(name, data, _decode(data, str(path), invalid))
            continue
        offset = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield Document(f"{name}:{offset}", line, _decode(_json_text(line, where), where, invalid))
                offset += len(line)


def _decode(data: bytes, where: str, invalid: Invalid) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if invalid == "skip":
            return None
        found = f"the text is not valid UTF-8 ({error.reason} at its byte {error.start})"
        raise ValueError(f"{where}: {found}; convert it, or leave such documents out with invalid='skip'") from None


def _json_text(line: bytes, where: str) -> bytes:
    """The field "text"; what no UTF-8 can hold (a bad byte, half a surrogate pair) stays in it as bad bytes."""
    problem = 'is not an object with a string "text"'
    try:
        content = json.loads(line.decode(errors="surrogateescape"))
        if isinstance(content, dict) and isinstance(text := content.get("text"), str):
            return text.encode(errors="surrogatepass")
    except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, thousands of brackets
        problem = f"is not valid JSON ({error})"
    raise ValueError(f'{where} {problem}; each line must be an object like {{"text": "..."}}')
