"""What a page names - links, paths, commands, symbols - and whether it exists."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skills.frame import page as pages
from skills.frame.arguments import BadParameters, make_parser, read
from skills.frame.page import Page
from spec import source
from spec.document import read as read_spec

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"\.?[\w.-]+(/[\w.-]+)*/?")
_ENDINGS = (".py", ".toml", ".md")
_MADE_BY_RUNS = "runs/"
_SHELLS = ("sh", "bash", "console")
_CUTS = ("|", "||", "&&", ";", ">", ">>", "2>", "<")


def unknown_references(root: Path, page: Page, command: Any) -> Iterator[str]:
    """Everything that the page names and that does not exist. `command`: the `pith` command, a click group."""
    prose = _FENCE.sub("", page.body)
    spans = _SPAN.findall(prose)
    for target in _LINK.findall(prose):
        if "://" not in target and not (page.folder / target.partition("#")[0]).exists():
            yield f"link {target}: no such file from {page.folder.name}/"
    for span in spans:
        if " " not in span:
            yield from _unknown_path(root, page.folder, span)
            yield from _unknown_symbol(root, span)
    blocks = [text for language, text in _FENCE.findall(page.body) if language in _SHELLS]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        yield from _unknown_command(root, command, line.removeprefix("$ "), whole=True)
    for span in spans:
        yield from _unknown_command(root, command, span, whole=False)


def _placeholder(word: str) -> bool:
    """Does the word stand for the reader's own, as in NAME or RUN/metrics.jsonl."""
    return any(part.isupper() and part.isalpha() for part in re.split(r"[/._]", word))


def _unknown_path(root: Path, folder: Path, span: str) -> Iterator[str]:
    named = "/" in span or span.endswith(_ENDINGS)
    if not (named and _PATH.fullmatch(span)) or _placeholder(span) or span.startswith(_MADE_BY_RUNS):
        return
    anywhere = "/" not in span and any(root.glob(f"*/**/{span}"))
    if not (anywhere or (root / span).exists() or (folder / span).exists()):
        yield f"{span}: no such file or folder in the checkout"


def _unknown_symbol(root: Path, span: str) -> Iterator[str]:
    """A dotted name that starts like ours: a module and what it defines, a key of the run file, or a statement."""
    name = span.removesuffix("()")
    if not re.fullmatch(r"[a-z_]\w*([.:][A-Za-z_][\w-]*)+", name) or name.endswith((*_ENDINGS, ".json", ".jsonl")):
        return
    first, *rest = re.split(r"[.:]", name)
    schema = json.loads((root / "spec" / "run.schema.json").read_text(encoding="utf-8"))
    known = (root / first / "__init__.py").is_file() or first in schema["properties"]
    ids = [statement.id for statement in read_spec(root).statements]
    if known and name not in ids and not (_is_key(schema, [first, *rest]) or _is_defined(root, [first, *rest])):
        yield f"{span}: no such symbol, key of a run file, or statement"


def _is_key(schema: dict[str, Any], parts: Sequence[str]) -> bool:
    place = schema
    for part in parts:
        place = schema["$defs"][place["$ref"].rpartition("/")[2]] if "$ref" in place else place
        if part not in place.get("properties", {}):
            return False
        place = place["properties"][part]
    return True


def _is_defined(root: Path, parts: Sequence[str]) -> bool:
    """Is it a module or package, or defined at some depth in one."""
    for cut in range(len(parts), 0, -1):
        if root.joinpath(*parts[:cut]).is_dir():
            return cut == len(parts)
        file = source.module_file(root, ".".join(parts[:cut]))
        if file is not None:
            return cut == len(parts) or source.defines(file, list(parts[cut:]))
    return False


def _unknown_command(root: Path, command: Any, line: str, *, whole: bool) -> Iterator[str]:
    """What in a command line does not exist. Of `pith` lines sub-commands and options; of `make` lines targets.

    `whole`: the line is to be typed as it stands, so a skill's arguments must be valid.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = []
    words = words[: next((at for at, word in enumerate(words) if word in _CUTS), len(words))]
    program = words[0].rpartition("/")[2] if words else ""
    if program == "pith" and not any(word.startswith("<") for word in words[1:2]):
        yield from (f"`{line}`: {fault}" for fault in _unknown_words(root, command, words[1:], whole))
    elif program == "make" and len(words) > 1 and words[1].isalpha():
        makefile = root / "Makefile"
        if not makefile.is_file() or not re.search(rf"^{words[1]}:", makefile.read_text(), flags=re.MULTILINE):
            yield f"`{line}`: no target {words[1]} in the Makefile"


def _unknown_words(root: Path, command: Any, words: list[str], whole: bool) -> Iterator[str]:
    path: list[str] = []
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            yield f"no sub-command {words[0]} of pith {' '.join(path)}; there are {', '.join(command.commands)}"
            return
        command = command.commands[words[0]]
        path, words = [*path, words[0]], words[1:]
    if path == ["skill", "run"]:
        yield from _unknown_skill_words(root, words, whole)
        return
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in options:
            yield f"no option {word} of pith {' '.join(path)}"


def _unknown_skill_words(root: Path, words: list[str], whole: bool) -> Iterator[str]:
    if not words or _placeholder(words[0]):
        return
    try:
        page = pages.find(root, words[0])
        skill = pages.load(page)
        if whole and "--help" not in words:
            read(page.name, page.description, skill.params, words[1:])
    except (ValueError, BadParameters) as error:
        yield str(error)
        return
    known = make_parser(page.name, page.description, skill.params).format_help()
    for word in words[1:]:
        if word.startswith("--") and not re.search(rf"{re.escape(word.partition('=')[0])}(?![\w-])", known):
            yield f"no option {word} of the skill {page.name}"
