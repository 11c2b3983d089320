"""The table of weight names: inverted bit for bit, and the names of released folders."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from pithtrain.choices import ExpertType
from pithtrain.models.architecture import Architecture
from pithtrain.models.qwen3_moe import load_architecture, name_table, to_hf_config
from tests.agreement import randn
from tests.models import hf

TINY = load_architecture("qwen3-moe-tiny")
ARCHITECTURES = {"tiny": TINY, "tied": replace(TINY, tie_word_embeddings=True, num_key_value_heads=1)}
WITH_EXPERTS = {kind: replace(TINY, expert_type=kind) for kind in get_args(ExpertType)}


@pytest.mark.parametrize("arch", [*ARCHITECTURES.values(), *WITH_EXPERTS.values()], ids=[*ARCHITECTURES, *WITH_EXPERTS])
def test_names_invert(arch: Architecture) -> None:
    table = name_table(arch)
    for name, shape in table.shapes.items():
        ours = randn(*shape, seed=len(name))
        theirs = table.to_family(name, ours)
        assert all(tensor.is_contiguous() for tensor in theirs.values())
        assert {key: tuple(tensor.shape) for key, tensor in theirs.items()} == dict(table.family_names(name))
        assert torch.equal(table.from_family(name, None, theirs.__getitem__), ours)
        if ".experts." in name:
            some = range(2, 5)
            assert torch.equal(table.from_family(name, some, theirs.__getitem__), ours[2:5])


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_names_are_those_of_transformers(arch: Architecture) -> None:
    table = name_table(arch)
    ours = [pair for name in table.shapes for pair in table.family_names(name)]
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**to_hf_config(arch)))
    state = hf.released_names(model.state_dict())
    if arch.tie_word_embeddings:
        assert state.pop("lm_head.weight").data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert len(ours) == len(dict(ours)), "a name stands twice"
    assert dict(ours) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    experts = [name for name in state if ".mlp.experts." in name]
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in experts
    assert len(experts) == 3 * arch.num_experts * sum(arch.sparse_layers)


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"q_proj.weight': got shape \(1, 1\), expected \(48, 32\)"):
        name_table(TINY).from_family("layers.0.attention.qkv", None, lambda name: torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"no row for .layers.\{layer\}.attention.v."):
        name_table(TINY).family_names("layers.0.attention.v")
