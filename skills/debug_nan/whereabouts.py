"""Where in a step we are, and whose a value is: which parameter's, which expert's, which row's.

T tokens, K experts a token, R rows received, N copies, L local experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pithtrain.data import Batch
from pithtrain.layers.moe import LocalExperts
from pithtrain.models.decoder import Attended, SparseLayer
from pithtrain.ops.linear import Compute
from pithtrain.ops.permute import plan
from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.shard import Flat
from pithtrain.parallel.tape import Phase
from pithtrain.step import Trainee
from skills.debug_nan.finding import Place

MOVES = ("hidden", "grad")  # messages between stages
# whose rows an exchange brings
ARRIVED = {
    ("dispatch", "forward"): "received",
    ("dispatch", "backward"): "sent",
    ("combine", "forward"): "sent",
    ("combine", "backward"): "received",
}


@dataclass(frozen=True)
class Slot:
    """Which row of what: of this rank's "tokens", of the rows "sent", or of those "received"."""

    kind: str
    row: int


@dataclass(frozen=True, eq=False)
class NotedExperts(LocalExperts):
    """Experts that tell whose rows they get."""

    where: "Whereabouts"

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, sizes: tuple[int, ...], compute: Compute
    ) -> Tensor:
        self.where.note(expert_ids.detach(), sizes)
        return super().__call__(x, weights, expert_ids, sizes, compute)


class Whereabouts:
    """Told of every place of one step as it is entered. ids: [T, K] by layer and micro-batch. batches: this rank's."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.batches: list[Batch] = []
        self.ids: dict[tuple[str, int | None], Tensor] = {}
        self._owned: dict[int, tuple[str, Callable[[int], tuple[str, int | None]]]] = {}
        self._sparse: set[str] = set()  # the names of the sparse layers' attention
        self._rows: dict[tuple[str, int | None], tuple[Tensor, tuple[int, ...]]] = {}
        self._actions: dict[str, tuple[int, int]] = {}  # of what runs: forward or backward -> stage, micro-batch
        self._numbers: dict[tuple[str, int, int | None], int] = {}
        self._places: list[Place] = []

    # --- what is known before the step ---

    def watched(self, trainee: Trainee) -> Trainee:
        """The trainee with its parameters known by name, and experts that tell of their rows."""
        buckets = trainee.shard.buckets
        self.own("gradient", {name: bucket.grads for name, bucket in buckets.items()}, trainee, whole=True)
        self.own("weight", {name: bucket.values for name, bucket in buckets.items()}, trainee, whole=True)
        for name, weight in trainee.shard.borrowed.items():
            for kind, tensor in (("weight", weight.value), ("gradient", weight.grad)):
                self._owned[key_of(tensor)] = kind, lambda at, name=name: (name, None)  # type: ignore[misc]
        stages = {
            index: replace(stage, layers=tuple(self._noted(layer) for layer in stage.layers))
            for index, stage in trainee.stages.items()
        }
        return replace(trainee, stages=stages)

    def _noted(self, layer: Any) -> Any:
        if not isinstance(layer, SparseLayer):
            return layer
        self._sparse.add(f"{layer.name}.attention")
        experts = NotedExperts(layer.experts.experts, layer.experts.num_local_experts, self)
        return replace(layer, experts=experts)

    def own(self, kind: str, flat: Flat, trainee: Trainee, whole: bool = False) -> None:
        """Makes storages known: whole buckets, or this rank's slices of them."""
        for bucket, tensor in flat.items():
            start = 0 if whole else trainee.shard.buckets[bucket].start - tensor.storage_offset()
            name = lambda at, bucket=bucket, start=start: _parameter(trainee, bucket, at + start)  # noqa: E731
            self._owned.setdefault(key_of(tensor), (kind, name))

    # --- places ---

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """An action of the schedule, by its name."""
        self._actions = dict(map(_action, name.split("+")))
        yield
        self._actions = {}

    @contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        self._places.append(place)
        try:
            yield
        finally:
            self._places.pop()

    @property
    def is_inside(self) -> bool:
        """Whether we are in a place that has a name."""
        return bool(self._places)

    @property
    def here(self) -> Place:
        if self._places:
            return self._places[-1]
        which, (stage, microbatch) = next(iter(self._actions.items()), ("step", (0, None)))
        key: Any = which, stage, microbatch
        return Place(
            name="between segments", phase=key[0], microbatch=microbatch, stage=stage, index=self._numbers.get(key, 0)
        )

    def next_place(self, name: str, phase: Phase) -> Place:
        """The place of what is about to run."""
        if not self._actions:
            return self._numbered(name, "step", 0, None)
        backwards = phase == "backward" or "_backward" in name or name.startswith(MOVES[1])
        which = "backward" if backwards and "backward" in self._actions else next(iter(self._actions))
        which = "forward" if not backwards and "forward" in self._actions else which
        stage, microbatch = self._actions[which]
        return self._numbered(name.replace("_backward", ""), which, stage, microbatch)

    def _numbered(self, name: str, phase: Any, stage: int, microbatch: int | None) -> Place:
        key = phase, stage, microbatch
        self._numbers[key] = self._numbers.get(key, 0) + 1
        return Place(name=name, phase=phase, microbatch=microbatch, stage=stage, index=self._numbers[key])

    def given(self, place: Place, result: list[Any]) -> list[Any]:
        """What a segment gave that must be finite; a gap is infinite where nothing is left to choose."""
        if place.phase != "forward" or place.name not in self._sparse:
            return result
        attended = Attended(*result)
        self.ids[place.name.rpartition(".")[0], place.microbatch] = attended.topk_expert_ids
        return [value for name, value in attended._asdict().items() if name != "gap"]

    # --- rows, experts, parameters ---

    def note(self, expert_ids: Tensor, sizes: tuple[int, ...]) -> None:
        """Of the experts that run here: whose rows they have, and how many each."""
        place = self._places[-1]
        self._rows[place.name.rpartition(".")[0], place.microbatch] = expert_ids, sizes

    def is_owned(self, tensor: Tensor) -> bool:
        """Whether it lies in a weight, a gradient or a moment."""
        return key_of(tensor) in self._owned

    def parameter(self, tensor: Tensor) -> tuple[str, int | None]:
        """The parameter that a tensor's first non-finite value belongs to, and its expert."""
        kind, name = self._owned.get(key_of(tensor), ("", None))
        if name is None:
            return "", None
        at = tensor.storage_offset() + sum(
            index * int(stride) for index, stride in zip(first_bad(tensor), tensor.stride(), strict=True)
        )
        parameter, expert = name(int(at))
        return f"{kind} of {parameter}", expert

    def slot(self, place: Place, tensor: Tensor) -> tuple[Slot | None, int | None]:
        """The row of the first non-finite value, and its expert where the rows are an expert's."""
        batch = self.batches[0].tokens.shape if self.batches else (0, 0)
        first, (layer, _, part) = first_bad(tensor), place.name.rpartition(".")
        stride = max(tensor.stride(0), 1)
        row = first[0] + tensor.storage_offset() // stride
        total = tensor.untyped_storage().nbytes() // tensor.itemsize // stride
        if part == "experts" and (known := self._rows.get((layer, place.microbatch))):
            ids, sizes = known
            if total == sum(sizes):
                copies = plan(ids, len(sizes), sum(sizes))
                entry = int(copies.entries[row])
                expert = int(ids.flatten()[entry]) + self.mesh.ep.index * len(sizes)
                return Slot("received", entry // ids.shape[1]), expert
            return (Slot("received", row), None) if total == ids.shape[0] else (None, None)
        if part in ("dispatch", "combine"):
            kind = ARRIVED.get((part, place.phase))
            return (None if kind is None else Slot(kind, row)), None
        if tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2]) == batch:
            return Slot("tokens", first[0] * batch[1] + first[2]), None
        if tensor.shape[:2] == batch:
            return Slot("tokens", first[0] * batch[1] + first[1]), None
        return (Slot("tokens", row) if total == batch[0] * batch[1] else None), None

    def beside(self, place: Place, shape: tuple[int, ...], row: int) -> Slot | None:
        """The row that code beside a dispatch works on: a token, or one of those sent."""
        if not place.name.endswith(".dispatch") or not shape:
            return None
        return Slot("tokens" if shape[0] == self.batches[0].tokens.numel() else "sent", row)


def key_of(tensor: Tensor) -> int:
    """torch keeps a storage's object, and so its id, for as long as the storage lives."""
    return id(tensor.untyped_storage())


def first_bad(tensor: Tensor) -> list[int]:
    """The index of the first value that is not finite."""
    good = torch.isfinite(tensor.detach().float() if tensor.itemsize == 1 else tensor.detach())
    return [int(i) for i in (~good).nonzero()[0]]


def _action(text: str) -> tuple[str, tuple[int, int]]:
    """F0.1 -> ("forward", (0, 1))."""
    stage, _, microbatch = text[1:].partition(".")
    return "forward" if text[0] == "F" else "backward", (int(stage), int(microbatch))


def _parameter(trainee: Trainee, bucket: str, at: int) -> tuple[str, int | None]:
    """The parameter at an element of a bucket, and its expert's global number."""
    for name, place in trainee.shard.placements.items():
        if place.bucket == bucket and place.start <= at < place.stop:
            experts = trainee.shard.local_experts(name)
            size = (place.stop - place.start) // place.shape[0]
            return name, None if experts is None else experts[(at - place.start) // size]
    return "padding between parameters", None
