"""Proves skills: `pith skill check`. The page says only what is there, the example runs dry, the own tests pass."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from skills.frame import page as pages
from skills.frame.page import TESTS, Page
from skills.frame.references import unknown_references
from skills.frame.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800.0  # for one skill's dry run, and for its tests


def run(command: Any, names: Sequence[str], root: Path = ROOT) -> int:
    """Prints PASS or FAIL for each skill, or for those named, with what is wrong; 0 when all passed, else 1.

    command: the `pith` command (a click group), for command lines on the pages.
    """
    console = Console(highlight=False)
    known = {folder.name: folder for folder in pages.folders(root)}
    folders = [known.get(name) or pages.find(root, name).folder for name in names] or [*known.values()]
    failed = 0
    for folder in folders:
        problems = [*page_problems(root, folder, command)]
        problems = problems or [*trial_problems(root, pages.read(folder))]
        failed += bool(problems)
        console.print(f"{'FAIL' if problems else 'PASS'} {folder.name}", markup=False)
        for problem in problems:
            console.print(f"  {problem}", markup=False, soft_wrap=True)
    console.print(f"{len(folders) - failed} of {len(folders)} skills pass", markup=False)
    return 1 if failed else 0


def page_problems(root: Path, folder: Path, command: Any) -> Iterator[str]:
    """What is wrong with a page and the contract behind it; runs nothing of the skill."""
    try:
        page = pages.read(folder)
        yield from pages.problems(page)
        page.example()
        skill = pages.load(page)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    for model in (skill.params, skill.result):
        yield from undocumented(model)
    yield from unknown_references(root, page, command)


def undocumented(model: type[BaseModel]) -> Iterator[str]:
    """Fields that a user would have to guess at."""
    for name, field in model.model_fields.items():
        if not field.description:
            yield f"{model.__name__}.{name}: no docstring under the field"


def trial_problems(root: Path, page: Page) -> Iterator[str]:
    """What a dry run on the page's example, and its own tests, find."""
    workspace = Workspace(root, root)
    skill = ("typer_cli.main", "skill", "run", page.name)
    yield from workspace.failures(*skill, *page.example(), "--dry-run", "--json", seconds=SECONDS)
    yield from workspace.failures(
        "pytest", "-q", "-p", "no:cacheprovider", "-m", "not prove", *page.own(TESTS).split(), seconds=SECONDS
    )
