"""A replay held against the run's own record, metrics.jsonl: the same run, the same up to rounding, or another one.

The same machine repeats a run bit for bit. Another machine or another torch rounds otherwise: the first step that
differs then differs by a rounding, and only what is trained on top of it may take the two further apart. So the first
difference decides. The learning rate and the tokens seen know no rounding.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Literal

from pydantic import BaseModel

EXACT, ROUNDED = ("learning_rate", "tokens_seen"), ("loss", "grad_norm")
LIBRARIES = 1e-9  # what two libraries' cosines may differ by
ROUNDING = {"fp32": 1e-5}  # relative, of one step from the same weights: another order of summation
COARSE = 1e-2  # the same in bf16 or FP8, or between one of them and fp32

Number = float | str
Verdict = Literal["the same run", "the same up to rounding", "another run"]


class Difference(BaseModel, frozen=True):
    """A figure of a step that is not as recorded. distance: relative to the larger one."""

    step: int
    figure: str
    replayed: Number
    recorded: Number
    distance: Number

    def words(self) -> str:
        return f"step {self.step}: {self.figure} {self.replayed}, recorded {self.recorded}"


class Comparison(BaseModel, frozen=True):
    """Of the replayed steps, `compared` are recorded and `same` are equal exactly. first: the first that differs;
    largest: the one that differs most. unmet: a step that the run skipped and the replay found finite; nothing behind
    it is compared.
    """

    compared: int
    same: int
    first: Difference | None
    largest: Difference | None
    limit: float
    unmet: int | None

    @property
    def verdict(self) -> Verdict:
        if self.first is None:
            return "the same run"
        return "the same up to rounding" if float(self.first.distance) <= self.limit else "another run"


def number(value: Number) -> Number:
    """As JSON takes it: a number, or the word for one that is not finite."""
    value = float(value)
    return value if isfinite(value) else str(value)


def compare(
    lines: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]], precision: str
) -> Comparison | None:
    """None where there is nothing to compare. lines, records: of steps; precision: train.precision."""
    known = {record["step"]: record for record in records if "loss" in record}
    found, compared, unmet = list[list[Difference]](), 0, None
    for line in lines:
        if (record := known.get(line["step"])) is None:
            continue
        if record["skipped"] and not line["skipped"]:
            unmet = line["step"]
            break
        compared += 1
        if differences := _differences(line, record):
            found.append(differences)
    if not compared and unmet is None:
        return None
    every = [difference for differences in found for difference in differences]
    return Comparison(
        compared=compared,
        same=compared - len(found),
        first=_largest(found[0]) if found else None,
        largest=_largest(every) if every else None,
        limit=ROUNDING.get(precision, COARSE),
        unmet=unmet,
    )


def _largest(differences: Sequence[Difference]) -> Difference:
    return max(differences, key=lambda difference: float(difference.distance))


def _differences(line: Mapping[str, Any], record: Mapping[str, Any]) -> list[Difference]:
    found = []
    for figure in (*EXACT, *ROUNDED):
        ours, theirs = float(line[figure]), float(record[figure])
        distance = relative(ours, theirs)
        if figure in EXACT:
            distance = 0.0 if distance <= LIBRARIES else float("inf")
        if distance:
            step, numbers = line["step"], (number(ours), number(theirs), number(distance))
            found.append(
                Difference(step=step, figure=figure, replayed=numbers[0], recorded=numbers[1], distance=numbers[2])
            )
    return found


def relative(a: float, b: float) -> float:
    """|a - b| over the larger of the two; of two that are not finite, 0 where they are of one kind."""
    if a == b or (a != a and b != b):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if isfinite(a) and isfinite(b) else float("inf")
