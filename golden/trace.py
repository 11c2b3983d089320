"""A trace: what a run was, step by step, and its file. golden/README.md describes the format."""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

FORMAT = 3
FOLDER = Path(__file__).parent
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class TraceError(ValueError):
    """A trace that is not there or cannot be read: the file, what is wrong, and the remedy."""


@dataclass(frozen=True)
class Step:
    """One step: its figures before clipping, the learning rate it used, choices of each expert, biases after it."""

    loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    grad_norms: dict[str, float]
    learning_rate: float
    num_tokens_per_expert: list[list[int]]
    expert_bias: list[list[float]] | None = None


@dataclass(frozen=True)
class Costs:
    """What the first step took: matrix products and their FLOPs, collectives, "kind axis" -> (calls, bytes), and
    roundings, dtype -> values cast to it from a wider one, of all ranks together; and the most bytes that what a rank
    made in it held at once (activations, gradients of them, messages) while the schedule ran, on the rank where that
    is most.
    """

    products: int
    flops: int
    peak_bytes: int
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    roundings: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """steps in order."""

    case: str
    fingerprint: str
    steps: tuple[Step, ...]
    costs: Costs
    smallest_gap: float = math.inf


@dataclass(frozen=True)
class Golden:
    """A trace as it lies in golden/<case>.json, with where it comes from.

    costs: each layout's. provenance: torch, spec, command, config. history: reasons, oldest first.
    """

    trace: Trace
    costs: dict[str, Costs]
    provenance: dict[str, Any]
    history: tuple[dict[str, str], ...]


def path_of(case: str, folder: Path = FOLDER) -> Path:
    return folder / f"{case}.json"


def to_text(golden: Golden) -> str:
    """The file's text: a header, then one line a step, floats in full precision."""
    trace = golden.trace
    header = {
        "format": FORMAT,
        "case": trace.case,
        "fingerprint": trace.fingerprint,
        "provenance": golden.provenance,
        "history": list(golden.history),
        "smallest_gap": _plain(trace.smallest_gap),
        "costs": {layout: vars(costs) for layout, costs in golden.costs.items()},
    }
    lines = [json.dumps(_plain(vars(step)), allow_nan=False) for step in trace.steps]
    head = json.dumps(header, indent=1, allow_nan=False).removesuffix("\n}")
    return head + ',\n "steps": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE[value]
    if isinstance(value, dict):
        return {key: _number(inner) for key, inner in value.items()}
    return value


def from_text(text: str, where: str) -> Golden:
    """The golden that `text` is. TraceError names `where` when it is none."""
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise TraceError(f"{where}: format {raw['format']}, expected {FORMAT}; {REMEDY}")
        steps = tuple(_step(line) for line in raw["steps"])
        costs = {layout: _costs(values) for layout, values in raw["costs"].items()}
        one, gap = next(iter(costs.values())), _number(raw["smallest_gap"])
        trace = Trace(raw["case"], raw["fingerprint"], steps, one, gap)
        return Golden(trace, costs, raw["provenance"], tuple(raw["history"]))
    except (KeyError, TypeError, AttributeError, StopIteration, json.JSONDecodeError) as error:
        raise TraceError(f"{where}: not a trace ({type(error).__name__}: {error}); {REMEDY}") from error


def _costs(values: dict[str, Any]) -> Costs:
    collectives = {key: (calls, size) for key, (calls, size) in values["collectives"].items()}
    return Costs(**{**values, "collectives": collectives})


def _step(line: dict[str, Any]) -> Step:
    names = {spec.name for spec in fields(Step)}
    if line.keys() != names:
        raise TypeError(f"a step has fields {sorted(line)}, expected {sorted(names)}")
    return Step(**{name: _number(value) for name, value in line.items()})


REMEDY = 'restore the file, or write it anew: pith verify --update --reason "..."'


def read(case: str, folder: Path = FOLDER) -> Golden:
    """The golden of a case. TraceError when it is missing or damaged."""
    path = path_of(case, folder)
    if not path.is_file():
        raise TraceError(f"{path}: no such trace; {REMEDY}")
    return from_text(path.read_text(), str(path))
