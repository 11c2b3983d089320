"""Parameters, gradients and master weights in flat storage, sharded by plain calls.

A bucket holds the parameters of one dtype that are reduced over one axis: dense ones over dp x cp x ep, experts over
dp x cp. Its values, whole on every rank, are what layers read; each rank owns one equal slice of them, whose fp32
masters the optimizer steps on. `reduce` sums fp32 gradients into the owners' slices once a step; `gather` casts the
masters to values and fetches what other owners changed. Weight decay applies to the first part of a bucket only.

A pipeline rank holds the parameters of its stages. One that two pipeline ranks read (a tied embedding) has one owner;
the other borrows it: hands in its gradient before `reduce` and gets the value with `gather`, so the two stay equal.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pithtrain.ops.parameter import ParameterSpec, Weight, initial_values
from pithtrain.parallel.mesh import Axis, Mesh
from pithtrain.parallel.transport import AllReduce, Receive, Send, Transport

ALIGNMENT = 64  # elements: every parameter starts on a 256-byte boundary

Flat = dict[str, Tensor]  # bucket name -> this rank's slice of some quantity of the bucket, [chunk] fp32


@dataclass(frozen=True)
class Placement:
    """Where a parameter lies: its bucket, the first element there, and the shape this rank's values have."""

    spec: ParameterSpec
    bucket: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True, eq=False)
class Bucket:
    """values, and grads in fp32: [axis.size * chunk]. This rank owns chunk number axis.index: master, [chunk] fp32, a
    view of values where those are fp32. Decay applies before decay_stop.
    """

    axis: Axis
    values: Tensor
    grads: Tensor
    master: Tensor
    decay_stop: int

    @property
    def chunk(self) -> int:
        return self.master.shape[0]

    @property
    def start(self) -> int:
        """The first element this rank owns."""
        return self.axis.index * self.chunk

    @property
    def owned(self) -> Tensor:
        """The slice of values this rank owns, [chunk]."""
        return self.values[self.start : self.start + self.chunk]


def _place(specs: Sequence[ParameterSpec], bucket: str, ep: int) -> list[Placement]:
    """Lays parameters of a bucket one behind the other, those with weight decay first."""
    placements, at = [], 0
    for spec in sorted(specs, key=lambda spec: not spec.decay):
        shape = (spec.shape[0] // ep, *spec.shape[1:]) if spec.expert else spec.shape
        placements.append(Placement(spec, bucket, at, shape))
        at += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
    return placements


def _bucket_of(spec: ParameterSpec, dtype: torch.dtype) -> str:
    if spec.expert:
        return "expert"
    return "fp32" if spec.fp32 and dtype != torch.float32 else "dense"


def _allocate(placements: Sequence[Placement], axis: Axis, device: torch.device, dtype: torch.dtype) -> Bucket:
    total = max((place.stop for place in placements), default=0)
    size = -(-total // (ALIGNMENT * axis.size)) * ALIGNMENT * axis.size
    decay_stop = max((place.stop for place in placements if place.spec.decay), default=0)
    values, grads = torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, device=device)
    master = values.view(axis.size, -1)[axis.index] if dtype == torch.float32 else grads.new_zeros(size // axis.size)
    return Bucket(axis, values, grads, master, decay_stop)


@dataclass(frozen=True)
class Loan:
    """A dense parameter that pipeline rank `owner` keeps and pipeline rank `borrower` reads too."""

    name: str
    owner: int
    borrower: int


@dataclass(frozen=True, eq=False)
class Shard:
    """The parameters of this rank's stages, by our global names.

    specs: those of the whole model, in its order. placements: of those this rank holds, in that order. borrowed: the
    loan's parameter on the borrower, else empty.
    """

    mesh: Mesh
    transport: Transport
    specs: tuple[ParameterSpec, ...]
    buckets: dict[str, Bucket]
    placements: dict[str, Placement]
    loan: Loan | None
    borrowed: dict[str, Weight]

    @staticmethod
    def create(
        specs: Sequence[ParameterSpec],
        mesh: Mesh,
        transport: Transport,
        device: torch.device,
        held: Collection[str] | None = None,
        loan: Loan | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "Shard":
        """Storage for the parameters, values zero: fill it by `initialise` or by a checkpoint.

        specs: the whole model's. held: the names this rank keeps, None for all. dtype: of values, but for those that
        are fp32 in any case.
        """
        axes = {"dense": mesh.dense, "fp32": mesh.dense, "expert": mesh.expert}
        kept = [spec for spec in specs if held is None or spec.name in held]
        placed: dict[str, list[Placement]] = {}
        for bucket in axes:
            members = [spec for spec in kept if _bucket_of(spec, dtype) == bucket]
            placed[bucket] = _place(members, bucket, mesh.ep.size)
        buckets = {
            bucket: _allocate(placed[bucket], axis, device, torch.float32 if bucket == "fp32" else dtype)
            for bucket, axis in axes.items()
            if bucket != "fp32" or dtype != torch.float32
        }
        by_name = {place.spec.name: place for places in placed.values() for place in places}
        placements = {spec.name: by_name[spec.name] for spec in kept}
        borrowed = {
            spec.name: Weight(*(torch.zeros(spec.shape, dtype=kind, device=device) for kind in (dtype, torch.float32)))
            for spec in specs
            if loan is not None and spec.name == loan.name and mesh.pp.index == loan.borrower
        }
        return Shard(mesh, transport, tuple(specs), buckets, placements, loan, borrowed)

    def weights(self) -> dict[str, Weight]:
        """Every parameter as layers see it: views of the buckets, and what is borrowed."""
        return self.borrowed | {
            name: Weight(self._view(self.buckets[p.bucket].values, p), self._view(self.buckets[p.bucket].grads, p))
            for name, p in self.placements.items()
        }

    @staticmethod
    def _view(flat: Tensor, place: Placement) -> Tensor:
        return flat[place.start : place.stop].view(place.shape)

    def holds(self, name: str) -> bool:
        """Whether this rank keeps the parameter."""
        return name in self.placements

    def local_experts(self, name: str) -> range | None:
        """The global numbers of the experts of `name`, which this rank holds; None for a dense parameter."""
        place = self.placements[name]
        if not place.spec.expert:
            return None
        first = self.mesh.ep.index * place.shape[0]
        return range(first, first + place.shape[0])

    def initialise(self, seed: int) -> None:
        """Draws every value from its name, expert and seed."""
        for spec in self.specs:
            if spec.name in self.borrowed:
                self.borrowed[spec.name].value.copy_(initial_values(spec, None, seed))
        for name, place in self.placements.items():
            experts = self.local_experts(name)
            drawn = [initial_values(place.spec, expert, seed).float() for expert in experts or [None]]
            tensor = drawn[0] if experts is None else torch.stack(drawn)
            self._view(self.buckets[place.bucket].values, place).copy_(tensor)
            self.keep(self.masters(), name, tensor)

    def zero_grads(self) -> None:
        for bucket in self.buckets.values():
            bucket.grads.zero_()
        for weight in self.borrowed.values():
            weight.grad.zero_()

    def reduce(self) -> Flat:
        """Gradients summed over every rank that holds the parameter: this rank's slices."""
        if self.loan is not None:
            weights, at = self.weights(), self.mesh.pp.index
            if at == self.loan.borrower:
                self._send(weights[self.loan.name].grad, self.loan.owner)
            elif at == self.loan.owner:
                grad = weights[self.loan.name].grad
                grad += self._receive(torch.empty_like(grad), self.loan.borrower)
        return {name: self.transport.reduce_scatter(bucket.grads, bucket.axis) for name, bucket in self.buckets.items()}

    def masters(self) -> Flat:
        """The slices the optimizer steps on, fp32."""
        return {name: bucket.master for name, bucket in self.buckets.items()}

    def gather(self) -> None:
        """Casts this rank's masters to values and fetches every other owner's, after the optimizer changed them."""
        for bucket in self.buckets.values():
            if bucket.values.dtype != torch.float32:
                bucket.owned.copy_(bucket.master)
            self.transport.all_gather_into(bucket.values, bucket.owned, bucket.axis)
        if self.loan is not None:
            weights, at = self.weights(), self.mesh.pp.index
            if at == self.loan.owner:
                self._send(weights[self.loan.name].value, self.loan.borrower)
            elif at == self.loan.borrower:
                self._receive(weights[self.loan.name].value, self.loan.owner)

    def _send(self, tensor: Tensor, peer: int) -> None:
        self.transport.run(Send(tensor, peer, self.mesh.towards(peer)))

    def _receive(self, buffer: Tensor, peer: int) -> Tensor:
        (received,) = self.transport.run(Receive(buffer, peer, self.mesh.back_from(peer)))
        return received

    def square_norms(self, flat: Flat) -> Tensor:
        """Squared norm of each parameter of the whole model, of `flat`, in the order of `specs`: [parameters] fp64."""
        squares = torch.zeros(len(self.specs), dtype=torch.float64, device=self.buckets["dense"].values.device)
        for square, spec in zip(squares.unbind(0), self.specs, strict=True):
            if place := self.placements.get(spec.name):
                square.copy_(torch.linalg.vector_norm(self._owned(flat, place)[0]).double().square())
        (summed,) = self.transport.run(AllReduce(squares, self.mesh.world))
        return summed

    def _owned(self, flat: Flat, place: Placement) -> tuple[Tensor, int]:
        """The part of the parameter this rank owns, and where it starts within this rank's values of it."""
        bucket = self.buckets[place.bucket]
        first, stop = max(place.start, bucket.start), min(place.stop, bucket.start + bucket.chunk)
        if first >= stop:
            return flat[place.bucket][:0], 0
        return flat[place.bucket][first - bucket.start : stop - bucket.start], first - place.start

    def whole(self, flat: Flat, name: str) -> Tensor:
        """The whole global tensor of `name` out of the owners' slices, on CPU, on every rank. Exact to the bit."""
        shape = next(spec.shape for spec in self.specs if spec.name == name)
        bits = torch.zeros(prod(shape), dtype=torch.int32, device=self.buckets["dense"].values.device)
        if place := self.placements.get(name):
            owned, offset = self._owned(flat, place)
            experts = self.local_experts(name)
            base = 0 if experts is None else experts.start * prod(place.shape[1:])
            bits[base + offset : base + offset + owned.shape[0]] = owned.view(torch.int32)
        (bits,) = self.transport.run(AllReduce(bits, self.mesh.world))  # one owner an element: sums are copies
        return bits.view(torch.float32).view(shape).cpu()

    def keep(self, flat: Flat, name: str, tensor: Tensor) -> None:
        """Copies into `flat` what this rank owns of `tensor`, this rank's experts of `name` (all of a dense one)."""
        place = self.placements[name]
        assert tensor.shape == place.shape, f"{name}: got {tuple(tensor.shape)}, this rank holds {place.shape}"
        owned, offset = self._owned(flat, place)
        owned.copy_(tensor.reshape(-1)[offset : offset + owned.shape[0]])
