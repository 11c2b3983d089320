"""Parameters, gradients and master weights in flat storage, sharded by plain calls.

A bucket holds the parameters that are reduced over one axis: dense ones over dp x cp x ep, experts over dp x cp. Its
values, whole on every rank, are what layers read; each rank owns one equal slice of them, the master shard, and the
optimizer steps on that slice alone. `reduce` sums gradients into the owners' slices once a step; `gather` fetches what
the owners changed. Weight decay applies to the first part of a bucket only. All storage is fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pithtrain.ops.parameter import ParameterSpec, Weight, initial_values
from pithtrain.parallel.mesh import Axis, Mesh
from pithtrain.parallel.transport import AllReduce, Transport

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
    """values, grads: [axis.size * chunk]. This rank owns chunk number axis.index; decay applies before decay_stop."""

    axis: Axis
    values: Tensor
    grads: Tensor
    decay_stop: int

    @property
    def chunk(self) -> int:
        return self.values.shape[0] // self.axis.size

    @property
    def start(self) -> int:
        """The first element this rank owns."""
        return self.axis.index * self.chunk

    @property
    def master(self) -> Tensor:
        """The slice this rank owns, [chunk]: a view of `values`."""
        return self.values[self.start : self.start + self.chunk]


def _place(specs: Sequence[ParameterSpec], bucket: str, ep: int) -> list[Placement]:
    """Lays parameters of a bucket one behind the other, those with weight decay first."""
    placements, at = [], 0
    for spec in sorted(specs, key=lambda spec: not spec.decay):
        shape = (spec.shape[0] // ep, *spec.shape[1:]) if spec.expert else spec.shape
        placements.append(Placement(spec, bucket, at, shape))
        at += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
    return placements


def _allocate(placements: Sequence[Placement], axis: Axis, device: torch.device) -> Bucket:
    total = max((place.stop for place in placements), default=0)
    size = -(-total // (ALIGNMENT * axis.size)) * ALIGNMENT * axis.size
    decay_stop = max((place.stop for place in placements if place.spec.decay), default=0)
    values, grads = (torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2))
    return Bucket(axis, values, grads, decay_stop)


@dataclass(frozen=True, eq=False)
class Shard:
    """All parameters of this rank's model, by our global names, in the model's order."""

    mesh: Mesh
    transport: Transport
    buckets: dict[str, Bucket]
    placements: dict[str, Placement]

    @staticmethod
    def create(specs: Sequence[ParameterSpec], mesh: Mesh, transport: Transport, device: torch.device) -> "Shard":
        """Storage for the parameters, values zero: fill it by `initialise` or by a checkpoint."""
        axes = {"dense": mesh.dense, "expert": mesh.expert}
        placed = {
            bucket: _place([spec for spec in specs if spec.expert == (bucket == "expert")], bucket, mesh.ep.size)
            for bucket in axes
        }
        buckets = {bucket: _allocate(placed[bucket], axis, device) for bucket, axis in axes.items()}
        by_name = {place.spec.name: place for places in placed.values() for place in places}
        return Shard(mesh, transport, buckets, {spec.name: by_name[spec.name] for spec in specs})

    def weights(self) -> dict[str, Weight]:
        """Every parameter as layers see it: views of the buckets."""
        return {
            name: Weight(self._view(self.buckets[p.bucket].values, p), self._view(self.buckets[p.bucket].grads, p))
            for name, p in self.placements.items()
        }

    @staticmethod
    def _view(flat: Tensor, place: Placement) -> Tensor:
        return flat[place.start : place.stop].view(place.shape)

    def local_experts(self, name: str) -> range | None:
        """The global numbers of the experts of `name` this rank holds; None for a dense parameter."""
        place = self.placements[name]
        if not place.spec.expert:
            return None
        first = self.mesh.ep.index * place.shape[0]
        return range(first, first + place.shape[0])

    def initialise(self, seed: int) -> None:
        """Draws every value from its name, expert and seed."""
        for name, place in self.placements.items():
            target, experts = self._view(self.buckets[place.bucket].values, place), self.local_experts(name)
            if experts is None:
                target.copy_(initial_values(place.spec, None, seed))
            else:
                for slot, expert in zip(target.unbind(0), experts, strict=True):
                    slot.copy_(initial_values(place.spec, expert, seed))

    def zero_grads(self) -> None:
        for bucket in self.buckets.values():
            bucket.grads.zero_()

    def reduce(self) -> Flat:
        """Gradients summed over every rank that holds the parameter: this rank's slices."""
        return {name: self.transport.reduce_scatter(bucket.grads, bucket.axis) for name, bucket in self.buckets.items()}

    def masters(self) -> Flat:
        """The slices the optimizer steps on; they are views of the values layers read."""
        return {name: bucket.master for name, bucket in self.buckets.items()}

    def gather(self) -> None:
        """Fetches every other owner's slice after the optimizer changed them."""
        for bucket in self.buckets.values():
            self.transport.all_gather_into(bucket.values, bucket.master, bucket.axis)

    def square_norms(self, flat: Flat) -> Tensor:
        """Squared norm of each whole parameter's part of `flat`, in the order of `placements`: [parameters] fp64."""
        squares = [
            torch.linalg.vector_norm(self._owned(flat, place)[0]).double().square()
            for place in self.placements.values()
        ]
        (summed,) = self.transport.run(AllReduce(torch.stack(squares), self.mesh.dense))
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
        place = self.placements[name]
        owned, offset = self._owned(flat, place)
        experts = self.local_experts(name)
        base = 0 if experts is None else experts.start * prod(place.shape[1:])
        bits = torch.zeros(prod(place.spec.shape), dtype=torch.int32, device=owned.device)
        bits[base + offset : base + offset + owned.shape[0]] = owned.view(torch.int32)
        (bits,) = self.transport.run(AllReduce(bits, self.mesh.dense))  # one owner an element: sums are copies
        return bits.view(torch.float32).view(place.spec.shape).cpu()

    def keep(self, flat: Flat, name: str, tensor: Tensor) -> None:
        """Copies into `flat` what this rank owns of `tensor`, this rank's experts of `name` (all of a dense one)."""
        place = self.placements[name]
        assert tensor.shape == place.shape, f"{name}: got {tuple(tensor.shape)}, this rank holds {place.shape}"
        owned, offset = self._owned(flat, place)
        owned.copy_(tensor.reshape(-1)[offset : offset + owned.shape[0]])
