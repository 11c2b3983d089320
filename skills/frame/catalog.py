"""Shows skills: all of them in a line each, or one with its page and its arguments."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from skills.frame import page as pages
from skills.frame.arguments import make_parser

ROOT = Path(__file__).resolve().parents[2]


def show_list(root: Path = ROOT) -> None:
    """Prints name and description of every skill, or what is wrong with its page."""
    table = Table("skill", "what it does and when to use it")
    for folder in pages.folders(root):
        try:
            table.add_row(folder.name, pages.read(folder).description)
        except ValueError as error:
            table.add_row(folder.name, str(error))
    Console(highlight=False).print(table if table.row_count else "This checkout has no skills.", markup=False)


def show_skill(name: str, as_json: bool, root: Path = ROOT) -> None:
    """Prints a page and the help of its arguments; or, as JSON, the schemas. Raises ValueError for an unknown name."""
    page = pages.find(root, name)
    skill = pages.load(page)
    if as_json:
        schemas = {"params": skill.params.model_json_schema(), "result": skill.result.model_json_schema()}
        print(json.dumps({"name": name, "description": page.description, "writes": skill.writes, **schemas}, indent=1))
    else:
        print(page.body.strip(), make_parser(name, page.description, skill.params).format_help(), sep="\n\n")
