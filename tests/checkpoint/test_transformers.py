"""transformers loads a checkpoint as it lies, and its folders load here."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pithtrain.checkpoint import Saver, import_weights
from pithtrain.models.qwen3_moe import from_hf_config
from tests.checkpoint.fakes import ARCH, FakeState, World, family, train_state


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_both_ways(tmp_path, tied):
    config = family(dataclasses.replace(ARCH, tie_word_embeddings=tied, rope_theta=777.0)).config_json()
    torch.manual_seed(0)
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    arch = from_hf_config(theirs.config.to_dict())
    world = World(2)

    def body(rank: int) -> None:
        state = FakeState(world, rank, 2, arch)
        import_weights(tmp_path / "hf", state, family(arch), world.ranks(rank))
        for kind in ("exp_avg", "exp_avg_sq"):
            state.parts |= {(kind, name): part for (_, name), part in list(state.parts.items())}
        saver = Saver(tmp_path, world.ranks(rank), keep=1, background=False, max_file_bytes=20_000)
        saver.save(state, family(arch), train_state(3), {"layers.0": torch.ones(8)})

    world.run(body)
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "step-00000003", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    mine, wanted = again.state_dict(), theirs.state_dict()
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert mine[name].dtype == torch.float32 and torch.equal(mine[name], tensor), name
    tokens = torch.arange(24).reshape(2, 12) % ARCH.vocab_size
    assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)
