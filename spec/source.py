"""Reading Python sources as syntax trees, never importing them: do names exist, which names are used, how
long.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_files(root: Path, path: str) -> list[Path]:
    """The Python files at ``path``, a file or a folder under ``root``, sorted."""
    target = root / path
    return [target] if target.is_file() else sorted(target.rglob("*.py"))


def count_lines(files: list[Path]) -> int:
    """Physical lines, blank ones and comments included."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def module_file(root: Path, module: str) -> Path | None:
    """Where a dotted module lies under ``root``, or None."""
    base = root.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def defines(file: Path, names: list[str]) -> bool:
    """Is there a definition ``names[0]`` in the file, with ``names[1]`` inside it, and so on."""
    body: list[ast.stmt] = parse(file).body
    for name in names:
        found = next((node for node in body if name in _names_of(node)), None)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, Definition):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def uses_of(tree: ast.Module, name: str) -> set[tuple[int, str]]:
    """Uses of ``name``, a dotted path such as ``torch.distributed``, as (line, attribute), "" for the name
    alone.

    Import aliases are followed: after ``import torch.distributed as dist``, ``dist.barrier`` is the
    attribute "barrier". A ``from`` import is a use of what it imports, a plain import is none.
    """
    under = [(line, _under(path, name)) for line, path in _paths(tree)]
    uses = {(line, attribute) for line, attribute in under if attribute is not None}
    named = {line for line, attribute in uses if attribute}
    return {(line, attribute) for line, attribute in uses if attribute or line not in named}


def _paths(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name, attribute chain and ``from`` import, as (line, dotted path with aliases resolved)."""
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = _dotted(node).partition(".")
            yield node.lineno, f"{aliases.get(first, first)}{dot}{rest}"


def _under(path: str, name: str) -> str | None:
    """The attribute of ``name`` that ``path`` is or starts with, "" for ``name`` itself, None for another."""
    if path == name:
        return ""
    return path[len(name) + 1 :].split(".")[0] if path.startswith(name + ".") else None


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted path it stands for."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; "" where the chain does not start at a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = _dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def calls_of(tree: ast.Module, name: str, arguments: tuple[str, ...]) -> Iterator[int]:
    """Lines that call the function ``name`` with a first argument named, or ending in, one of ``arguments``
    (any, if there are none); with a leading dot, lines that call a method of that name.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and name == f".{node.func.attr}":
            yield node.lineno
        if isinstance(node.func, ast.Name) and node.func.id == name:
            first = _dotted(node.args[0]).split(".")[-1] if node.args else ""
            if not arguments or first in arguments:
                yield node.lineno
