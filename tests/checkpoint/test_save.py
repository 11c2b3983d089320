"""Saving: layout, sharing of the work, snapshots, atomic publication, pruning, failures."""

import errno
import hashlib
import json
import resource
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pithtrain.checkpoint import SaveFailed, Saver, folder, latest
from pithtrain.checkpoint.folder import plan_files, verify
from pithtrain.checkpoint.state import ONE_RANK
from tests.checkpoint.fakes import (
    MAX_FILE_BYTES,
    FakeState,
    World,
    expected,
    family,
    loaded_differences,
    save,
    train_state,
)


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {str(p.relative_to(checkpoint)): p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()}


def test_layout_fills_files_in_order_and_never_cuts_a_tensor():
    shapes = {"a": (4,), "b": (4,), "c": (5,), "huge": (10, 10), "d": ()}
    assert plan_files(shapes, 32) == [["a", "b"], ["c"], ["huge"], ["d"]]
    assert plan_files(shapes, 10**6) == [["a", "b", "c", "huge", "d"]]


@pytest.mark.parametrize(("size", "ep", "pp"), [(2, 2, 1), (4, 2, 1), (3, 1, 1), (4, 4, 1), (4, 2, 2), (3, 1, 3)])
def test_bytes_do_not_depend_on_the_mesh(tmp_path, size, ep, pp):
    alone = contents(save(tmp_path / "one", 5))
    mesh = contents(save(tmp_path / "mesh", 5, size=size, ep=ep, pp=pp))
    assert len([name for name in alone if name.startswith("model-")]) > 4
    assert mesh == alone


def test_every_mesh_loads_and_saves_again_the_same_bytes(tmp_path):
    first = save(tmp_path / "first", 5, size=4, ep=4)
    for size, ep, pp in [(1, 1, 1), (2, 2, 1), (4, 2, 1), (4, 2, 2), (4, 1, 4)]:
        assert loaded_differences(first, size=size, ep=ep, pp=pp) == []


def test_files_hold_the_family_names_and_the_manifest_holds_every_file(tmp_path):
    checkpoint = save(tmp_path, 5, size=2, ep=2)
    for kind, index in [("weight", "model"), ("exp_avg", "optimizer/exp_avg")]:
        weight_map = json.loads((checkpoint / f"{index}.safetensors.index.json").read_text())["weight_map"]
        with safe_open(
            (checkpoint / index).parent / weight_map["model.layers.2.mlp.experts.7.up_proj.weight"], "pt"
        ) as file:
            got = file.get_tensor("model.layers.2.mlp.experts.7.up_proj.weight")
            assert file.metadata() == {"format": "pt"}
        assert torch.equal(got, expected(kind, "layers.2.experts.gate_up", (8, 40, 32))[7, 20:])
    listed = json.loads((checkpoint / "pith/manifest.json").read_text())["files"]
    found = contents(checkpoint)
    assert set(listed) | {"pith/manifest.json"} == set(found)
    for name, record in listed.items():
        assert record == {"size": len(found[name]), "sha256": hashlib.sha256(found[name]).hexdigest()}


def test_background_save_keeps_what_was_there_when_it_was_called(tmp_path):
    world = World(2)

    def body(rank: int) -> list[Path | None]:
        state = FakeState(world, rank, 2).fill()
        bias = torch.arange(8.0)
        saver = Saver(tmp_path, world.ranks(rank), keep=2, background=True, max_file_bytes=MAX_FILE_BYTES)
        streams = {"dropout": "a"}
        saver.save(state, family(), train_state(5, random_streams=streams), {"layers.0": bias})
        for part in [*state.parts.values(), bias]:
            part.fill_(-1)
        streams["dropout"] = "b"
        published = []
        while not published or published[-1] is None:
            published.append(saver.poll())
        return [published[-1], saver.wait()]

    path = tmp_path / "step-00000005"
    assert world.run(body) == [[path, None]] * 2
    assert loaded_differences(path) == []
    assert '"dropout": "a"' in (path / "pith/state.json").read_text()
    with safe_open(path / "pith/routing_bias.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("layers.0"), torch.arange(8.0))


def test_nothing_is_published_before_every_rank_has_written(tmp_path):
    world = World(2)

    def body(rank: int) -> tuple[list[str], list[str]]:
        saver = Saver(tmp_path, world.ranks(rank), keep=2, background=True)
        saver.save(FakeState(world, rank, 2).fill(), family(), train_state(5), {})
        saver._writer.submit(lambda: None).result()  # both have written
        world.barrier.wait(60)
        before = sorted(path.name for path in tmp_path.iterdir())
        world.barrier.wait(60)
        saver.save(FakeState(world, rank, 2).fill(), family(), train_state(6), {})  # finishes the one before
        found = [path.name for path in folder.step_folders(tmp_path)]
        saver.wait()
        return before, found

    assert world.run(body) == [([".tmp-step-00000005"], ["step-00000005"])] * 2
    assert latest(tmp_path)[0] == tmp_path / "step-00000006"


def test_poll_waits_for_the_slowest_rank_without_blocking(tmp_path, monkeypatch):
    go, whole_write = threading.Event(), folder.write_file

    def slow(path, content):
        if path.name == "written-00001.json":
            assert go.wait(60)
        return whole_write(path, content)

    monkeypatch.setattr(folder, "write_file", slow)
    world = World(2)

    def body(rank: int) -> list[Path | None]:
        saver = Saver(tmp_path, world.ranks(rank), keep=2, background=True)
        saver.save(FakeState(world, rank, 2).fill(), family(), train_state(5), {})
        if rank == 0:
            saver._writer.submit(lambda: None).result()  # its own part is written
        early = saver.poll()
        go.set()
        return [early, saver.wait()]

    assert world.run(body) == [[None, tmp_path / "step-00000005"]] * 2


def test_keeps_the_newest_whole_ones(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    (tmp_path / "step-00000003/config.json").unlink()  # no longer whole, so it does not count
    save(tmp_path, 4, keep=2)
    assert [p.name for p in folder.step_folders(tmp_path)] == [
        "step-00000004",
        "step-00000003",
        "step-00000002",
    ]
    save(tmp_path, 5, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005"]


def test_later_steps_of_an_abandoned_branch_are_not_pruned(tmp_path):
    save(tmp_path, 9)
    save(tmp_path, 4, keep=1)
    assert [p.name for p in folder.step_folders(tmp_path)] == ["step-00000009", "step-00000004"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, seed=1)
    path = save(tmp_path, 5, seed=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]
    assert loaded_differences(path, seed=2) == []


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".tmp-step-00000003/pith").mkdir(parents=True)
    (tmp_path / ".tmp-step-00000003/pith/state.json").write_text("{")
    save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004"]


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_spares_the_rest(tmp_path, monkeypatch):
    earlier = save(tmp_path, 1, size=2, ep=2)
    before = contents(earlier)
    whole_write = folder.write_file

    def full(path, content):
        if path.name.startswith("exp_avg-00002"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return whole_write(path, content)

    monkeypatch.setattr(folder, "write_file", full)
    world = World(2)

    def body(rank: int) -> None:
        saver = Saver(tmp_path, world.ranks(rank), keep=1, background=True, max_file_bytes=MAX_FILE_BYTES)
        saver.save(FakeState(world, rank, 2).fill(), family(), train_state(2), {})
        saver.wait()

    messages = world.failures(body, SaveFailed)
    assert sum("No space left on device" in message and "exp_avg-00002" in message for message in messages) == 1
    assert all("step-00000002 was not saved" in message for message in messages)
    assert sorted(p.name for p in tmp_path.iterdir()) == [earlier.name]
    assert contents(earlier) == before and verify(earlier, ONE_RANK)
    monkeypatch.undo()
    assert loaded_differences(save(tmp_path, 2, size=2, ep=2)) == []


def test_a_write_that_the_system_refuses_half_way(tmp_path):
    earlier = save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES // 2, hard))
    try:
        with pytest.raises(SaveFailed, match="step-00000002 was not saved"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in tmp_path.iterdir()) == [earlier.name]
    assert loaded_differences(earlier) == []


def test_a_folder_that_cannot_be_made_fails_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    world = World(2)

    def body(rank: int) -> None:
        saver = Saver(tmp_path / "file", world.ranks(rank), keep=1, background=False)
        saver.save(FakeState(world, rank, 2).fill(), family(), train_state(2), {})

    assert all("was not saved" in message for message in world.failures(body, SaveFailed))


def test_a_failure_that_is_no_disk_error_is_not_published(tmp_path, monkeypatch):
    def broken(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(folder, "manifest_json", broken)
    with pytest.raises(SaveFailed, match="KeyError: 'a bug'"):
        save(tmp_path, 1)
    assert latest(tmp_path)[0] is None


def test_weights_only_when_there_are_no_moments(tmp_path):
    world = World(1)
    saver = Saver(tmp_path, world.ranks(0), keep=1, background=False, moments=())
    published = saver.save(FakeState(world, 0, 1).fill(), family(), train_state(1), {})
    assert published == tmp_path / "step-00000001"
    assert not list(tmp_path.glob("step-*/optimizer/*"))
    assert latest(tmp_path) == (tmp_path / "step-00000001", [])
