"""Checkpoints through the real shards of several meshes: the bytes are those that were saved."""

from pathlib import Path

import torch

from golden.cases import CASES, Case, Layout
from golden.replay import batches, make_dataset, make_trainee, take
from golden.world import run_world
from pithtrain.checkpoint import Ranks, Saver, TrainState, load
from pithtrain.models.qwen3_moe import Qwen3MoE
from pithtrain.ops.host import read_ints
from pithtrain.parallel.transport import AllReduce, Transport
from pithtrain.train.checkpoints import ShardState

[CASE] = [case for case in CASES if case.name == "dense-tied-sgd"]  # odd sizes: slices cut through parameters
BASE: Case = CASES[0]


def save_after_a_step(case: Case, layout: Layout, source: Path | None, folder: Path) -> None:
    """On every rank: loads `source`, or trains one step, then saves the model to `folder`."""
    transport = Transport()
    trainee, optimizer = make_trainee(case, layout, transport, {})
    mesh = trainee.mesh

    def agree(ok: bool) -> bool:
        return read_ints(transport.run(AllReduce(torch.tensor([int(not ok)]), mesh.world))[0]) == [0]

    ranks, family = Ranks(mesh.rank, mesh.world_size, agree), Qwen3MoE.of(case.arch)
    state, moments = ShardState(trainee.shard, optimizer), tuple(optimizer.state())
    if source is None:
        trainee.shard.initialise(case.seed)
        take(case, trainee, optimizer, batches(case, make_dataset(case), layout, mesh, 0), 0, 0, None, None)
    else:
        load(source, state, family, ranks, moments=moments)
    saver = Saver(folder, ranks, keep=1, background=False, moments=moments)
    saver.save(state, family, TrainState(1, 1, 8, 128), {})


def files(checkpoint: Path) -> dict[str, bytes]:
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


def test_round_trip_through_other_meshes(tmp_path: Path) -> None:
    for case in (BASE, CASE):
        layouts = (Layout(dp=2, ep=2), Layout(ep=4), Layout(pp=2, dp=2), Layout(), Layout(pp=2))
        saved: list[Path] = []
        for index, layout in enumerate(layouts):
            folder = tmp_path / case.name / str(index)
            source = saved[-1] if saved else None
            run_world(layout.world_size, save_after_a_step, case, layout, source, folder)
            saved += folder.glob("step-*")
        first = files(saved[0])
        assert len(saved) == len(layouts) and any(name.endswith(".safetensors") for name in first)
        assert ("optimizer/exp_avg.safetensors.index.json" in first) == (case is BASE)
        for layout, checkpoint in zip(layouts[1:], saved[1:], strict=True):
            assert files(checkpoint) == first, f"{case.name} changed through {layout}"
