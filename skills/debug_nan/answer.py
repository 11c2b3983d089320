"""What the investigation is asked, what it answers, and the files that carry both. Imports no torch."""

from pathlib import Path

from pydantic import BaseModel

from skills.debug_nan.finding import Origin

ORDER, ANSWER = "order.json", "answer.json"


class Order(BaseModel, frozen=True):
    """What to do: see replay.Job. recorded: the run folder whose metrics.jsonl the replay is held against."""

    run: Path
    overrides: tuple[str, ...]
    starts: tuple[Path | None, ...]
    last: int
    ranks: int
    ladder: bool
    recorded: Path | None
    seconds: float


class Rung(BaseModel, frozen=True):
    """One change to the run, tried on the one step. cured: whether it is finite then; None where it could not be."""

    name: str
    overrides: tuple[str, ...]
    cured: bool | None
    note: str = ""


class Answer(BaseModel, frozen=True):
    """What the replay found. same: replayed steps whose record equals the run's own, of `compared` that it has."""

    start: Path | None
    first: int
    replayed: int
    bad: int | None
    loss: float | str | None
    grad_norm: float | str | None
    same: int
    compared: int
    deterministic: bool | None
    origin: Origin | None
    others: int
    notes: tuple[str, ...]
    state: Path | None
    rungs: tuple[Rung, ...] = ()
