"""The mesh: world = pp x dp x cp x ep, ep innermost, and the process group of every axis anything is reduced over."""

from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch.distributed as dist

AxisName = Literal["pp", "pp_back", "dp", "cp", "ep", "dense", "expert", "world"]


@dataclass(frozen=True, eq=False)
class Axis:
    """Ranks that communicate: how many, which of them this one is, and their group (None when alone)."""

    name: AxisName
    size: int
    index: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, eq=False)
class Mesh:
    """This rank's place. Dense parameters are sharded over `dense` (dp x cp x ep), experts over `expert` (dp x cp).

    Messages to higher pipeline ranks go over `pp`, those to lower ones over `pp_back`: neither waits for the other.
    """

    rank: int
    world_size: int
    pp: Axis
    pp_back: Axis
    dp: Axis
    cp: Axis
    ep: Axis
    dense: Axis
    expert: Axis
    world: Axis

    def towards(self, peer: int) -> Axis:
        """The axis that carries this pipeline rank's messages to pipeline rank `peer`."""
        return self.pp if self.pp.index < peer else self.pp_back

    def back_from(self, peer: int) -> Axis:
        """The axis that carries pipeline rank `peer`'s messages to this one."""
        return self.pp if peer < self.pp.index else self.pp_back

    @property
    def data_ranks(self) -> int:
        """How many ranks read different data: dp x ep."""
        return self.dp.size * self.ep.size

    @property
    def data_rank(self) -> int:
        """Which of them this rank is; cp ranks share their data."""
        return self.dp.index * self.ep.size + self.ep.index

    def describe(self) -> str:
        return f"pp{self.pp.size} dp{self.dp.size} cp{self.cp.size} ep{self.ep.size}"


DIMS: dict[AxisName, tuple[int, ...]] = {  # which of (pp, dp, cp, ep) vary within a group of the axis
    "pp": (0,),
    "pp_back": (0,),
    "dp": (1,),
    "cp": (2,),
    "ep": (3,),
    "dense": (1, 2, 3),
    "expert": (1, 2),
    "world": (0, 1, 2, 3),
}


def groups_of(sizes: tuple[int, int, int, int], name: AxisName) -> list[list[int]]:
    """Every group of ranks along an axis, for a world of pp, dp, cp, ep `sizes`; ranks ascend within a group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, sizes))):
        fixed = tuple(at for dim, at in enumerate(place) if dim not in DIMS[name])
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


def _axis(sizes: tuple[int, int, int, int], name: AxisName, rank: int) -> Axis:
    """This rank's axis. Every rank makes every group, in the same order, as process groups demand."""
    groups = groups_of(sizes, name)
    mine = next(ranks for ranks in groups if rank in ranks)
    if len(mine) == 1:
        return Axis(name, 1, 0, None)
    if len(groups) == 1 and DIMS[name] != DIMS["pp"]:  # messages between two ranks keep to a group of their own
        return Axis(name, len(mine), mine.index(rank), dist.group.WORLD)
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return Axis(name, len(mine), mine.index(rank), made[tuple(mine)])


def make_mesh(pp: int = 1, dp: int = 1, cp: int = 1, ep: int = 1) -> Mesh:
    """The mesh of the running process group; without one, a world of one rank.

    ValueError when the sizes do not multiply to the world's size.
    """
    started = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
    if pp * dp * cp * ep != world_size:
        raise ValueError(
            f"mesh: pp {pp} x dp {dp} x cp {cp} x ep {ep} = {pp * dp * cp * ep} ranks, but {world_size} are running; "
            "start as many ranks as the mesh has, or set dp to the rest"
        )
    sizes = (pp, dp, cp, ep)
    axes = {name: _axis(sizes, name, rank) for name in DIMS}
    return Mesh(rank, world_size, **axes)
