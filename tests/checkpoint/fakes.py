"""A sharded model state over ranks that are threads, strict about what a collective must be."""

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pithtrain.checkpoint import Ranks, Saver, TrainState, load
from pithtrain.models.architecture import Architecture, parameter_specs
from pithtrain.models.qwen3_moe import Qwen3MoE, load_architecture

T = TypeVar("T")
KINDS = ("weight", "exp_avg", "exp_avg_sq")
MAX_FILE_BYTES = 20_000


ARCH = load_architecture("qwen3-moe-tiny")


def family(arch: Architecture = ARCH) -> Qwen3MoE:
    return Qwen3MoE.of(arch)


class World:
    """`size` ranks as threads. Every exchange checks that all ranks came for the same thing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[tuple[object, Any]] = [("", None)] * size

    def exchange(self, rank: int, key: object, value: T) -> list[T]:
        self.slots[rank] = (key, value)
        self.barrier.wait(60)
        keys, values = zip(*self.slots, strict=True)
        self.barrier.wait(60)
        assert set(keys) == {key}, f"ranks met in different collectives: {keys}"
        return list(values)

    def ranks(self, rank: int) -> Ranks:
        return Ranks(rank, self.size, lambda ok: all(self.exchange(rank, "agree", ok)))

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Each rank's result, or the first failure that is not an echo of another's."""

        def one(rank: int) -> T:
            try:
                return body(rank)
            except BaseException:
                self.barrier.abort()
                raise

        self.barrier.reset()
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return [f.result() for f in futures]

    def failures(self, body: Callable[[int], object], kind: type[Exception]) -> list[str]:
        """Each rank's message of the failure that `body` must raise on every rank."""

        def one(rank: int) -> str:
            try:
                body(rank)
            except kind as error:
                return str(error)
            raise AssertionError(f"rank {rank} did not fail")

        return self.run(one)


def expected(kind: str, name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {kind} {name}".encode()))
    return torch.rand(shape, generator=generator) - 0.5


class FakeState:
    """Parameters split over an outermost pipeline axis of size `pp`, experts over an innermost expert axis of size
    `ep`; each dense parameter owned by one rank.
    """

    def __init__(self, world: World, rank: int, ep: int, arch: Architecture = ARCH, pp: int = 1) -> None:
        self.world, self.rank, self.ep, self.pp = world, rank, ep, pp
        self.specs = {spec.name: spec for spec in parameter_specs(arch)}
        self.parts: dict[tuple[str, str], Tensor] = {}

    def names(self) -> list[str]:
        return list(self.specs)

    def ranks_of(self, name: str) -> range:
        """Those that hold the parameter."""
        count = self.world.size // self.pp
        first = self.names().index(name) * self.pp // len(self.specs) * count
        return range(first, first + count)

    def holds(self, name: str) -> bool:
        return self.rank in self.ranks_of(name)

    def owner(self, name: str) -> int:
        ranks = self.ranks_of(name)
        return ranks[self.names().index(name) % len(ranks)]

    def local_experts(self, name: str) -> range | None:
        assert self.holds(name)
        spec = self.specs[name]
        if not spec.expert:
            return None
        count = spec.shape[0] // self.ep
        return range(self.rank % self.ep * count, (self.rank % self.ep + 1) * count)

    def gather(self, kind: str, name: str) -> Tensor:
        pieces = self.world.exchange(self.rank, (kind, name), self.parts.get((kind, name)))
        if self.specs[name].expert:
            first = self.ranks_of(name).start
            return torch.cat([piece for piece in pieces[first : first + self.ep] if piece is not None])
        whole = pieces[self.owner(name)]
        assert whole is not None
        return whole

    def scatter(self, kind: str, name: str, tensor: Tensor) -> None:
        mine = self.local_experts(name)
        shape = self.specs[name].shape
        if mine is not None:
            shape = (len(mine), *shape[1:])
        assert tensor.shape == shape and tensor.dtype == torch.float32
        if mine is not None or self.owner(name) == self.rank:
            self.parts[kind, name] = tensor.clone()

    def fill(self, seed: int = 0) -> "FakeState":
        for kind in KINDS:
            for name, spec in self.specs.items():
                if not self.holds(name):
                    continue
                mine = self.local_experts(name)
                part = None if mine is None else slice(mine.start, mine.stop)
                whole = expected(kind, name, spec.shape, seed)
                self.scatter(kind, name, whole if part is None else whole[part])
        return self

    def differences(self, seed: int = 0, kinds: tuple[str, ...] = KINDS) -> list[str]:
        """What this rank owns that is not, bit for bit, what `fill` gives."""
        other = FakeState(self.world, self.rank, self.ep, pp=self.pp).fill(seed)
        wanted = {key: part for key, part in other.parts.items() if key[0] in kinds}
        assert self.parts.keys() == wanted.keys()
        return [str(key) for key, part in wanted.items() if not torch.equal(part, self.parts[key])]


def train_state(step: int, **changes: Any) -> TrainState:
    base = {"step": step, "optimizer_steps": step - 1, "data_position": 8 * step, "tokens_seen": 512 * step}
    return TrainState(**(base | changes))


def save(
    folder: Path,
    step: int,
    *,
    size: int = 1,
    ep: int = 1,
    pp: int = 1,
    seed: int = 0,
    keep: int = 3,
    max_file_bytes: int = MAX_FILE_BYTES,
    **biases: Tensor,
) -> Path:
    """Save one checkpoint in the foreground from `size` ranks; its path."""
    world = World(size)

    def body(rank: int) -> None:
        saver = Saver(folder, world.ranks(rank), keep=keep, background=False, max_file_bytes=max_file_bytes)
        saver.save(FakeState(world, rank, ep, pp=pp).fill(seed), family(), train_state(step), biases)

    world.run(body)
    return folder / f"step-{step:08d}"


def loaded_differences(checkpoint: Path, *, size: int = 1, ep: int = 1, pp: int = 1, seed: int = 0) -> list[str]:
    world = World(size)

    def body(rank: int) -> list[str]:
        state = FakeState(world, rank, ep, pp=pp)
        load(checkpoint, state, family(), world.ranks(rank))
        return state.differences(seed)

    return [difference for part in world.run(body) for difference in part]
