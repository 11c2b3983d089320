"""Checks the spec against the code base: `pith spec check`.

Every statement has a well-formed id of its own, and code, reference and checks that exist; imports follow
the rule; rooms keep their budgets; restricted names and calls stand only where they may. Sources are read,
never imported.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec import source
from spec.document import Document, Problem, RestrictedCall, RestrictedName, Room, Rules, Statement, read
from spec.formula import FormulaError
from spec.imports import check_imports
from spec.parser import parse

ROOT = Path(__file__).resolve().parents[1]


def check(root: Path = ROOT) -> list[Problem]:
    """Everything wrong in the checkout at ``root``; empty when clean."""
    document = read(root)
    problems = [*document.problems, *check_ids(document)]
    for statement in document.statements:
        problems += check_statement(root, statement)
    problems += check_experts(document)
    if document.rules is not None:
        problems += check_budgets(root, document.rules)
        problems += check_imports(root, document.rules.imports)
        for name in document.rules.restricted_name:
            problems += check_restricted_name(root, name)
        for call in document.rules.restricted_call:
            problems += check_restricted_call(root, call)
    return problems


def check_ids(document: Document) -> Iterator[Problem]:
    """Ids of statements and mutants are unique; a mutant names a statement that exists."""
    known = [statement.id for statement in document.statements]
    planted = [mutant.id for mutant in document.mutants]
    for name, times in (Counter(known) + Counter(planted)).items():
        if times > 1:
            yield Problem(where=name, what=f"{times} statements or mutants have this id")
    for mutant in document.mutants:
        if mutant.statement not in known:
            yield Problem(where=f"mutant {mutant.id}", what=f"no statement {mutant.statement}")


def check_statement(root: Path, statement: Statement) -> Iterator[Problem]:
    """The code, the reference and the checks that a statement names exist."""
    references = [statement.reference] if statement.reference else []
    for name in (*statement.code, *references):
        module, _, path = name.partition(":")
        file = source.module_file(root, module)
        if file is None:
            yield Problem(where=statement.id, what=f"{name}: no module {module}")
        elif not source.defines(file, path.split(".")):
            yield Problem(where=statement.id, what=f"{name}: no {path} in {file.relative_to(root)}")
    for name in statement.check:
        path, *names = name.split("::")
        if not (root / path).is_file():
            yield Problem(where=statement.id, what=f"check {name}: no file {path}")
        elif not source.defines(root / path, names):
            yield Problem(where=statement.id, what=f"check {name}: no such test in {path}")


def check_experts(document: Document) -> Iterator[Problem]:
    """The formula of every type of experts can be read, and uses its weights as they are declared."""
    for expert in document.experts:
        try:
            parse(expert.formula, expert.weights)
        except FormulaError as error:
            yield Problem(where=expert.id, what=str(error))


def room_lines(root: Path, room: Room) -> int:
    return sum(source.count_lines(source.python_files(root, path)) for path in room.paths)


def check_budgets(root: Path, rules: Rules) -> Iterator[Problem]:
    """Rooms and their total keep to their lines, and every file of the total belongs to one room."""
    for room in rules.room:
        if room_lines(root, room) > room.budget:
            yield Problem(where=room.name, what=f"{room_lines(root, room)} lines, budget {room.budget}")
    whole, limit = rules.total.path, rules.total.lines
    files = source.python_files(root, whole)
    if source.count_lines(files) > limit:
        yield Problem(where=whole, what=f"{source.count_lines(files)} lines, at most {limit}")
    promised = sum(room.budget for room in rules.room if _inside(room.paths[0], whole))
    if promised > limit:
        yield Problem(where=whole, what=f"the rooms' budgets add up to {promised}, at most {limit}")
    for name in (file.relative_to(root).as_posix() for file in files):
        homes = [room.name for room in rules.room if any(_inside(name, path) for path in room.paths)]
        if len(homes) != 1:
            yield Problem(where=name, what=f"in the rooms {homes}, expected exactly one")


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(path + "/")


def check_restricted_name(root: Path, rule: RestrictedName) -> Iterator[Problem]:
    """No use of a restricted dotted name but in the files, and of the attributes, that the rule lists."""
    for file in source.python_files(root, rule.path):
        where = file.relative_to(root).as_posix()
        allowed = [name for path, names in rule.files.items() if _inside(where, path) for name in names]
        if "*" in allowed:
            continue
        for line, attribute in sorted(source.uses_of(source.parse(file), rule.name)):
            if attribute not in allowed:
                used = f"{rule.name}.{attribute}".rstrip(".")
                yield Problem(where=f"{where}:{line}", what=f"uses {used}: {rule.why}")


def check_restricted_call(root: Path, rule: RestrictedCall) -> Iterator[Problem]:
    """No call that the rule refuses, outside the files that it lists."""
    for file in (file for path in rule.paths for file in source.python_files(root, path)):
        where = file.relative_to(root).as_posix()
        if where in rule.files:
            continue
        for line in source.calls_of(source.parse(file), rule.name, rule.arguments):
            yield Problem(where=f"{where}:{line}", what=f"calls {rule.name}: {rule.why}")


def run(root: Path = ROOT) -> int:
    """Print rooms against budgets, statements and mutants by file, every problem. 0 when clean, else 1."""
    console = Console()
    document, problems = read(root), check(root)
    if document.rules is not None:
        console.print(_budget_table(root, document.rules))
    console.print(_statement_table(document))
    for problem in problems:
        console.print(Text.assemble((problem.where, "red"), ": ", problem.what), soft_wrap=True)
    console.print(f"{len(problems)} problems" if problems else "The spec is clean.")
    return 1 if problems else 0


def _budget_table(root: Path, rules: Rules) -> Table:
    table = Table("room", "lines", "budget", title="Physical lines of Python, blank lines and comments included")
    for room in rules.room:
        table.add_row(room.name, str(room_lines(root, room)), str(room.budget))
    total = source.count_lines(source.python_files(root, rules.total.path))
    table.add_row(f"{rules.total.path}/, all of it", str(total), str(rules.total.lines), style="bold")
    return table


def _statement_table(document: Document) -> Table:
    """Per file of statements: how many there are, how many some mutant turns red, which are left."""
    turned_red = {mutant.statement for mutant in document.mutants}
    table = Table("file", "statements", "turned red by a mutant", "without a mutant", title="Statements")
    for stem in sorted({statement.id.partition(".")[0] for statement in document.statements}):
        ids = [statement.id for statement in document.statements if statement.id.startswith(stem + ".")]
        left = [name for name in ids if name not in turned_red]
        table.add_row(stem, str(len(ids)), str(len(ids) - len(left)), str(len(left)))
    return table
