"""Qwen3-MoE's config.json to an architecture and back."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import Qwen3MoeConfig

from pithtrain.choices import ExpertType
from pithtrain.models.architecture import parameter_specs
from pithtrain.models.qwen3_moe import PRESETS, Qwen3MoE, from_hf_config, load_architecture, to_hf_config
from pithtrain.ops.parameter import initial_values


def preset(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        resources.files("pithtrain.models").joinpath(f"presets/{name}.json").read_text()
    )
    return config


TINY = preset("qwen3-moe-tiny")
VARIANTS = {
    **{name: preset(name) for name in PRESETS},
    "dense layers by name": TINY | {"mlp_only_layers": [0, 2]},
    "every second layer sparse": TINY | {"decoder_sparse_step": 2, "mlp_only_layers": []},
    "every third, and one dense": TINY | {"decoder_sparse_step": 3, "mlp_only_layers": [2], "num_hidden_layers": 7},
    "tied": TINY | {"tie_word_embeddings": True},
    "not renormalised": TINY | {"norm_topk_prob": False},
    "other rope": TINY | {"rope_theta": 123456.0, "rms_norm_eps": 1e-5, "initializer_range": 0.1},
    "as transformers writes it": Qwen3MoeConfig(**TINY).to_dict(),
}
MEANS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("tie_word_embeddings", "rms_norm_eps", "max_position_embeddings", "initializer_range", "hidden_act"),
    *("attention_bias", "use_sliding_window", "rope_parameters"),
)


def meaning(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of it: every field the model is built from, and which layers are sparse."""
    read = Qwen3MoeConfig(**config)
    layers = range(read.num_hidden_layers)
    sparse = [i not in (read.mlp_only_layers or []) and (i + 1) % read.decoder_sparse_step == 0 for i in layers]
    return {field: getattr(read, field) for field in MEANS} | {"sparse": sparse}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_config_round_trip(config: dict[str, Any]) -> None:
    arch = from_hf_config(config)
    written = to_hf_config(arch)
    assert meaning(written) == meaning(config)
    assert from_hf_config(written) == arch
    assert json.loads(json.dumps(written)) == written
    assert written["model_type"] == "qwen3_moe" and written["architectures"] == ["Qwen3MoeForCausalLM"]
    assert Qwen3MoE.of(arch).config_json() == written


def test_every_field_of_an_architecture_comes_from_the_config() -> None:
    arch = from_hf_config(TINY | {"rope_theta": 77.0, "initializer_range": 0.3, "tie_word_embeddings": True})
    assert (arch.vocab_size, arch.hidden_size, arch.num_layers) == (96, 32, 3)
    assert (arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim) == (4, 2, 12)
    assert (arch.intermediate_size, arch.moe_intermediate_size) == (40, 20)
    assert (arch.num_experts, arch.top_k, arch.norm_topk_prob) == (8, 2, True)
    assert arch.sparse_layers == (True, False, True)
    assert (arch.tie_word_embeddings, arch.rope_theta, arch.rms_norm_eps) == (True, 77.0, 1e-6)
    assert (arch.max_position_embeddings, arch.initializer_range) == (128, 0.3)


@pytest.mark.parametrize("kind", get_args(ExpertType))
def test_types_of_experts_round_trip(kind: ExpertType) -> None:
    """What transformers computes alike is written as its own; the rest under a model_type that it refuses to read."""
    arch = replace(load_architecture("qwen3-moe-small"), expert_type=kind)
    written = to_hf_config(arch)
    assert from_hf_config(written) == arch
    activation = {"swiglu": "silu", "geglu": "gelu", "gated_relu2": "relu2"}.get(kind)
    assert (written.get("hidden_act"), written["model_type"]) == (activation, "qwen3_moe" if activation else "pith_moe")
    assert load_architecture("qwen3-moe-small", kind) == arch
    with (
        pytest.raises(ValueError, match=f"model.experts = {kind}: qwen3-moe-tiny has dense layers")
        if kind != "swiglu"
        else nullcontext()
    ):
        load_architecture("qwen3-moe-tiny", kind)


def test_vectors_of_experts_start_at_zero_and_do_not_decay() -> None:
    arch = load_architecture("qwen3-moe-small", "clamped_swiglu")
    specs = {spec.name.rpartition(".")[2]: spec for spec in parameter_specs(arch) if "layers.0.experts" in spec.name}
    assert [*specs] == ["gate_up", "gate_up_bias", "down", "down_bias"] and all(spec.expert for spec in specs.values())
    for name, spec in specs.items():
        assert spec.decay == (not name.endswith("bias")) == bool(initial_values(spec, 1, 0).any())


def test_what_a_config_leaves_out() -> None:
    """As transformers reads it: heads share the hidden size, weights are not renormalised, theta is 10,000."""
    left_out = ("head_dim", "norm_topk_prob", "rope_theta", "decoder_sparse_step", "mlp_only_layers", "rms_norm_eps")
    arch = from_hf_config({key: value for key, value in TINY.items() if key not in left_out})
    assert (arch.head_dim, arch.norm_topk_prob, arch.rope_theta, arch.rms_norm_eps) == (8, False, 10000.0, 1e-6)
    assert arch.sparse_layers == (True, True, True)
    assert arch == from_hf_config(TINY | dict.fromkeys(left_out)), "null is the same as absent"
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in TINY.items()}
    assert from_hf_config(renamed) == from_hf_config(TINY)


UNBUILT: list[tuple[dict[str, Any], str]] = [
    ({"use_sliding_window": True}, r"use_sliding_window is True; only False is supported"),
    ({"attention_bias": True}, r"attention_bias is True; only False is supported"),
    ({"attention_dropout": 0.1}, r"attention_dropout is 0.1; only 0.0 is supported"),
    ({"hidden_act": "tanh"}, r"hidden_act is 'tanh'; expected one of silu, gelu, relu2"),
    ({"hidden_act": "gelu"}, r"dense layers are SwiGLU, experts geglu; make all sparse"),
    ({"model_type": "pith_moe"}, r"expert_type is None; expected one of swiglu, "),
    ({"model_type": "qwen3"}, r"model_type is 'qwen3'; only 'qwen3_moe' is supported"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope scaling .*yarn.* is not supported; set rope_scaling"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        r"rope scaling 'linear' is not supported; set rope",
    ),
    ({"rope_parameters": {"type": "linear", "factor": 2.0}}, r"rope scaling 'linear' is not supported"),
    ({"num_experts": None}, r"num_experts is missing; expected a whole number above 0"),
    ({"vocab_size": None}, r"vocab_size is missing"),
]
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok is 9; expected at most num_experts, 8"),
    ({"num_key_value_heads": 3}, r"num_attention_heads is 4; expected a multiple of num_key_value_heads, 3"),
    ({"head_dim": 7}, r"head_dim is 7; expected an even number"),
    ({"decoder_sparse_step": 0}, r"decoder_sparse_step is 0; expected a whole number above 0"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; expected a whole number above 0"),
    ({"num_experts": 0}, r"num_experts is 0; expected a whole number above 0"),
    ({"vocab_size": "96"}, r"vocab_size is '96'; expected a whole number above 0"),
    ({"hidden_size": 32.5}, r"hidden_size is 32.5; expected a whole number above 0"),
    ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps is '1e-6'; expected a number above 0"),
    ({"initializer_range": 0.0}, r"initializer_range is 0.0; expected a number above 0"),
    ({"tie_word_embeddings": 1}, r"tie_word_embeddings is 1; expected true or false"),
]


@pytest.mark.parametrize(("change", "message"), UNBUILT + UNFIT, ids=[str(change) for change, _ in UNBUILT + UNFIT])
def test_unbuilt_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf_config(TINY | change)


def test_a_model_is_named_by_preset_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 50}))
    expected = from_hf_config(TINY | {"vocab_size": 50})
    assert load_architecture(str(tmp_path)) == load_architecture(str(tmp_path / "config.json")) == expected
    assert load_architecture("qwen3-moe-tiny") == from_hf_config(TINY)
    with pytest.raises(ValueError, match=r"model.config: 'qwen3-nope' is neither a preset \(qwen3-moe-tiny, .*correct"):
        load_architecture("qwen3-nope")
    for text in (b"{", b"[1]", b"null", b"\xff", json.dumps(TINY | {"rope_parameters": "x"}).encode()):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ValueError, match=rf"model.config: {re.escape(str(tmp_path / 'config.json'))}: .*correct"):
            load_architecture(str(tmp_path))


def test_the_large_preset_is_the_released_model() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, of which 128 experts in each of 48 layers."""

    arch = load_architecture("qwen3-30b-a3b")
    assert (arch.num_layers, arch.num_experts, arch.top_k, arch.rope_theta) == (48, 128, 8, 1e6)
    assert sum(prod(spec.shape) for spec in parameter_specs(arch)) == 30_532_122_624
