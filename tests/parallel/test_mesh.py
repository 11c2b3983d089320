"""Ranks on a mesh: world = pp x dp x cp x ep, ep innermost."""

import pytest

from pithtrain.parallel.mesh import DIMS, groups_of, make_mesh
from tests.parallel.meshes import mesh_of


def test_groups_of_a_mesh() -> None:
    sizes = (2, 2, 1, 2)  # rank = ((pp * 2 + dp) * 1 + cp) * 2 + ep
    assert groups_of(sizes, "ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(sizes, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_of(sizes, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups_of(sizes, "cp") == [[rank] for rank in range(8)]
    assert groups_of(sizes, "dense") == [[0, 1, 2, 3], [4, 5, 6, 7]], "dense parameters: dp x cp x ep"
    assert groups_of(sizes, "expert") == [[0, 2], [1, 3], [4, 6], [5, 7]], "experts: dp x cp"
    assert groups_of(sizes, "world") == [list(range(8))]
    assert groups_of((1, 2, 3, 2), "cp") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert groups_of((1, 2, 3, 2), "expert") == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 3, 1, 4), (2, 3, 2, 5), (4, 1, 2, 1)], ids=str)
def test_groups_part_the_world(sizes: tuple[int, int, int, int]) -> None:
    world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    for name, dims in DIMS.items():
        groups, size = groups_of(sizes, name), 1
        for dim in dims:
            size *= sizes[dim]
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))
        assert all(len(ranks) == size and ranks == sorted(ranks) for ranks in groups)


def test_expert_ranks_read_different_data_and_context_ranks_the_same() -> None:
    ranks = [mesh_of(rank, pp=2, dp=2, cp=2, ep=2) for rank in range(16)]
    assert {mesh.data_ranks for mesh in ranks} == {4}
    assert [mesh.data_rank for mesh in ranks] == [0, 1, 0, 1, 2, 3, 2, 3] * 2


def test_each_direction_of_a_pipeline_has_an_axis_of_its_own() -> None:
    """So a message to a higher rank never waits for one to a lower rank; both ends name the same axis."""
    ranks = [mesh_of(rank, pp=3, ep=2) for rank in range(6)]
    for mesh in ranks:
        for other in (one for one in ranks if one.pp.index != mesh.pp.index):
            axis = mesh.towards(other.pp.index)
            assert axis.name == ("pp" if mesh.pp.index < other.pp.index else "pp_back")
            assert other.back_from(mesh.pp.index).name == axis.name
            assert axis.index == mesh.pp.index and axis.size == 3


def test_a_world_of_one() -> None:
    mesh = make_mesh()
    assert (mesh.rank, mesh.world_size, mesh.data_ranks, mesh.data_rank) == (0, 1, 1, 0)
    for axis in (mesh.pp, mesh.pp_back, mesh.dp, mesh.cp, mesh.ep, mesh.dense, mesh.expert, mesh.world):
        assert (axis.size, axis.index, axis.group) == (1, 0, None)
    assert mesh.describe() == "pp1 dp1 cp1 ep1"


def test_sizes_must_make_the_world() -> None:
    with pytest.raises(ValueError, match=r"pp 1 x dp 2 x cp 1 x ep 4 = 8 ranks, but 1 are running; start as many"):
        make_mesh(dp=2, ep=4)
