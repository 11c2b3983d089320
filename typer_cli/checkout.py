"""Finds the checkout for commands that need its spec/, golden/ or tests/, which are never installed."""

import sys
import tomllib
from pathlib import Path


def find_root(start: Path) -> Path:
    """The nearest folder at or above `start` that is a checkout of pith. Raises ValueError if none is."""
    for folder in [start, *start.parents]:
        if _is_root(folder):
            return folder
    raise ValueError(
        f"no checkout of pith at or above {start}; this command needs its spec/, golden/ and tests/: "
        "go into a checkout and run it there"
    )


def use_checkout() -> Path:
    """The checkout around the current directory, its packages importable. Raises ValueError if none is."""
    root = find_root(Path.cwd())
    sys.path.insert(0, str(root))
    return root


def _is_root(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    if not (project.is_file() and (folder / "spec").is_dir()):
        return False
    tables = tomllib.loads(project.read_text(encoding="utf-8"))
    return bool(tables.get("project", {}).get("name") == "pith")
