"""What the files of spec/ and tests/mutants/ may say, as typed models, and reading them.

A statement says what the system must do. It names its source, the code that does it, the checks that turn
red when the code does not, and the reference function where there is one. ``architecture.toml`` holds the
rules of the code base itself as data.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
# package.module:name and tests/test_x.py::test_y
Reference = Annotated[str, StringConstraints(pattern=r"^[a-z_][\w.]*:[A-Za-z_][\w.]*$")]
Check = Annotated[str, StringConstraints(pattern=r"^[\w./-]+\.py(::\w+)*$")]
M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Statement(Strict):
    """One thing the system must do."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*$")]  # <file>.<slug>
    title: Text
    text: Text
    source: Text  # paper and section, a framework's definition, or "pith" for our own promise
    code: Annotated[tuple[Reference, ...], Field(min_length=1)]
    check: Annotated[tuple[Check, ...], Field(min_length=1)]
    reference: Reference | None = None


class ExpertType(Statement):
    """A statement that experts of a type compute a formula: spec/formula.py says what one is. id: experts.<type>, with
    hyphens for the type's underscores.
    """

    formula: Text
    weights: Text

    @property
    def name(self) -> str:
        return self.id.partition(".")[2].replace("-", "_")


class Mutant(Strict):
    """A planted bug: ``text`` stands once in ``file`` and is replaced."""

    id: Text
    file: Text
    text: str
    replacement: str
    catcher: Text
    statement: Text


class Room(Strict):
    """A part of the code base, its files, and the physical lines of Python it may take."""

    name: Text
    paths: Annotated[tuple[Text, ...], Field(min_length=1)]
    budget: int


class Budget(Strict):
    """The limit on all of ``path`` together, whatever the rooms say."""

    path: Text
    lines: int


class ImportRule(Strict):
    """Which module may import which. Names stand for the module and all below it.

    An import never goes up in ``layers`` (rows from the top down), and names of one row do not import each
    other. ``only``: who alone may import a module. ``allowed``: what alone a module may import.
    ``without``: what a module may not reach by any chain of imports.
    """

    packages: tuple[Text, ...]
    layers: tuple[tuple[Text, ...], ...]
    only: dict[str, tuple[Text, ...]] = {}
    allowed: dict[str, tuple[Text, ...]] = {}
    without: dict[str, tuple[Text, ...]] = {}


class RestrictedName(Strict):
    """A dotted name that is used under ``path`` only in the files (or folders) listed, each with its attributes.

    "*" allows all of them. The name alone, as in ``os.environ["X"]``, is the attribute "".
    """

    name: Text
    path: Text
    why: Text
    files: dict[str, tuple[str, ...]] = {}


class RestrictedCall(Strict):
    """A call refused under ``paths`` outside ``files``.

    ``name`` is a function's, refused when its first argument is a name in ``arguments``, or any if there
    are none; or with a leading dot, a method's.
    """

    name: Text
    paths: tuple[Text, ...]
    why: Text
    arguments: tuple[Text, ...] = ()
    files: tuple[Text, ...] = ()


class Rules(Strict):
    """architecture.toml without its statements."""

    room: tuple[Room, ...]
    total: Budget
    imports: ImportRule
    restricted_name: tuple[RestrictedName, ...] = ()
    restricted_call: tuple[RestrictedCall, ...] = ()


class Problem(Strict):
    """A rule broken: where, and what is wrong with it."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Document(Strict):
    """Everything that spec/ and tests/mutants/ say, with what could not be read."""

    statements: tuple[Statement, ...]
    mutants: tuple[Mutant, ...]
    rules: Rules | None
    problems: tuple[Problem, ...]

    @property
    def experts(self) -> tuple[ExpertType, ...]:
        return tuple(statement for statement in self.statements if isinstance(statement, ExpertType))


def read(root: Path) -> Document:
    """Read ``spec/*.toml`` and ``tests/mutants/*.toml`` under ``root``; malformed rows become problems."""
    problems: list[Problem] = []
    statements: list[Statement] = []
    mutants: list[Mutant] = []
    rules: Rules | None = None
    for path, table in _tables(root / "spec", problems):
        where = path.relative_to(root).as_posix()
        here = _parse_all(Statement, table.pop("statement", []), where, problems)
        here += _parse_all(ExpertType, table.pop("expert", []), where, problems)
        for statement in here:
            if not statement.id.startswith(path.stem + "."):
                problems.append(Problem(where=where, what=f"id {statement.id}, expected {path.stem}.<slug>"))
        statements += here
        if path.stem == "architecture":
            rules = next(iter(_parse_all(Rules, [table], where, problems)), None)
        elif table:
            what = f"unknown tables {sorted(table)}, expected [[statement]] and [[expert]]"
            problems.append(Problem(where=where, what=what))
    for path, table in _tables(root / "tests" / "mutants", problems):
        mutants += _parse_all(Mutant, table.get("mutant", []), path.relative_to(root).as_posix(), problems)
    if rules is None:
        what = "missing or malformed: no rule was checked"
        problems.append(Problem(where="spec/architecture.toml", what=what))
    return Document(statements=tuple(statements), mutants=tuple(mutants), rules=rules, problems=tuple(problems))


def _tables(folder: Path, problems: list[Problem]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob("*.toml")):
        try:
            yield path, tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            problems.append(Problem(where=path.name, what=f"not TOML: {error}"))


def _parse_all(model: type[M], rows: list[Any], where: str, problems: list[Problem]) -> list[M]:
    parsed = []
    for number, row in enumerate(rows):
        try:
            parsed.append(model.model_validate(row))
        except ValidationError as error:
            name = row.get("id", f"{model.__name__} {number}")
            for fault in error.errors():
                field = ".".join(str(part) for part in fault["loc"])
                what = f"{name}: {field}: {fault['msg']}, got {fault['input']!r}"
                problems.append(Problem(where=where, what=what))
    return parsed
