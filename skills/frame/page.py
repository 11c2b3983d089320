"""SKILL.md: the page of a skill, its front matter, and finding the skills of a checkout by their pages.

The front matter is that of the open agent-skill standard; what is pith's own stands under `metadata`:
`pith.entry` (module:object), `pith.example` (arguments for a dry run), `pith.tests` (pytest nodes).
"""

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from skills.frame.contract import Skill

ENTRY, EXAMPLE, TESTS = "pith.entry", "pith.example", "pith.tests"
MAX_LINES = 120
_KNOWN = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}


@dataclass(frozen=True)
class Page:
    """A page as it lies in its folder: front matter not yet checked, body as text."""

    folder: Path
    front: dict[Any, Any]
    body: str
    lines: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def description(self) -> str:
        return str(self.front.get("description", ""))

    def own(self, key: str) -> str:
        """What stands under a key of ours; "" if nothing does."""
        metadata = self.front.get("metadata")
        return str(metadata.get(key, "")) if isinstance(metadata, dict) else ""

    def example(self) -> list[str]:
        return shlex.split(self.own(EXAMPLE))


def folders(root: Path) -> list[Path]:
    """Folders of the skills in the checkout, by name: those below skills/ with a page."""
    return sorted(page.parent for page in (root / "skills").glob("*/SKILL.md") if page.is_file())


def read(folder: Path) -> Page:
    """The page in `folder`. Raises ValueError if it is no text, or has no front matter that is a table of YAML."""
    try:
        text = (folder / "SKILL.md").read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{folder}/SKILL.md: cannot be read as UTF-8 text: {error}") from error
    parts = re.match(r"---\n(.*?\n)---\n(.*)", text, flags=re.DOTALL)
    if parts is None:
        raise ValueError(f"{folder}/SKILL.md: no front matter; expected YAML between two lines of ---, first of all")
    try:
        front = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise ValueError(f"{folder}/SKILL.md: the front matter is not YAML: {error}") from error
    if not isinstance(front, dict):
        raise ValueError(f"{folder}/SKILL.md: the front matter is {type(front).__name__}, expected a table")
    return Page(folder, front, parts[2], len(text.splitlines()))


class Unknown(ValueError):
    """No skill has this name."""


def find(root: Path, name: str) -> Page:
    """The page of a skill. Raises Unknown, or ValueError as `read` does."""
    known = [folder.name for folder in folders(root)]
    if name not in known:
        raise Unknown(f"no skill is called {name!r}; expected one of {', '.join(known) or '(there is none)'}")
    return read(root / "skills" / name)


def load(page: Page) -> Skill[Any, Any]:
    """The skill of a page. Raises ValueError if its entry names none."""
    module, _, name = page.own(ENTRY).partition(":")
    where = f"{page.folder}/SKILL.md: {ENTRY} {page.own(ENTRY)!r}"
    try:
        skill = vars(importlib.import_module(module)).get(name) if module[:1] not in ("", ".") else None
    except ImportError as error:
        raise ValueError(f"{where}: cannot be imported: {error}") from error
    if not isinstance(skill, Skill):
        raise ValueError(f"{where}: got {type(skill).__name__}, expected module:object of a skills.frame.Skill")
    return skill


def problems(page: Page) -> Iterator[str]:
    """What in the front matter or the length of the page is against the standard, or against our own rules."""
    front = page.front
    unknown = sorted(str(key) for key in set(front) - _KNOWN)
    if unknown:
        yield f"unknown keys {', '.join(unknown)}; expected {', '.join(sorted(_KNOWN))}; put own keys under metadata"
    name = front.get("name")
    if not (isinstance(name, str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) and len(name) <= 64):
        yield f"name {name!r}; expected 1 to 64 lowercase letters and digits, words joined by single hyphens"
    if name != page.name:
        yield f"name {name!r}; expected that of its folder, {page.name!r}"
    for key, limit in (("description", 1024), ("compatibility", 500)):
        text = front.get(key, None if key == "description" else "-")
        if not (isinstance(text, str) and len(text.strip()) > 0 and len(text) <= limit):
            yield f"{key} {text!r}; expected a text of 1 to {limit} characters"
    metadata = front.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for row in metadata.items() for text in row):
        yield f"metadata {metadata!r}; expected texts by text (quote numbers)"
    for key in (ENTRY, EXAMPLE, TESTS):
        if not page.own(key):
            yield f"metadata has no {key}"
    if page.lines > MAX_LINES:
        yield f"{page.lines} lines; expected at most {MAX_LINES}; move details to references/"
