"""What is found: a tensor's figures, the place of a value's origin, and the words for both. Imports no torch."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["operator", "arrived", "memory", "state"]
PHASES = ("forward", "backward", "step")


class Stats(BaseModel, frozen=True):
    """A tensor in figures; minimum, maximum and mean are those of its finite values, None where it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    non_finite: int
    minimum: float | None
    maximum: float | None
    mean: float | None

    @staticmethod
    def of(name: str, tensor: "Tensor") -> "Stats":
        values = tensor.detach().double()
        good = values[values.isfinite()]
        figures = (good.min().item(), good.max().item(), good.mean().item()) if good.numel() else (None, None, None)
        low, high, mean = figures
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Stats(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            non_finite=values.numel() - good.numel(),
            minimum=low,
            maximum=high,
            mean=mean,
        )

    def words(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "scalar"
        values = "no finite value"
        if self.minimum is not None:
            values = f"min {self.minimum:.3g} max {self.maximum:.3g} mean {self.mean:.3g}"
        return f"{self.name} [{shape}] {self.dtype}: {values}, {self.non_finite} not finite"


def is_finite(tensor: "Tensor") -> bool:
    """Whether every value is."""
    tensor = tensor.detach()
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())


class Place(BaseModel, frozen=True):
    """Where in a step, in the order of causes: by micro-batch, forward before backward, stage by stage.

    name: of a segment, an exchange or a part of the step. index: its number within the pass. microbatch: None for what
    comes behind all of them.
    """

    name: str
    phase: Literal["forward", "backward", "step"]
    microbatch: int | None = None
    stage: int = 0
    index: int = 0

    def key(self) -> tuple[float, int, int, int]:
        microbatch = float("inf") if self.microbatch is None else self.microbatch
        stage = -self.stage if self.phase == "backward" else self.stage
        return microbatch, PHASES.index(self.phase), stage, self.index


class Row(BaseModel, frozen=True):
    """Where in a batch a tensor's row comes from. sequence, position: in what data rank `rank` reads."""

    rank: int
    sequence: int
    position: int
    padding: bool


class Origin(BaseModel, frozen=True):
    """A value that is not finite and that nothing non-finite led to, as one rank saw it.

    kind: the operator made it; or it arrived from an exchange; or it was in memory that no operator was seen to write;
    or it was there before the step. code: the line of ours that asked for the operator. parameter: the one it belongs
    to, where it is a weight, a gradient or a moment. expert: its global number.
    """

    kind: Kind
    rank: int
    place: Place
    order: int
    operator: str = ""
    code: str = ""
    output: Stats | None = None
    inputs: tuple[Stats, ...] = ()
    parameter: str = ""
    expert: int | None = None
    row: Row | None = None

    def key(self) -> tuple[float, ...]:
        return *self.place.key(), self.rank, self.order

    def words(self) -> str:
        """One line that names the place."""
        where = [f"rank {self.rank}"]
        if self.place.microbatch is not None:
            where.append(f"micro-batch {self.place.microbatch}")
        where.append(f"{self.place.name} {self.place.phase}" if self.place.phase != "step" else self.place.name)
        how = {
            "operator": f"operator {self.operator}",
            "arrived": "finite when sent, not finite on arrival",
            "memory": "read from memory that no operator was seen to write",
            "state": "there before the step",
        }[self.kind]
        parts = [", ".join(where), how]
        parts += [f"at {self.code}"] if self.code else []
        parts += [self.parameter] if self.parameter else []
        parts += [f"expert {self.expert}"] if self.expert is not None else []
        if self.row is not None:
            kind = "padding" if self.row.padding else "valid"
            parts.append(
                f"a {kind} row (rank {self.row.rank}, sequence {self.row.sequence}, position {self.row.position})"
            )
        return "; ".join(parts)
