"""What a checkpoint needs from the rest of the trainer, and the part of a run's state that is not tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pithtrain.models.names import NameTable, Shape

T = TypeVar("T")

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


class ModelState(Protocol):
    """The model's weights and AdamW moments, sharded over ranks; kind is WEIGHT or one of MOMENTS."""

    def names(self) -> list[str]:
        """Global parameter names in model order, the same on every rank."""

    def gather(self, kind: str, name: str) -> Tensor:
        """Collective. The whole tensor (all experts), fp32, on the CPU, on every rank."""

    def scatter(self, kind: str, name: str, tensor: Tensor) -> None:
        """Local. Keep what this rank owns of the tensor, which holds all of it or its `local_experts`."""

    def holds(self, name: str) -> bool:
        """Whether this rank keeps anything of `name`."""

    def local_experts(self, name: str) -> range | None:
        """The experts of `name`, which this rank holds, that it keeps; None for a dense parameter."""


class Family(Protocol):
    """A model of a family: its names, and its config.json."""

    @property
    def names(self) -> NameTable: ...

    def config_json(self) -> dict[str, Any]: ...

    def respell(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Any config.json of the family as `config_json` would spell it. ValueError for what is not built."""


def family_shapes(state: ModelState, family: Family) -> dict[str, Shape]:
    """The family's tensors, by name in model order."""
    return {theirs: shape for name in state.names() for theirs, shape in family.names.family_names(name)}


@dataclass(frozen=True)
class Ranks:
    """This rank among `world`. `agree` is a collective: the logical and of every rank's answer."""

    rank: int
    world: int
    agree: Callable[[bool], bool]

    def together(self, path: Path, read: Callable[[], T]) -> T:
        """Collective. What a local reading of `path` gives, or ValueError on every rank if it failed on any."""
        error = None
        try:
            result = read()
        except (ValueError, OSError) as problem:
            error = problem
        if self.agree(error is None):
            return result
        raise ValueError(str(error or f"{path}: another rank could not read it; see its message")) from error


ONE_RANK = Ranks(0, 1, lambda ok: ok)


@dataclass(frozen=True)
class TrainState:
    """A run's state beside its tensors; all of it goes through JSON."""

    step: int  # optimizer steps taken, skipped ones included
    optimizer_steps: int  # those that changed the weights: AdamW's count for bias correction
    data_position: int  # next sample of the data order, counted over the whole run, independent of the mesh
    tokens_seen: int
    nonfinite_in_a_row: int = 0  # skipped steps
    nonfinite_total: int = 0
    config_fingerprint: str = ""  # of the run config that was training
    mesh: dict[str, int] = field(default_factory=dict)  # axis name -> size, for the record: any mesh may load
    random_streams: dict[str, str] = field(default_factory=dict)  # stream name -> its state as text

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def read(cls, path: Path) -> "TrainState":
        """Raises ValueError when the file's keys are not exactly the fields above."""
        raw = json.loads(path.read_bytes())
        expected = {f.name for f in fields(cls)}
        if raw.keys() != expected:
            raise ValueError(
                f"{path}: keys that differ from this version's: {sorted(raw.keys() ^ expected)}; "
                "load it with the version that wrote it, or start from its weights only"
            )
        return cls(**raw)
