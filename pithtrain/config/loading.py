"""From a TOML file and `--set` overrides to a RunConfig, or to one message that lists everything wrong."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pithtrain.config.sections import ConfigError, RunConfig, Section

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a TOML file and `section.field=value` overrides describe.

    An override's value is a TOML value or a bare string; the last of several wins. Relative paths in the file
    are taken from its folder, those in overrides from the current directory. Raises ConfigError.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}; give the path of a run file") from None
    except ValueError as error:  # TOML syntax, or bytes that are not UTF-8
        raise ConfigError(f"{path}: not a TOML file: {error}; correct the file") from None
    tables = _with_absolute_paths(tables, path.resolve().parent)
    for section, field, value in map(_parse_override, overrides):
        table = tables.setdefault(section, {})
        if isinstance(table, dict):  # else the section itself is wrong, which `parse` reports
            table[field] = value
    return parse(_with_absolute_paths(tables, Path.cwd()), source=str(path))


def parse(tables: Mapping[str, object], source: str) -> RunConfig:
    """The run that nested tables describe, paths given as Path. Raises ConfigError naming `source`."""
    try:
        return RunConfig.model_validate({name: {} for name in RunConfig.model_fields} | dict(tables))
    except ValidationError as error:
        raise ConfigError(refusal(source, _explain(error))) from None


def refusal(source: str, problems: Sequence[str]) -> str:
    """One message for a list of problems with the run that `source` describes."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{source}: this run is refused, {count}:", *(f"  {problem}" for problem in problems)])


def _section(name: str) -> type[Section] | None:
    field = RunConfig.model_fields.get(name)
    section = field.annotation if field is not None else None
    return section if isinstance(section, type) and issubclass(section, Section) else None


def _field(section: str, field: str) -> FieldInfo | None:
    known = _section(section)
    return known.model_fields.get(field) if known is not None else None


def _parse_override(item: str) -> tuple[str, str, object]:
    key, equals, text = item.partition("=")
    section, _, field = key.strip().partition(".")
    if not (equals and section and field) or "." in field:
        raise ConfigError(f"--set {item}: expected section.field=value; write it like --set optim.lr=1e-4")
    text = text.strip()
    return section, field, text if _is_path(_field(section, field)) else _toml_value(text)


def _toml_value(text: str) -> object:
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    is_one_value = len(value) == 1 and isinstance(value["value"], bool | int | float | str)
    return value["value"] if is_one_value else text


def _with_absolute_paths(tables: Mapping[str, object], folder: Path) -> dict[str, Any]:
    return {
        section: {name: _absolute(_field(section, name), value, folder) for name, value in table.items()}
        if isinstance(table, dict)
        else table
        for section, table in tables.items()
    }


def _absolute(field: FieldInfo | None, value: object, folder: Path) -> object:
    """Text that stands for a path made absolute; the words of a `Literal[...] | Path` and all else kept."""
    if field is None or not _is_path(field) or not isinstance(value, str) or not value:
        return value
    words = [word for member in get_args(field.annotation) for word in get_args(member)]
    return value if value in words else folder / Path(value).expanduser()


def _is_path(field: FieldInfo | None) -> bool:
    return field is not None and (field.annotation is Path or Path in get_args(field.annotation))


def _explain(error: ValidationError) -> list[str]:
    """One line per field; the members of a union report apart and are joined with "or"."""
    groups: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        groups.setdefault(".".join(str(part) for part in detail["loc"][:2]), []).append(detail)
    return [_explain_field(name, details) for name, details in groups.items()]


def _explain_field(name: str, details: Sequence["ErrorDetails"]) -> str:
    section, _, field = name.partition(".")
    value = details[0]["input"]
    info = _field(section, field)
    meaning = info.description if info is not None else ""
    match details[0]["type"]:
        case "extra_forbidden":
            return f"{name}: unknown key; {_nearest(section, field)}"
        case "missing":
            return f"{name}: missing; add it under [{section}]: {meaning}"
        case "model_type":
            return f"{name} = {value!r}: expected a table; write [{name}] and its keys below it"
        case _:
            expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
            remedy = f"change it in the file or with --set {name}=..."
            return f"{name} = {value!r}: expected {expected}; {remedy}; it is: {meaning}"


def _expected(detail: "ErrorDetails") -> str:
    match detail["type"]:
        case "is_instance_of":
            return "a path in quotes"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return "a number " + detail["msg"].removeprefix("Input should be ")
        case _:
            words = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            return words.removeprefix("equal to ")


def _nearest(section: str, field: str) -> str:
    """A remedy for an unknown key: the same word elsewhere, the nearest of its section, or all known."""
    known = list(_names(section)) if field else list(RunConfig.model_fields)
    wanted = f"{section}.{field}" if field else section
    elsewhere = [f"{other}.{field}" for other in RunConfig.model_fields if f"{other}.{field}" in _names(other)]
    close = elsewhere or difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"


def _names(section: str) -> Iterable[str]:
    known = _section(section)
    return [f"{section}.{name}" for name in known.model_fields] if known is not None else []
