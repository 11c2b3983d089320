"""What a checkpoint needs from the rest of the trainer, and the part of a run's state that is not tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


class ModelState(Protocol):
    """The model's weights and AdamW moments, sharded over ranks; kind is WEIGHT or one of MOMENTS."""

    def names(self) -> list[str]:
        """Global parameter names in model order, the same on every rank."""

    def gather(self, kind: str, name: str) -> Tensor:
        """Collective. The whole tensor (all experts), fp32, on the CPU, on every rank."""

    def scatter(self, kind: str, name: str, expert: slice | None, tensor: Tensor) -> None:
        """Local. Keep what this rank owns of the tensor: all of it, or only the experts in the slice."""

    def local_experts(self, name: str) -> range | None:
        """The experts of `name` that this rank holds; None for a dense parameter."""


class Names(Protocol):
    """A family's tensor names. `experts` None means the whole parameter, all experts if it has any."""

    def to_family(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A whole parameter of ours as the family's tensors."""

    def family_names(self, name: str, experts: range | None = None) -> list[tuple[str, tuple[int, ...]]]:
        """The family's tensors, with their shapes, that make up (these experts of) our parameter."""

    def from_family(self, name: str, experts: range | None, read: Callable[[str], Tensor]) -> Tensor:
        """(These experts of) our parameter, built from the family's tensors."""


class Family(Protocol):
    """A model of a family: its names, and its config.json."""

    @property
    def names(self) -> Names: ...

    def config_json(self) -> dict[str, Any]:
        """The model's config.json."""

    def respell(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Any config.json of the family as `config_json` would spell it. ValueError for what is not built."""


@dataclass(frozen=True)
class Ranks:
    """This rank among `world`. `agree` is a collective: the logical and of every rank's answer."""

    rank: int
    world: int
    agree: Callable[[bool], bool]


ONE_RANK = Ranks(0, 1, lambda ok: ok)


@dataclass(frozen=True)
class TrainState:
    """A run's state beside its tensors; all of it goes through JSON.

    step                optimizer steps taken, skipped ones included
    optimizer_steps     steps that changed the weights: AdamW's count for bias correction
    data_position       next sample of the data order, counted over the whole run, independent of the mesh
    tokens_seen         tokens trained on so far
    nonfinite_in_a_row, nonfinite_total   skipped steps
    config_fingerprint  of the run config that was training
    mesh                axis name -> size, for the record: any mesh may load
    random_streams      stream name -> its state as text
    """

    step: int
    optimizer_steps: int
    data_position: int
    tokens_seen: int
    nonfinite_in_a_row: int = 0
    nonfinite_total: int = 0
    config_fingerprint: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    random_streams: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def read(cls, path: Path) -> "TrainState":
        """Raises ValueError when the file's keys are not exactly the fields above."""
        raw = json.loads(path.read_bytes())
        expected = {f.name for f in fields(cls)}
        got = set(raw) if isinstance(raw, dict) else set()
        if got != expected:
            raise ValueError(
                f"{path}: keys that differ from this version's: {sorted(got ^ expected)}; "
                "load it with the version that wrote it, or start from its weights only"
            )
        return cls(**raw)
