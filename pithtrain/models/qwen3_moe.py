"""The Qwen3-MoE family: its config.json, its tensor names. As transformers' Qwen3MoeForCausalLM defines it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pithtrain.models.architecture import Architecture, parameter_specs
from pithtrain.models.names import NameTable, Row

PRESETS = ("qwen3-moe-tiny", "qwen3-moe-small", "qwen3-30b-a3b")

FIXED: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


def _refuse_what_is_not_built(config: Mapping[str, Any]) -> None:
    for key, expected in FIXED.items():
        if key != "architectures" and (got := config.get(key, expected)) != expected:
            raise ValueError(f"config.json: {key} is {got!r}; only {expected!r} is supported for Qwen3-MoE")


def _read(config: Mapping[str, Any], key: str, default: int | float | None = None) -> Any:
    """A value of the kind `default` has (None: a whole number that must be there), above 0 unless true or false."""
    value: Any = default if config.get(key) is None else config[key]
    kind = int if default is None else type(default)
    if type(value) not in ((int, float) if kind is float else (kind,)) or (kind is not bool and not value > 0):
        wanted = {int: "a whole number above 0", float: "a number above 0", bool: "true or false"}[kind]
        raise ValueError(f"config.json: {key} is {'missing' if value is None else repr(value)}; expected {wanted}")
    return value


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of RoPE, in either spelling of transformers. ValueError where RoPE is scaled."""
    rope = dict(config.get("rope_parameters") or {})
    scaling = config.get("rope_scaling") or rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise ValueError(
            f"config.json: rope scaling {scaling!r} is not supported; set rope_scaling to null, rope_type to default"
        )
    return float(_read({**config, **rope}, "rope_theta", 10000.0))


def _fitting(arch: Architecture) -> Architecture:
    heads, groups, experts = arch.num_attention_heads, arch.num_key_value_heads, arch.num_experts
    checks = (
        (heads % groups == 0, f"num_attention_heads is {heads}; expected a multiple of num_key_value_heads, {groups}"),
        (arch.head_dim % 2 == 0, f"head_dim is {arch.head_dim}; expected an even number, since RoPE turns pairs"),
        (arch.top_k <= experts, f"num_experts_per_tok is {arch.top_k}; expected at most num_experts, {experts}"),
    )
    for fits, problem in checks:
        if not fits:
            raise ValueError(f"config.json: {problem}")
    return arch


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a Qwen3-MoE config.json describes; null means absent. ValueError for what is not built."""
    _refuse_what_is_not_built(config)
    layers, heads = _read(config, "num_hidden_layers"), _read(config, "num_attention_heads")
    dense, step = config.get("mlp_only_layers") or [], _read(config, "decoder_sparse_step", 1)
    architecture = Architecture(
        vocab_size=_read(config, "vocab_size"),
        hidden_size=_read(config, "hidden_size"),
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_read(config, "num_key_value_heads"),
        head_dim=_read(config, "head_dim", _read(config, "hidden_size") // heads),
        intermediate_size=_read(config, "intermediate_size"),
        moe_intermediate_size=_read(config, "moe_intermediate_size"),
        num_experts=_read(config, "num_experts" if config.get("num_local_experts") is None else "num_local_experts"),
        top_k=_read(config, "num_experts_per_tok"),
        norm_topk_prob=_read(config, "norm_topk_prob", False),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        tie_word_embeddings=_read(config, "tie_word_embeddings", False),
        rope_theta=_rope_theta(config),
        rms_norm_eps=_read(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=_read(config, "max_position_embeddings"),
        initializer_range=_read(config, "initializer_range", 0.02),
    )
    return _fitting(architecture)


def to_hf_config(arch: Architecture) -> dict[str, Any]:
    """The config.json of `arch`, as released Qwen3-MoE folders spell it; fp32 weights."""
    return FIXED | {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_key_value_heads": arch.num_key_value_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate_size,
        "moe_intermediate_size": arch.moe_intermediate_size,
        "num_experts": arch.num_experts,
        "num_experts_per_tok": arch.top_k,
        "norm_topk_prob": arch.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(arch.sparse_layers) if not sparse],
        "tie_word_embeddings": arch.tie_word_embeddings,
        "rope_theta": arch.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": arch.rms_norm_eps,
        "max_position_embeddings": arch.max_position_embeddings,
        "initializer_range": arch.initializer_range,
        "torch_dtype": "float32",
    }


def name_table(arch: Architecture) -> NameTable:
    """Qwen3-MoE's tensor names against ours."""
    at = "model.layers.{layer}."
    query, key = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    dense, sparse = arch.intermediate_size, arch.moe_intermediate_size

    def whole(ours: str, theirs: str, expert: bool = False) -> Row:
        return Row(ours, ((theirs, None),), expert)

    rows = (
        whole("embedding", "model.embed_tokens.weight"),
        whole("layers.{layer}.attention_norm", at + "input_layernorm.weight"),
        Row(
            "layers.{layer}.attention.qkv",
            (
                (at + "self_attn.q_proj.weight", query),
                (at + "self_attn.k_proj.weight", key),
                (at + "self_attn.v_proj.weight", key),
            ),
        ),
        whole("layers.{layer}.attention.q_norm", at + "self_attn.q_norm.weight"),
        whole("layers.{layer}.attention.k_norm", at + "self_attn.k_norm.weight"),
        whole("layers.{layer}.attention.o", at + "self_attn.o_proj.weight"),
        whole("layers.{layer}.mlp_norm", at + "post_attention_layernorm.weight"),
        Row(
            "layers.{layer}.mlp.gate_up",
            ((at + "mlp.gate_proj.weight", dense), (at + "mlp.up_proj.weight", dense)),
        ),
        whole("layers.{layer}.mlp.down", at + "mlp.down_proj.weight"),
        whole("layers.{layer}.router", at + "mlp.gate.weight"),
        Row(
            "layers.{layer}.experts.gate_up",
            (
                (at + "mlp.experts.{expert}.gate_proj.weight", sparse),
                (at + "mlp.experts.{expert}.up_proj.weight", sparse),
            ),
            expert=True,
        ),
        whole("layers.{layer}.experts.down", at + "mlp.experts.{expert}.down_proj.weight", expert=True),
        whole("norm", "model.norm.weight"),
        whole("head", "lm_head.weight"),
    )
    return NameTable(rows, {spec.name: spec.shape for spec in parameter_specs(arch)})


@dataclass(frozen=True)
class Qwen3MoE:
    """A model of the family: what its folder says, what we build from it, and its names against ours."""

    arch: Architecture
    names: NameTable

    @staticmethod
    def of(arch: Architecture) -> "Qwen3MoE":
        return Qwen3MoE(arch, name_table(arch))

    def config_json(self) -> dict[str, Any]:
        return to_hf_config(self.arch)

    def respell(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Any config.json of the family as `config_json` would spell it. ValueError for what is not built."""
        return to_hf_config(from_hf_config(config))


def load_architecture(config: str) -> Architecture:
    """From a preset's name, a config.json, or a folder that holds one."""
    if config in PRESETS:
        text = resources.files("pithtrain.models").joinpath(f"presets/{config}.json").read_text()
        return from_hf_config(json.loads(text))
    path = Path(config, "config.json") if Path(config).is_dir() else Path(config)
    if not path.is_file():
        raise ValueError(
            f"model.config: {config!r} is neither a preset ({', '.join(PRESETS)}) nor a config.json nor a folder "
            "with one; correct the path"
        )
    try:
        return from_hf_config(dict(json.loads(path.read_bytes())))
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.config: {path}: {error}; correct the file, or name another") from error
