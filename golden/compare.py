"""Two traces against each other: every figure that differs, by step and field, the first one first.

Floats agree when their difference is at most RTOL of the golden one (learning rates are arithmetic on a few numbers:
SCHEDULE_RTOL; a lower precision has its band); counts and biases agree when they are equal. NaN agrees with nothing,
nor does a missing step or field.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from golden.trace import Costs, Golden, Step, Trace
from pithtrain.ops.linear import Precision

RTOL = 1e-5
SCHEDULE_RTOL = 1e-12
MEMORY_RTOL = 1e-2
EXACT = ("num_tokens_per_expert", "expert_bias")


@dataclass(frozen=True)
class Band:
    """How far figures may be apart, relative: losses, and gradient norms."""

    loss: float = RTOL
    norms: float = RTOL

    def of(self, field: str) -> float:
        if field == "learning_rate":
            return SCHEDULE_RTOL
        return self.norms if field.startswith("grad_norm") else self.loss


SAME = Band()
BANDS: dict[Precision, Band] = {"fp32": SAME, "bf16": Band(0.0025, 0.02), "fp8": Band(0.02, 0.15)}  # see README.md


@dataclass(frozen=True)
class Difference:
    """Where and what. step: 0 at the first; -1 for what belongs to no step. relative: nan where it has no meaning."""

    step: int
    field: str
    expected: Any
    got: Any
    relative: float = math.nan

    def __str__(self) -> str:
        where = f"step {self.step}, {self.field}" if self.step >= 0 else self.field
        relative = "" if math.isnan(self.relative) else f" (relative {self.relative:.1e})"
        return f"{where}: expected {self.expected}, got {self.got}{relative}"


@dataclass(frozen=True)
class Comparison:
    """largest: the largest relative difference of a float in any compared step, nan if one is not a number."""

    differences: tuple[Difference, ...]
    num_steps: int
    largest: float


def relative(expected: float, got: float) -> float:
    """|got - expected| / |expected|; 0 for equal numbers, inf where only expected is 0, nan for NaN and infinities."""
    if not (math.isfinite(expected) and math.isfinite(got)):
        return math.nan
    if expected == got:
        return 0.0
    return abs(got - expected) / abs(expected) if expected else math.inf


def figures(step: Step) -> dict[str, Any]:
    """A step's fields in the order in which a difference is named; a room's gradient norm has its own."""
    flat: dict[str, Any] = {}
    for name, value in vars(step).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{room}": norm for room, norm in value.items()}
        else:
            flat[name] = value
    return flat


def _step_differences(index: int, expected: Step, got: Step, band: Band) -> Iterator[Difference]:
    ours, theirs = figures(got), figures(expected)
    for field in theirs | ours:
        if field not in theirs or field not in ours:
            yield Difference(index, field, theirs.get(field, "no such field"), ours.get(field, "no such field"))
        elif field in EXACT:
            if theirs[field] != ours[field]:
                yield Difference(index, field, theirs[field], ours[field])
        else:
            distance = relative(theirs[field], ours[field])
            if not distance <= band.of(field):
                yield Difference(index, field, theirs[field], ours[field], distance)


def compare(expected: Trace, got: Trace, num_steps: int | None = None, band: Band = SAME) -> Comparison:
    """All that differs within the first `num_steps` steps of `expected` (None: all, and `got` must have no more)."""
    wanted = len(expected.steps) if num_steps is None else num_steps
    differences = []
    if expected.case != got.case:
        differences.append(Difference(-1, "case", expected.case, got.case))
    pairs = list(zip(expected.steps[:wanted], got.steps[:wanted], strict=False))
    for index, (theirs, ours) in enumerate(pairs):
        differences += _step_differences(index, theirs, ours, band)
    surplus = num_steps is None and len(got.steps) > wanted
    if len(pairs) < wanted or surplus:
        differences.append(Difference(len(pairs), "number of steps", wanted, len(got.steps)))
    return Comparison(tuple(differences), len(pairs), _largest(pairs))


def _largest(pairs: list[tuple[Step, Step]]) -> float:
    largest = 0.0
    for expected, got in pairs:
        theirs, ours = figures(expected), figures(got)
        for field in theirs.keys() & ours.keys():
            if field not in EXACT:
                distance = relative(theirs[field], ours[field])
                if math.isnan(distance):
                    return math.nan
                largest = max(largest, distance)
    return largest


def compare_costs(golden: Golden, layout: str, got: Costs) -> tuple[Difference, ...]:
    """What the first step cost: exactly, but for memory, since operators' own allocations differ between torches."""
    expected = golden.costs.get(layout)
    if expected is None:
        return (Difference(-1, "costs", "none in the file", got),)
    differences = []
    for (field, wanted), value in zip(vars(expected).items(), vars(got).values(), strict=True):
        distance = relative(wanted, value) if field == "peak_bytes" else float(wanted != value)
        if distance > MEMORY_RTOL:
            differences.append(Difference(-1, field, wanted, value))
    return tuple(differences)
