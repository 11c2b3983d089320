"""Loading: verification, refusals that name the file, released folders, export."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pithtrain.checkpoint import ONE_RANK, export, import_weights, latest, load
from tests.checkpoint.fakes import (
    ARCH,
    FakeState,
    World,
    family,
    loaded_differences,
    save,
    train_state,
)

BIAS = torch.tensor([0.1, -0.2, 0, 0, 1e-9, 3, 0, 0.7])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("whole"), 7, size=2, ep=2, **{"layers.0": BIAS, "layers.2": -BIAS})


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run" / whole.name))


def refusals(checkpoint: Path, size: int = 2) -> list[str]:
    """Each rank's message; nothing may have reached the state."""
    world = World(size)

    def body(rank: int) -> None:
        state = FakeState(world, rank, size)
        try:
            load(checkpoint, state, family(), world.ranks(rank))
        finally:
            assert not state.parts

    return world.failures(body, ValueError)


def test_state_and_biases_come_back(whole):
    world = World(2)
    for state, biases in world.run(lambda r: load(whole, FakeState(world, r, 2), family(), world.ranks(r))):
        assert state == train_state(7)
        assert biases.keys() == {"layers.0", "layers.2"}
        assert torch.equal(biases["layers.0"], BIAS) and torch.equal(biases["layers.2"], -BIAS)
        assert biases["layers.0"].dtype == torch.float32


def test_any_damaged_byte_is_found_and_its_file_named(whole, copy):
    names = sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file())
    for name in names:
        data = bytearray((whole / name).read_bytes())
        data[len(data) // 2] ^= 4
        (copy / name).write_bytes(data)
        assert all(name in message or name == "pith/manifest.json" for message in refusals(copy)), name
        path, skipped = latest(copy.parent)
        assert path is None and (name in skipped[0] or name == "pith/manifest.json")
        shutil.copyfile(whole / name, copy / name)
    assert loaded_differences(copy) == []


def test_short_and_missing_files_are_named(whole, copy):
    for name in ("config.json", "model-00003-of-00", "optimizer/exp_avg_sq-00001", "pith/state.json"):
        path = next(copy.glob(f"{name}*"))
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert all(f"{path} has {len(data) - 1} bytes, expected {len(data)}" in m for m in refusals(copy))
        path.unlink()
        assert all(f"{path} is missing" in message for message in refusals(copy))
        path.write_bytes(data)
    (copy / "pith/manifest.json").unlink()
    assert all("pith/manifest.json is missing" in message for message in refusals(copy))


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other", "files": {}}', '{"files": {"a": 1}}'])
def test_a_foreign_manifest_is_refused(copy, text):
    (copy / "pith/manifest.json").write_text(text)
    assert all("pith/manifest.json" in message for message in refusals(copy))


def test_a_later_format_is_refused(copy):
    path = copy / "pith/manifest.json"
    path.write_text(path.read_text().replace("pith checkpoint 1", "pith checkpoint 2"))
    assert all(f"{path}: format 'pith checkpoint 2', expected 'pith checkpoint 1'" in m for m in refusals(copy))


def test_latest_takes_the_newest_whole_and_says_what_it_skipped(tmp_path):
    assert latest(tmp_path / "nothing") == (None, [])
    for step in (9, 10, 11, 100000000):
        save(tmp_path, step, keep=9)
    (tmp_path / ".tmp-step-00000012").mkdir()
    (tmp_path / "step-00000013").mkdir()
    (tmp_path / "step-latest").mkdir()
    (tmp_path / "step-100000000/pith/state.json").unlink()
    damaged = next((tmp_path / "step-00000011").glob("model-00002*"))
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\0\0\0\1")
    world = World(2)
    for path, skipped in world.run(lambda rank: latest(tmp_path, world.ranks(rank))):
        assert path == tmp_path / "step-00000010"
        named = [".tmp-step-00000012", "step-100000000/pith/state.json", "step-00000013", damaged.name]
        assert len(skipped) == 4 and all(name in line for name, line in zip(named, skipped, strict=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_theta": 5e5}, "config.json: another model's: rope_theta: got 10000.0, expected 500000.0"),
        ({"top_k": 3}, "num_experts_per_tok: got 2, expected 3"),
        ({"num_layers": 2, "sparse_layers": (True, False)}, "num_hidden_layers: got 3, expected 2"),
    ],
)
def test_another_model_is_refused(whole, changes, says):
    arch = dataclasses.replace(ARCH, **changes)
    with pytest.raises(ValueError) as caught:
        load(whole, FakeState(World(1), 0, 1, arch), family(arch), ONE_RANK)
    assert says in str(caught.value)


def test_what_does_not_change_the_model_may_differ(whole):
    arch = dataclasses.replace(ARCH, initializer_range=0.5, max_position_embeddings=64)
    state = FakeState(World(1), 0, 1, arch)
    load(whole, state, family(arch), ONE_RANK)
    assert state.differences() == []


def released(folder: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or family().config_json()))
    return folder


@pytest.fixture
def tensors(whole) -> dict[str, Tensor]:
    return {k: v for path in whole.glob("model-*.safetensors") for k, v in load_file(path).items()}


def test_a_single_file_in_half_precision_imports_as_fp32(tmp_path, tensors):
    name = "model.layers.0.self_attn.o_proj.weight"
    folder = released(tmp_path / "hf", {k: v.bfloat16() for k, v in tensors.items()})
    world = World(2)

    def body(rank: int) -> dict[tuple[str, str], Tensor]:
        state = FakeState(world, rank, 2)
        assert import_weights(folder, state, family(), world.ranks(rank)) == {}
        return state.parts

    parts = world.run(body)
    found = [p["weight", "layers.0.attention.o"] for p in parts if ("weight", "layers.0.attention.o") in p]
    assert len(found) == 1 and torch.equal(found[0], tensors[name].bfloat16().float())
    for rank in (0, 1):
        for row in range(4):
            theirs = tensors[f"model.layers.2.mlp.experts.{4 * rank + row}.down_proj.weight"]
            ours = parts[rank]["weight", "layers.2.experts.down"][row]
            assert torch.equal(ours, theirs.bfloat16().float())


def test_released_folders_that_do_not_fit_are_refused(tmp_path, tensors):
    down = "model.layers.2.mlp.experts.3.down_proj.weight"
    config = family().config_json()
    cases = [
        ({k: v for k, v in tensors.items() if k != down}, None, f"1 missing ['{down}']"),
        (tensors | {"extra": torch.zeros(1)}, None, "1 not expected ['extra']"),
        (
            tensors | {down: tensors[down].T.contiguous()},
            None,
            f"{down} has shape [20, 32], expected [32, 20]",
        ),
        (tensors | {down: tensors[down].double()}, None, f"{down} has dtype F64"),
        (tensors, config | {"hidden_act": "gelu"}, "config.json"),
        (tensors, config | {"norm_topk_prob": False}, "norm_topk_prob: got False, expected True"),
    ]
    for i, (given, changed, says) in enumerate(cases):
        folder = released(tmp_path / str(i), given, changed)
        state = FakeState(World(1), 0, 1)
        with pytest.raises(ValueError) as caught:
            import_weights(folder, state, family())
        assert says in str(caught.value) and str(folder) in str(caught.value)
        assert not state.parts


def test_broken_released_folders_are_named(tmp_path, tensors):
    folder = released(tmp_path / "hf", tensors)
    state = FakeState(World(1), 0, 1)
    index = folder / "model.safetensors.index.json"
    outside = json.dumps({"weight_map": dict.fromkeys(tensors, "../model.safetensors")})
    for text, says in (("{", "not a safetensors index"), (outside, "names '../model.safetensors'")):
        index.write_text(text)
        with pytest.raises(ValueError, match=f"hf/model.safetensors.index.json: {says}"):
            import_weights(folder, state, family())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "gone.safetensors")}))
    with pytest.raises(ValueError, match=r"hf/gone.safetensors"):
        import_weights(folder, state, family())
    shutil.copy(folder / "model.safetensors", folder / "twice.safetensors")
    names = ("model.safetensors", "twice.safetensors")
    index.write_text(json.dumps({"weight_map": dict(zip(tensors, 2 * names, strict=False))}))
    with pytest.raises(ValueError, match=r"hf/twice.safetensors: .* stands in another file too"):
        import_weights(folder, state, family())
    index.unlink()
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"hf/model.safetensors: cannot be read"):
        import_weights(folder, state, family())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"hf: neither"):
        import_weights(folder, state, family())
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"hf/config.json: not a config .*No such file"):
        import_weights(folder, state, family())


def test_our_own_checkpoint_imports_with_its_biases(whole):
    state = FakeState(World(1), 0, 1)
    biases = import_weights(whole, state, family())
    assert state.differences(kinds=("weight",)) == [] and torch.equal(biases["layers.0"], BIAS)


def test_a_checkpoint_of_ours_in_half_precision_is_refused(copy):
    """Masters and moments are fp32: what has lost its low bits cannot go on exactly."""
    file = next(copy.glob("optimizer/exp_avg_sq-00001*"))
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    state = FakeState(World(1), 0, 1)
    with pytest.raises(ValueError, match="has dtype BF16, expected one of \\['F32'\\]"):
        load(copy, state, family(), verified=True)
    assert not state.parts


def test_a_checkpoint_without_moments_says_so_when_they_are_wanted(tmp_path, whole):
    state = FakeState(World(1), 0, 1)
    with pytest.raises(ValueError, match="no momentum_buffer to load"):
        load(whole, state, family(), moments=("momentum_buffer",))
    assert not state.parts


def test_export_refuses_what_would_be_lost_and_says_what_it_leaves_out(whole, tmp_path, tensors):
    out = tmp_path / "new" / "out"
    with pytest.raises(ValueError, match=r"routing_bias.safetensors: 2 layers .*--drop-biases"):
        export(whole, out)
    assert not out.exists()
    assert "left out: routing biases of 2 layers" in export(whole, out, drop_biases=True)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir() if p.is_file())
    state = FakeState(World(1), 0, 1)
    import_weights(out, state, family())
    assert state.differences(kinds=("weight",)) == []
    with pytest.raises(ValueError, match="exists"):
        export(whole, out, drop_biases=True)


def test_export_of_unbiased_and_of_damaged_checkpoints(tmp_path):
    checkpoint = save(tmp_path, 1, **{"layers.0": torch.zeros(8)})
    assert "left out" not in export(checkpoint, tmp_path / "out")
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json has 2 bytes"):
        export(checkpoint, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()
