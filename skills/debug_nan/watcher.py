"""Sees every operator of a step and remembers where each value that is not finite comes from.

A storage that becomes non-finite gets an origin: that of the non-finite input, or a new one where all inputs are
finite. An origin counts once it has reached something that matters: what a segment gives, what is sent, a gradient, a
weight, a moment. So an infinity that a mask puts in and a softmax takes out is never blamed.
"""

import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pithtrain.ops.cross_entropy import HeadLoss
from pithtrain.parallel.mesh import Mesh
from pithtrain.parallel.tape import Phase
from skills.debug_nan.finding import Kind, Origin, Place, Stats, is_finite
from skills.debug_nan.whereabouts import Slot, Whereabouts, first_bad, key_of

ROOT = Path(__file__).parents[2]
ROOM = Path(torch.__file__).parent, Path(__file__).parent  # code that is never what asked for an operator
UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
OVERWRITES = ("copy_", "fill_", "zero_")


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


class Watcher(TorchDispatchMode):
    """Entered around one step, and its observer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.where = Whereabouts(mesh)
        self.causes: list[Cause] = []
        self.sent: set[tuple[str, str, int | None]] = set()
        self._by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], Cause]] = {}
        self._homeless: list[Cause] = []
        self._waited: Place | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and torch would import its compiler to skip it, for seconds on every rank."""
        return False

    def before(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Looks at what is there before the step; state: (what it is, a known tensor)."""
        for name, tensor in state:
            if not is_finite(tensor):
                place = Place(name=name, phase="step", index=-1)
                cause = self._cause("state", place, output=tensor, reached=True)
                self._mark(tensor, cause)

    def seen(self) -> Seen:
        """What the rank saw, once the step is over."""
        where, batch = self.where, self.where.batches[0]
        reached = [(cause.origin, cause.slot) for cause in self.causes if cause.reached]
        ids = {key: tensor.cpu().numpy() for key, tensor in where.ids.items()}
        padding = [None if batch.padding is None else batch.padding.cpu().numpy() for batch in where.batches]
        shape = batch.tokens.shape[0], batch.tokens.shape[1]
        return Seen(where.mesh.rank, reached, self.sent, ids, shape, padding)

    # --- an observer: where we are ---

    def observe(self, name: str, phase: Phase, run: Callable[[], Any], /) -> Any:
        """An `Observe`."""
        if phase == "host":
            return run()
        if phase == "action":
            with self.where.acting(name):
                result = run()
                self._find_home(None)
            self._waited = None
            return result
        place = self.where.next_place(name, phase)
        self._find_home(place if phase == "launch" else None)
        with self.where.inside(place):
            result = run()
        self._waited = place if phase == "wait" else None
        with _disable_current_modes():
            self._look(phase, place, result)
        return result

    def _look(self, phase: Phase, place: Place, result: Any) -> None:
        """At what a segment gave, or what an exchange brought."""
        if place.name == "data" and phase == "step":
            self.where.batches = list(result)
        if phase not in ("forward", "backward", "wait"):
            return
        if isinstance(result, HeadLoss):
            result = result.loss, result.grad
        given = list(result or ())
        for tensor in self.where.given(place, given) if phase == "forward" else given:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not is_finite(tensor):
                self._known(tensor, place, "arrived" if phase == "wait" else "memory").reached = True

    def _find_home(self, place: Place | None) -> None:
        """Code between two places prepares the exchange that is launched next, or unpacks the one that came last."""
        for cause in self._homeless:
            home, output = place or self._waited or cause.origin.place, cause.origin.output
            cause.origin = cause.origin.model_copy(update={"place": home})
            cause.slot = self.where.beside(home, output.shape if output else (), cause.row) or cause.slot
        self._homeless.clear()

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
            cause = self._known(poisoned[0], self.where.here, "memory")
        else:
            statistics = tuple(Stats.of(label, was) for label, was in before)
            constants = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int | float)]
            cause = self._made(f"{func.namespace}.{name}", constants, statistics, bad[0])
        for tensor in bad:
            self._mark(tensor, cause)
            cause.reached |= self.where.is_owned(tensor) or self._at_the_end(cause.origin)
        return result

    def _at_the_end(self, origin: Origin) -> bool:
        """Whether it comes from the step's own parts, where all counts but the infinity that stands for no gap."""
        is_constant = origin.output is not None and not origin.output.shape and "constant inf" in origin.operator
        return self.where.is_inside and origin.place.phase == "step" and not is_constant

    def _send(self, read: list[tuple[str, Tensor]]) -> None:
        place = self.where.here
        for _, tensor in read:
            if not is_finite(tensor):
                self._known(tensor, place, "memory").reached = True
                self.sent.add((place.name, place.phase, place.microbatch))

    def _known(self, tensor: Tensor, place: Place, kind: Kind) -> Cause:
        """The cause of a non-finite tensor; where nobody knows one, a new one of this kind."""
        reference, cause = self._by_storage.get(key_of(tensor), (None, None))
        if cause is not None and reference is not None and reference() is tensor.untyped_storage():
            return cause
        if place.name in ("reduce", "gather"):
            kind = "arrived"
        cause = self._cause(kind, place, output=tensor)
        self._mark(tensor, cause)
        return cause

    def _made(self, operator: str, constants: list[float], inputs: tuple[Stats, ...], output: Tensor) -> Cause:
        place = self.where.here
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
        parameter, expert = self.where.parameter(output)
        origin = Origin(
            kind=kind,
            rank=self.where.mesh.rank,
            place=place,
            order=len(self.causes),
            operator=operator,
            code=_code() if kind in ("operator", "memory") else "",
            output=Stats.of("output", output),
            inputs=inputs,
            parameter=parameter,
            expert=expert,
        )
        cause = Cause(origin, reached, first_bad(output)[0] if output.dim() else 0)
        if not parameter and output.dim() > 1:
            cause.slot, expert = self.where.slot(place, output)
            cause.origin = origin.model_copy(update={"expert": expert})
        self.causes.append(cause)
        if not self.where.is_inside and kind == "operator":
            self._homeless.append(cause)
        return cause

    def _mark(self, tensor: Tensor, cause: Cause) -> None:
        storage = tensor.untyped_storage()
        self._by_storage[key_of(tensor)] = weakref.ref(storage), cause


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


def _code() -> str:
    """The line of ours, or of whoever else is not torch, that asked for the operator: file:line function `text`."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not any(path.is_relative_to(room) for room in ROOM) and path.suffix == ".py":
            if path.name in ("tape.py", "loop.py"):
                break
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return f"{shown}:{frame.lineno} {frame.name} `{frame.line}`"
    node = torch._C._current_autograd_node()
    return "" if node is None else f"autograd {node.name()}"
