"""Sees every operator of a step and remembers where each value that is not finite comes from.

A storage that becomes non-finite gets an origin: that of the non-finite input, or a new one where all inputs are
finite. An origin counts once it has reached something that matters: what a segment gives, what is sent, a gradient, a
weight, a moment. So an infinity that a mask puts in and a softmax takes out is never blamed.

T tokens, K experts a token, R rows received, N copies, L local experts.
"""

import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pithtrain.data import Batch
from pithtrain.layers.moe import LocalExperts
from pithtrain.models.decoder import SparseLayer
from pithtrain.ops.cross_entropy import HeadLoss
from pithtrain.ops.linear import Compute
from pithtrain.ops.permute import plan
from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.shard import Flat
from pithtrain.parallel.tape import Phase
from pithtrain.step import Trainee
from skills.debug_nan.finding import Kind, Origin, Place, Stats, is_finite

ROOT = Path(__file__).parents[2]
ROOM = Path(torch.__file__).parent, Path(__file__).parent  # code that is never what asked for an operator
UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
OVERWRITES = ("copy_", "fill_", "zero_")
MOVES = ("hidden", "grad")  # messages between stages
# whose rows an exchange brings
ARRIVED = {
    ("dispatch", "forward"): "received",
    ("dispatch", "backward"): "sent",
    ("combine", "forward"): "sent",
    ("combine", "backward"): "received",
}
GAP = 7  # of what a sparse layer's attention gives: infinite where nothing is left to choose
IDS = 3


@dataclass(frozen=True)
class Slot:
    """Which row of what: of this rank's "tokens", of the rows "sent", or of those "received"."""

    kind: str
    row: int


@dataclass(eq=False)
class Cause:
    """An origin in the making. row: that of its tensor's first non-finite value."""

    origin: Origin
    reached: bool
    row: int
    slot: Slot | None = None


@dataclass(frozen=True, eq=False)
class Seen:
    """What one rank saw of a step. origins: those that counted, with their rows. sent: exchanges that this rank sent
    something non-finite into, by name, phase and micro-batch. ids: [T, K] by layer and micro-batch. shape: [B, S].
    """

    rank: int
    origins: list[tuple[Origin, Slot | None]]
    sent: set[tuple[str, str, int | None]]
    ids: dict[tuple[str, int | None], Any]
    shape: tuple[int, int]
    padding: list[Any]


@dataclass(frozen=True, eq=False)
class NotedExperts(LocalExperts):
    """Experts that tell the watcher whose rows they get."""

    watcher: "Watcher"

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, sizes: tuple[int, ...], compute: Compute
    ) -> Tensor:
        self.watcher.note(expert_ids.detach(), sizes)
        return super().__call__(x, weights, expert_ids, sizes, compute)


class Watcher(TorchDispatchMode):
    """Entered around one step, and its observer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.causes: list[Cause] = []
        self.sent: set[tuple[str, str, int | None]] = set()
        self.ids: dict[tuple[str, int | None], Tensor] = {}
        self.batches: list[Batch] = []
        self._by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], Cause]] = {}
        self._owned: dict[int, tuple[str, Callable[[int], tuple[str, int | None]]]] = {}
        self._rows: dict[tuple[str, int | None], tuple[Tensor, tuple[int, ...]]] = {}
        self._actions: dict[str, tuple[int, int]] = {}  # of what runs: forward or backward -> stage, micro-batch
        self._numbers: dict[tuple[str, int, int | None], int] = {}
        self._places: list[Place] = []
        self._homeless: list[Cause] = []
        self._waited: Place | None = None

    def watched(self, trainee: Trainee) -> Trainee:
        """The trainee with its parameters known by name, and experts that tell of their rows."""
        buckets = trainee.shard.buckets
        self.own("gradient", {name: bucket.grads for name, bucket in buckets.items()}, trainee, whole=True)
        self.own("weight", {name: bucket.values for name, bucket in buckets.items()}, trainee, whole=True)
        for name, weight in trainee.shard.borrowed.items():
            for kind, tensor in (("weight", weight.value), ("gradient", weight.grad)):
                self._owned[_key(tensor)] = kind, lambda at, name=name: (name, None)  # type: ignore[misc]
        stages = {
            index: replace(stage, layers=tuple(self._noted(layer) for layer in stage.layers))
            for index, stage in trainee.stages.items()
        }
        return replace(trainee, stages=stages)

    def _noted(self, layer: Any) -> Any:
        if not isinstance(layer, SparseLayer):
            return layer
        experts = NotedExperts(layer.experts.experts, layer.experts.num_local_experts, self)
        return replace(layer, experts=experts)

    def own(self, kind: str, flat: Flat, trainee: Trainee, whole: bool = False) -> None:
        """Makes storages known: whole buckets, or this rank's slices of them."""
        for bucket, tensor in flat.items():
            start = 0 if whole else trainee.shard.buckets[bucket].start - tensor.storage_offset()
            name = lambda at, bucket=bucket, start=start: _parameter(trainee, bucket, at + start)  # noqa: E731
            self._owned.setdefault(_key(tensor), (kind, name))

    def note(self, expert_ids: Tensor, sizes: tuple[int, ...]) -> None:
        place = self._places[-1]
        self._rows[place.name.rpartition(".")[0], place.microbatch] = expert_ids, sizes

    def before(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Looks at what is there before the step; state: (what it is, a known tensor)."""
        for name, tensor in state:
            if not is_finite(tensor):
                place = Place(name=name, phase="step", index=-1)
                cause = self._cause("state", place, output=tensor, reached=True)
                self._mark(tensor, cause)

    def seen(self) -> Seen:
        """What the rank saw, once the step is over."""
        batch = self.batches[0]
        reached = [(cause.origin, cause.slot) for cause in self.causes if cause.reached]
        ids = {key: tensor.cpu().numpy() for key, tensor in self.ids.items()}
        padding = [None if batch.padding is None else batch.padding.cpu().numpy() for batch in self.batches]
        shape = batch.tokens.shape[0], batch.tokens.shape[1]
        return Seen(self.mesh.rank, reached, self.sent, ids, shape, padding)

    # --- an observer: where we are ---

    def observe(self, name: str, phase: Phase, run: Callable[[], Any], /) -> Any:
        """An `Observe`."""
        if phase == "host":
            return run()
        if phase == "action":
            self._actions = dict(map(_action, name.split("+")))
            result = run()
            self._find_home(None)
            self._actions, self._waited = {}, None
            return result
        place = self._place(name, phase)
        self._find_home(place if phase == "launch" else None)
        self._places.append(place)
        try:
            result = run()
        finally:
            self._places.pop()
        self._waited = place if phase == "wait" else None
        with _disable_current_modes():
            self._look(name, phase, place, result)
        return result

    def _place(self, name: str, phase: Phase) -> Place:
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

    def _look(self, name: str, phase: Phase, place: Place, result: Any) -> None:
        """At what a segment gave, or what an exchange brought."""
        if name == "data" and phase == "step":
            self.batches = list(result)
        if phase not in ("forward", "backward", "wait"):
            return
        if isinstance(result, HeadLoss):
            result = result.loss, result.grad
        given = list(result or ())
        if phase == "forward" and len(given) > GAP:
            layer = name.rpartition(".")[0]
            self.ids[layer, place.microbatch] = given[IDS]
            given = given[:GAP]
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not is_finite(tensor):
                self._known(tensor, place, "arrived" if phase == "wait" else "memory").reached = True

    def _find_home(self, place: Place | None) -> None:
        """Code between two places prepares the exchange that is launched next, or unpacks the one that came last."""
        for cause in self._homeless:
            home = place or self._waited or cause.origin.place
            cause.origin = cause.origin.model_copy(update={"place": home})
            cause.slot = self._beside(home, cause) or cause.slot
        self._homeless.clear()

    def _beside(self, place: Place, cause: Cause) -> Slot | None:
        """The row that code beside a dispatch works on: a token, or one of those sent."""
        output, tokens = cause.origin.output, self.batches[0].tokens.numel()
        if not place.name.endswith(".dispatch") or output is None or not output.shape:
            return None
        return Slot("tokens" if output.shape[0] == tokens else "sent", cause.row)

    # --- a dispatch mode: what happens ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema, name = func._schema, func.overloadpacket.__name__
        if name in UNWRITTEN or any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return func(*args, **kwargs)
        read, written = _arguments(schema, args, kwargs, name)
        if func.namespace == "c10d":
            if not name.startswith("recv"):
                self._send([(label, tensor) for label, tensor in read if "output" not in label])
            return func(*args, **kwargs)
        changed = {id(tensor) for tensor in written}
        before = [(label, tensor.clone() if id(tensor) in changed else tensor) for label, tensor in read]
        result = func(*args, **kwargs)
        outputs = [*_floats(result), *written]
        bad = [tensor for tensor in outputs if not is_finite(tensor)]
        if not bad:
            return result
        poisoned = [tensor for (_, tensor), (_, was) in zip(read, before, strict=True) if not is_finite(was)]
        if poisoned:
            cause = self._known(poisoned[0], self._here(), "memory")
        else:
            statistics = tuple(Stats.of(label, was) for label, was in before)
            constants = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float)]
            cause = self._made(f"{func.namespace}.{name}", constants, statistics, bad[0])
        for tensor in bad:
            self._mark(tensor, cause)
            cause.reached |= _key(tensor) in self._owned or self._at_the_end(cause.origin)
        return result

    def _at_the_end(self, origin: Origin) -> bool:
        """Whether it comes from the step's own parts, where all counts but the infinity that stands for no gap."""
        is_constant = origin.output is not None and not origin.output.shape and "constant inf" in origin.operator
        return bool(self._places) and origin.place.phase == "step" and not is_constant

    def _send(self, read: list[tuple[str, Tensor]]) -> None:
        place = self._here()
        for _, tensor in read:
            if not is_finite(tensor):
                self._known(tensor, place, "memory").reached = True
                self.sent.add((place.name, place.phase, place.microbatch))

    def _here(self) -> Place:
        if self._places:
            return self._places[-1]
        which, (stage, microbatch) = next(iter(self._actions.items()), ("step", (0, None)))
        key: Any = which, stage, microbatch
        return Place(
            name="between segments", phase=key[0], microbatch=microbatch, stage=stage, index=self._numbers.get(key, 0)
        )

    def _known(self, tensor: Tensor, place: Place, kind: Kind) -> Cause:
        """The cause of a non-finite tensor; where nobody knows one, a new one of this kind."""
        reference, cause = self._by_storage.get(_key(tensor), (None, None))
        if cause is not None and reference is not None and reference() is tensor.untyped_storage():
            return cause
        if place.name in ("reduce", "gather"):
            kind = "arrived"
        cause = self._cause(kind, place, output=tensor)
        self._mark(tensor, cause)
        return cause

    def _made(self, operator: str, constants: list[float], inputs: tuple[Stats, ...], output: Tensor) -> Cause:
        place = self._here()
        odd = [str(x) for x in constants if x != x or x in (float("inf"), -float("inf"))]
        operator += f" with the constant {', '.join(odd)}" if odd else ""
        return self._cause("operator", place, operator, inputs, output)

    def _cause(
        self,
        kind: Kind,
        place: Place,
        operator: str = "",
        inputs: tuple[Stats, ...] = (),
        output: Tensor | None = None,
        reached: bool = False,
    ) -> Cause:
        assert output is not None
        parameter, expert = self._name(output)
        origin = Origin(
            kind=kind,
            rank=self.mesh.rank,
            place=place,
            order=len(self.causes),
            operator=operator,
            code=_code() if kind in ("operator", "memory") else "",
            output=Stats.of("output", output),
            inputs=inputs,
            parameter=parameter,
            expert=expert,
        )
        cause = Cause(origin, reached, _first(output)[0] if output.dim() else 0)
        if not parameter and output.dim() > 1:
            cause.slot, expert = self._slot(place, output)
            cause.origin = origin.model_copy(update={"expert": expert})
        self.causes.append(cause)
        if not self._places and kind == "operator":
            self._homeless.append(cause)
        return cause

    def _mark(self, tensor: Tensor, cause: Cause) -> None:
        storage = tensor.untyped_storage()
        self._by_storage[id(storage)] = weakref.ref(storage), cause

    # --- rows, experts, parameters ---

    def _name(self, tensor: Tensor) -> tuple[str, int | None]:
        """The parameter that a tensor's first non-finite value belongs to, and its expert."""
        kind, name = self._owned.get(_key(tensor), ("", None))
        if name is None:
            return "", None
        at = tensor.storage_offset() + sum(
            index * int(stride) for index, stride in zip(_first(tensor), tensor.stride(), strict=True)
        )
        parameter, expert = name(int(at))
        return f"{kind} of {parameter}", expert

    def _slot(self, place: Place, tensor: Tensor) -> tuple[Slot | None, int | None]:
        """The row of the first non-finite value, and its expert where the rows are an expert's."""
        batch = self.batches[0].tokens.shape if self.batches else (0, 0)
        first, (layer, _, part) = _first(tensor), place.name.rpartition(".")
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


def _key(tensor: Tensor) -> int:
    """torch keeps a storage's object, and so its id, for as long as the storage lives."""
    return id(tensor.untyped_storage())


def _floats(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _arguments(schema: Any, args: Any, kwargs: Any, name: str) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
    """(label, tensor) of the floating-point tensors that an operator reads, and those that it writes to."""
    read, written = list[tuple[str, Tensor]](), list[Tensor]()
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    for argument in schema.arguments:
        tensors = _floats(given.get(argument.name))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            written += tensors
        if not writes or not (argument.is_out or argument.kwarg_only or name in OVERWRITES):
            read += [(argument.name, tensor) for tensor in tensors]
    return read, written


def _first(tensor: Tensor) -> list[int]:
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


def _code() -> str:
    """The line of ours, or of whoever else is not torch, that asked for the operator: file:line function."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not any(path.is_relative_to(room) for room in ROOM) and path.suffix == ".py":
            if path.name in ("tape.py", "loop.py"):
                break
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return f"{shown}:{frame.lineno} {frame.name}"
    node = torch._C._current_autograd_node()
    return "" if node is None else f"autograd {node.name()}"
