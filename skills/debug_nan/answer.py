"""What the investigation is asked, what it answers, and the files that carry both. Imports no torch."""

from pathlib import Path

from pydantic import BaseModel

from skills.debug_nan.finding import Origin
from skills.debug_nan.record import Comparison, Number

ORDER, ANSWER = "order.json", "answer.json"
_LEAVES = "leaves weights or moments that are not finite"


class Order(BaseModel, frozen=True):
    """What to do: see replay.Job. first: the step of the first start. recorded: the run folder whose metrics.jsonl the
    replay is held against. changed: whether the overrides change the run's numbers. notes: on where it starts.
    """

    run: Path
    overrides: tuple[str, ...]
    starts: tuple[Path | None, ...]
    first: int
    last: int
    ranks: int
    ladder: bool
    recorded: Path | None
    changed: bool
    seconds: float
    notes: tuple[str, ...]


class Rung(BaseModel, frozen=True):
    """One change to the run, tried on the last `steps` steps. cured: whether they are finite then; None where it could
    not be. command: trains on with it, from where it was tried.
    """

    name: str
    overrides: tuple[str, ...]
    steps: int
    cured: bool | None
    note: str = ""
    command: str = ""


class Line(BaseModel, frozen=True):
    """A replayed step; the gradient's norm before clipping."""

    step: int
    loss: Number
    grad_norm: Number
    learning_rate: float


class Answer(BaseModel, frozen=True):
    """What the replay found. start: a checkpoint, or None, the run's beginning. bad: the step that is not finite, None
    if all are. lines: of the last steps. largest_weights: the largest absolute value of a weight at the start, and
    before the bad step. deterministic: whether the bad step came out the same again. others: how many values more began
    by themselves. record: None where nothing is recorded.
    """

    start: Path | None
    first: int
    replayed: int
    bad: int | None
    lines: tuple[Line, ...]
    largest_weights: tuple[Number, Number]
    deterministic: bool | None
    origin: Origin | None
    others: int
    notes: tuple[str, ...]
    state: Path | None = None
    record: Comparison | None = None
    changed: bool = False
    rungs: tuple[Rung, ...] = ()

    @property
    def is_another_run(self) -> bool:
        """Whether the replay is plainly not the run that was recorded, though nobody asked for that."""
        return self.record is not None and self.record.verdict == "another run" and not self.changed

    def headline(self) -> str:
        """The bad step in a line."""
        if not self.lines:
            return f"step {self.bad} cannot be finite: what it starts from is not"
        line = self.lines[-1]
        where = "is not finite" if isinstance(line.loss, str) or isinstance(line.grad_norm, str) else _LEAVES
        return f"step {line.step} {where}: loss {line.loss}, gradient norm {line.grad_norm}"
