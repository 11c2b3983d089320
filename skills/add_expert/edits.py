"""What a new expert type changes in the tree: each edit takes a file's text and gives the new one.

Where an edit has no place to stand, because the file was rearranged, `Failed` names the file and the place.
"""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from skills.frame import Failed

LITERAL = re.compile(r"ExpertType = Literal\[(.*?)\]", re.DOTALL)
CASES = re.compile(r"^EXPERT_TYPES\b.*?= \(.*?^\)$", re.DOTALL | re.MULTILINE)
ROW = '    ("{name}", {seed}),\n'


def _found(pattern: re.Pattern[str], text: str, where: str) -> re.Match[str]:
    match = pattern.search(text)
    if match is None:
        raise Failed(f"{where}: no {pattern.pattern!r} in it; add the type by hand there, or restore the file")
    return match


def add_to_literal(text: str, name: str) -> str:
    """pithtrain/choices.py, to be formatted."""
    match = _found(LITERAL, text, "pithtrain/choices.py")
    names = [*re.findall(r'"(\w+)"', match[1]), name]
    return text.replace(match[0], "ExpertType = Literal[" + ", ".join(f'"{each}"' for each in names) + "]")


def add_to_match(text: str, name: str, cls: str) -> str:
    """pithtrain/layers/experts/build.py, its imports to be sorted."""
    where = _found(re.compile(r"^from pithtrain\.layers\.experts", re.MULTILINE), text, "layers/experts/build.py")
    text = text[: where.start()] + f"from pithtrain.layers.experts.{name} import {cls}\n" + text[where.start() :]
    return text.rstrip() + f'\n        case "{name}":\n            return {cls}\n'


def add_golden_case(text: str, name: str, seed: int) -> str:
    """golden/cases.py; the seed of a row that is there already is replaced."""
    match = _found(CASES, text, "golden/cases.py")
    rows = re.sub(rf'^    \("{name}", .*\n', "", match[0], flags=re.MULTILINE)
    return text.replace(match[0], rows.removesuffix(")") + ROW.format(name=name, seed=seed) + ")")


def fit_budgets(text: str, lines: dict[str, int], limit: int) -> str:
    """spec/architecture.toml with room for what every room of the total holds now.

    Budgets that are passed are raised, and lowered where there are lines to spare, so that they keep to the limit.
    """
    pattern = r'(\{ name = "%s", .*budget = )(\d+)'
    before = {room: int(_found(re.compile(pattern % room), text, "spec/architecture.toml")[2]) for room in lines}
    budgets = {room: max(before[room], lines[room]) for room in lines}
    for room in sorted(budgets, key=lambda room: lines[room] - budgets[room]):
        over = max(sum(budgets.values()) - limit, 0)
        budgets[room] -= min(over, budgets[room] - lines[room])
    for room in (room for room in budgets if budgets[room] != before[room]):
        text = re.sub(pattern % room, rf"\g<1>{budgets[room]}", text)
    return text


def add_to_readme(text: str, name: str, formula: str) -> str:
    """The table of expert types gets a row."""
    match = _found(re.compile(r"^\| type \| formula \|\n(\|.*\n)+", re.MULTILINE), text, "README.md")
    return text.replace(match[0], f"{match[0]}| `{name}` | `{formula}` |\n")


def table(kind: str, values: dict[str, str | Sequence[str]]) -> str:
    """A row of a TOML array of tables."""
    lines = [f"[[{kind}]]"]
    for key, value in values.items():
        words = [_quoted(value)] if isinstance(value, str) else [_quoted(each) for each in value]
        lines.append(f"{key} = {words[0] if isinstance(value, str) else '[' + ', '.join(words) + ']'}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    if "\n" in text:
        return f"'''{text}'''"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def plant(text: str, changed: str) -> tuple[str, str]:
    """The lines of each in which they differ, and so many more before them that those of `text` stand there once."""
    old, new = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    blocks = [code for code in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if code[0] != "equal"]
    start, stop, new_start, new_stop = blocks[0][1], blocks[-1][2], blocks[0][3], blocks[-1][4]
    while start == stop or text.count("".join(old[start:stop])) != 1:
        start, new_start = start - 1, new_start - 1
    return "".join(old[start:stop]), "".join(new[new_start:new_stop])
