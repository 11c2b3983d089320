"""Command-line words to the parameters of a skill, and help made from their declaration."""

import argparse
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NoReturn, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from skills.frame.contract import P


class BadParameters(ValueError):
    """The words cannot be read as parameters: what, got, expected and the remedy."""


@dataclass(frozen=True)
class Order(Generic[P]):
    """What a user asks for: the parameters, and the two options that every skill has."""

    params: P
    dry_run: bool
    json: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadParameters(f"{message}; expected: {' '.join(self.format_usage().split()[1:])}; see {self.prog} --help")


def _positional(field: FieldInfo) -> bool:
    return field.is_required() and not field.kw_only


def _shown(name: str, field: FieldInfo) -> str:
    """How the command line names a field."""
    return name.upper() if _positional(field) else "--" + name.replace("_", "-")


def _inner(annotation: Any) -> Any:
    """An annotation without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _type_name(annotation: Any) -> str:
    kind = _inner(annotation)
    if get_origin(kind) is Literal:
        return "|".join(str(value) for value in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return "|".join(_type_name(part) for part in get_args(kind))
    if get_origin(kind) in (list, tuple):
        return f"{_type_name(get_args(kind)[0])}, repeatable"
    return kind.__name__.lower() if isinstance(kind, type) else str(kind)


def _add(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    kind, shown = _inner(field.annotation), _shown(name, field)
    default = "" if field.is_required() else f"; default: {field.get_default(call_default_factory=True)}"
    extra: dict[str, Any] = {"help": f"{field.description or ''} ({_type_name(kind)}{default})".replace("%", "%%")}
    if kind is bool:
        extra["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) in (list, tuple):
        extra |= {"nargs": "+"} if _positional(field) else {"action": "append"}
    if _positional(field):
        parser.add_argument(name, metavar=shown, **extra)
        return
    if kind is not bool:
        extra["metavar"] = name.upper()
    parser.add_argument(shown, dest=name, required=field.is_required(), default=argparse.SUPPRESS, **extra)


def make_parser(name: str, about: str, params: type[P]) -> argparse.ArgumentParser:
    """The parser of a skill's command line: positional fields in their order, then options."""
    parser = _Parser(prog=f"pith skill run {name}", description=about.replace("%", "%%"), allow_abbrev=False)
    for field in params.model_fields:
        _add(parser, field, params.model_fields[field])
    parser.add_argument("--dry-run", action="store_true", help="Show what would change, and change nothing.")
    parser.add_argument("--json", action="store_true", help="Print the whole result as JSON.")
    return parser


def read(name: str, about: str, params: type[P], words: Sequence[str]) -> Order[P]:
    """The order in `words`. Raises BadParameters with all that is wrong. `--help` prints the help and exits with 0."""
    found = vars(make_parser(name, about, params).parse_args(list(words)))
    dry_run, json = found.pop("dry_run"), found.pop("json")
    try:
        return Order(params.model_validate(found), dry_run, json)
    except ValidationError as error:
        faults = "\n".join(_fault(params, dict(fault)) for fault in error.errors())
        raise BadParameters(f"{faults}\nsee pith skill run {name} --help") from error


def _fault(params: type[P], fault: dict[str, Any]) -> str:
    """One thing wrong, under the name that the user typed. A validator's own words stand as they are."""
    name = next((str(part) for part in fault["loc"]), "")
    where = f"{_shown(name, params.model_fields[name])}: " if name in params.model_fields else ""
    if fault["type"] == "value_error":
        return f"{where}{fault['ctx']['error']}"
    kind = f" ({_type_name(params.model_fields[name].annotation)})" if where else ""
    return f"{where}got {fault['input']!r}: {fault['msg'][:1].lower()}{fault['msg'][1:]}{kind}"
