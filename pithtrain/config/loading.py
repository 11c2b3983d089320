"""From a TOML file and `--set` overrides to a RunConfig, or to one message that lists everything wrong."""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from pydantic_core import ErrorDetails, ValidationError

from pithtrain.config.sections import FIELDS, ConfigError, RunConfig


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a TOML file and `section.field=value` overrides describe.

    An override's value is a TOML value or a bare string; the last of several wins. Raises ConfigError.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}; give the path of a run file") from None
    except ValueError as error:  # TOML syntax, or bytes that are not UTF-8
        raise ConfigError(f"{path}: not a TOML file: {error}; correct the file") from None
    folder = path.resolve().parent
    for section, table in tables.items():
        if isinstance(table, dict):  # else the section itself is wrong, which `parse` reports
            tables[section] = {name: _absolute(f"{section}.{name}", value, folder) for name, value in table.items()}
    for section, name, value in map(_parse_override, overrides):
        if isinstance(table := tables.setdefault(section, {}), dict):
            table[name] = value
    return parse(tables, source=str(path))


def parse(tables: Mapping[str, object], source: str) -> RunConfig:
    """The run that nested tables describe, paths given as Path. Raises ConfigError naming `source`."""
    try:
        return RunConfig.model_validate({name: {} for name in RunConfig.model_fields} | dict(tables))
    except ValidationError as error:
        # by field: the members of a union report apart
        groups = groupby(error.errors(include_url=False), lambda detail: ".".join(map(str, detail["loc"][:2])))
        raise ConfigError(refusal(source, [_explain(key, list(details)) for key, details in groups])) from None


def refusal(source: str, problems: Sequence[str]) -> str:
    """One message for a list of problems with the run that `source` describes."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{source}: this run is refused, {count}:", *(f"  {problem}" for problem in problems)])


def _parse_override(item: str) -> tuple[str, str, object]:
    key, equals, text = (part.strip() for part in item.partition("="))
    section, _, name = key.partition(".")
    if not (equals and section and name) or "." in name:
        raise ConfigError(f"--set {item}: expected section.field=value; write it like --set optim.lr=1e-4")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except ValueError:  # not TOML, or more than one key
        value = text
    kinds = str if _is_path(key) else str | int | float
    return section, name, _absolute(key, value if isinstance(value, kinds) else text, Path.cwd())


def _is_path(key: str) -> bool:
    return key in FIELDS and Path in (FIELDS[key].annotation, *get_args(FIELDS[key].annotation))


def _absolute(key: str, value: Any, folder: Path) -> Any:
    """Text that stands for a path made absolute; the words of a `Literal[...] | Path` and all else kept."""
    if not _is_path(key) or not isinstance(value, str) or not value:
        return value
    words = [word for member in get_args(FIELDS[key].annotation) for word in get_args(member)]
    return value if value in words else folder / os.path.expanduser(value)  # an unknown ~user stays as it is


def _explain(key: str, details: Sequence[ErrorDetails]) -> str:
    value = details[0]["input"]
    meaning = FIELDS[key].description if key in FIELDS else ""
    match details[0]["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key; {_nearest(key)}"
        case "missing":
            return f"{key}: missing; add it under [{key.partition('.')[0]}]: {meaning}"
        case "model_type":
            return f"{key} = {value!r}: expected a table; write [{key}] and its keys below it"
        case _:
            expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
            remedy = f"change it in the file or with --set {key}=..."
            return f"{key} = {value!r}: expected {expected}; {remedy}; it is: {meaning}"


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] == "is_instance_of":
        return "a path in quotes"
    words = detail["msg"].removeprefix("Input should be ")
    return f"a number {words}" if words.startswith(("greater", "less")) else words


def _nearest(key: str) -> str:
    """A remedy for an unknown key: the same word elsewhere, the nearest of its section, or all known."""
    section, _, name = key.partition(".")
    known = [other for other in FIELDS if other.startswith(f"{section}.")] if name else list(RunConfig.model_fields)
    close = [other for other in FIELDS if name and other.endswith(f".{name}")]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
