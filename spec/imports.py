"""The import rule of architecture.toml, checked on the graph of the packages' imports.

Imports inside functions count; imports under ``if TYPE_CHECKING`` do not, since they never run.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import grimp

from spec.document import ImportRule, Problem


def inside(module: str, name: str) -> bool:
    """Is ``module`` the module ``name``, or below it."""
    return module == name or module.startswith(name + ".")


def check_imports(root: Path, rule: ImportRule) -> Iterator[Problem]:
    """Every import that breaks the rule, with its line; and every module that has no place in it."""
    elsewhere = list(_not_under(root, rule.packages))
    if elsewhere:
        yield from elsewhere
        return
    graph = grimp.build_graph(
        *rule.packages, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    for importer in sorted(module for module in graph.modules if not graph.is_module_squashed(module)):
        if row_of(importer, rule) is None and not _holds_layers(importer, rule):
            yield Problem(where=importer, what="has no place in the layers of spec/architecture.toml")
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            for fault in (upward(importer, imported, rule), reserved(importer, imported, rule)):
                if fault:
                    details = graph.get_import_details(importer=importer, imported=imported)
                    yield Problem(where=f"{importer}, line {details[0]['line_number']}", what=fault)
    yield from _forbidden_chains(graph, rule)


def row_of(module: str, rule: ImportRule) -> tuple[int, str] | None:
    """The row of the layers that a module stands in, from 0 at the top, and the name there."""
    places = [(row, name) for row, names in enumerate(rule.layers) for name in names if inside(module, name)]
    return max(places, key=lambda place: len(place[1]), default=None)


def upward(importer: str, imported: str, rule: ImportRule) -> str | None:
    """What is wrong if the import goes up, or sideways to a neighbour."""
    here, there = row_of(importer, rule), row_of(imported, rule)
    if here is None or there is None or here[1] == there[1] or here[0] < there[0]:
        return None
    direction = "above it" if here[0] > there[0] else "beside it"
    return f"imports {imported}, which stands {direction}: {here[1]} may not import {there[1]}"


def reserved(importer: str, imported: str, rule: ImportRule) -> str | None:
    """What is wrong if the importer is not among those that may, or the import not among those allowed."""
    for name, importers in rule.only.items():
        known = any(inside(importer, friend) for friend in (name, *importers))
        if inside(imported, name) and not known:
            return f"imports {imported}, which only {', '.join(importers)} may import"
    for name, targets in rule.allowed.items():
        known = any(inside(imported, target) for target in (name, *targets))
        if inside(importer, name) and not known:
            return f"imports {imported}, but {name} may import only {', '.join(targets)}"
    return None


def _holds_layers(module: str, rule: ImportRule) -> bool:
    return any(inside(name, module) for names in rule.layers for name in names)


def _not_under(root: Path, packages: tuple[str, ...]) -> Iterator[Problem]:
    """Packages that Python would take from elsewhere than ``root``: their imports would be another tree's."""
    for package in packages:
        found = importlib.util.find_spec(package)
        folders = list(found.submodule_search_locations or ()) if found else []
        if not any(Path(folder).resolve() == (root / package).resolve() for folder in folders):
            what = f"found at {folders or 'no path'}, expected {root / package}; install this checkout"
            yield Problem(where=package, what=what)


def _forbidden_chains(graph: grimp.ImportGraph, rule: ImportRule) -> Iterator[Problem]:
    for module, targets in rule.without.items():
        if module not in graph.modules:
            yield Problem(where=module, what="named in spec/architecture.toml, but no such module")
            continue
        for target in sorted(set(targets) & graph.modules):
            chain = graph.find_shortest_chain(importer=module, imported=target)
            if chain:
                yield Problem(where=module, what=f"must not reach {target}: {' > '.join(chain)}")
