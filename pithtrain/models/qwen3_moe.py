"""The Qwen3-MoE family: its config.json, its tensor names. As transformers' Qwen3MoeForCausalLM defines it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pithtrain.choices import ExpertType
from pithtrain.models.architecture import Architecture, expert_shapes, parameter_specs
from pithtrain.models.names import NameTable, Row

PRESETS = ("qwen3-moe-tiny", "qwen3-moe-small", "qwen3-30b-a3b")

FIXED: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}
OURS = {"model_type": "pith_moe", "architectures": ["PithMoeForCausalLM"]}  # with experts that the family does not have
ACTIVATIONS: dict[str, ExpertType] = {"silu": "swiglu", "gelu": "geglu", "relu2": "gated_relu2"}  # by hidden_act
FIELDS = (  # ours, theirs, the default (None: it must be there)
    ("vocab_size", "vocab_size", None),
    ("hidden_size", "hidden_size", None),
    ("num_layers", "num_hidden_layers", None),
    ("num_attention_heads", "num_attention_heads", None),
    ("num_key_value_heads", "num_key_value_heads", None),
    ("intermediate_size", "intermediate_size", None),
    ("moe_intermediate_size", "moe_intermediate_size", None),
    ("top_k", "num_experts_per_tok", None),
    ("norm_topk_prob", "norm_topk_prob", False),
    ("tie_word_embeddings", "tie_word_embeddings", False),
    ("rms_norm_eps", "rms_norm_eps", 1e-6),
    ("max_position_embeddings", "max_position_embeddings", None),
    ("initializer_range", "initializer_range", 0.02),
)


def _refuse_what_is_not_built(config: Mapping[str, Any]) -> None:
    fixed = FIXED | (OURS if config.get("model_type") == OURS["model_type"] else {})
    for key, expected in fixed.items():
        if key != "architectures" and (got := config.get(key, expected)) != expected:
            raise ValueError(f"config.json: {key} is {got!r}; only {expected!r} is supported for Qwen3-MoE")


def _expert_type(config: Mapping[str, Any]) -> ExpertType:
    ours = config.get("model_type") == OURS["model_type"]
    key = "expert_type" if ours else "hidden_act"
    known = {kind: kind for kind in get_args(ExpertType)} if ours else ACTIVATIONS
    got = config.get(key, None if ours else "silu")
    if got not in known:
        raise ValueError(f"config.json: {key} is {got!r}; expected one of {', '.join(known)}")
    kind: ExpertType = known[got]
    return kind


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
    swiglu = arch.expert_type == "swiglu"
    checks = (
        (heads % groups == 0, f"num_attention_heads is {heads}; expected a multiple of num_key_value_heads, {groups}"),
        (arch.head_dim % 2 == 0, f"head_dim is {arch.head_dim}; expected an even number, since RoPE turns pairs"),
        (arch.top_k <= experts, f"num_experts_per_tok is {arch.top_k}; expected at most num_experts, {experts}"),
        (swiglu or all(arch.sparse_layers), f"dense layers are SwiGLU, experts {arch.expert_type}; make all sparse"),
    )
    for fits, problem in checks:
        if not fits:
            raise ValueError(f"config.json: {problem}")
    return arch


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a Qwen3-MoE config.json describes; null means absent. ValueError for what is not built."""
    _refuse_what_is_not_built(config)
    values = {ours: _read(config, theirs, default) for ours, theirs, default in FIELDS}
    dense, step = config.get("mlp_only_layers") or [], _read(config, "decoder_sparse_step", 1)
    architecture = Architecture(
        **values,
        head_dim=_read(config, "head_dim", values["hidden_size"] // values["num_attention_heads"]),
        num_experts=_read(config, "num_experts" if config.get("num_local_experts") is None else "num_local_experts"),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(values["num_layers"])),
        rope_theta=_rope_theta(config),
        expert_type=_expert_type(config),
    )
    return _fitting(architecture)


def to_hf_config(arch: Architecture) -> dict[str, Any]:
    """The config.json of `arch`, as released Qwen3-MoE folders spell it; fp32 weights. Where the family has no such
    experts, under a model_type that nothing else reads.
    """
    values = asdict(arch)
    activation = {kind: name for name, kind in ACTIVATIONS.items()}.get(arch.expert_type)
    experts = {"hidden_act": activation} if activation else OURS | {"expert_type": arch.expert_type}
    return {
        **FIXED,
        **experts,
        **{theirs: values[ours] for ours, theirs, _ in FIELDS},
        "head_dim": arch.head_dim,
        "num_experts": arch.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(arch.sparse_layers) if not sparse],
        "rope_theta": arch.rope_theta,
        "rope_scaling": None,
        "torch_dtype": "float32",
    }


def name_table(arch: Architecture) -> NameTable:
    """Qwen3-MoE's tensor names against ours."""
    at = "model.layers.{layer}."
    query, key = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim

    def whole(ours: str, theirs: str) -> Row:
        return Row(ours, ((theirs, None),))

    rows = (
        whole("embedding", "model.embed_tokens.weight"),
        whole("layers.{layer}.attention_norm", at + "input_layernorm.weight"),
        Row(
            "layers.{layer}.attention.qkv",
            tuple((f"{at}self_attn.{part}_proj.weight", rows) for part, rows in (("q", query), ("k", key), ("v", key))),
        ),
        whole("layers.{layer}.attention.q_norm", at + "self_attn.q_norm.weight"),
        whole("layers.{layer}.attention.k_norm", at + "self_attn.k_norm.weight"),
        whole("layers.{layer}.attention.o", at + "self_attn.o_proj.weight"),
        whole("layers.{layer}.mlp_norm", at + "post_attention_layernorm.weight"),
        Row(
            "layers.{layer}.mlp.gate_up",
            tuple((f"{at}mlp.{part}_proj.weight", arch.intermediate_size) for part in ("gate", "up")),
        ),
        whole("layers.{layer}.mlp.down", at + "mlp.down_proj.weight"),
        whole("layers.{layer}.router", at + "mlp.gate.weight"),
        *(_expert_row(ours, parts, at + "mlp.experts.{expert}.") for ours, parts in expert_shapes(arch).items()),
        whole("norm", "model.norm.weight"),
        whole("head", "lm_head.weight"),
    )
    return NameTable(rows, {spec.name: spec.shape for spec in parameter_specs(arch)})


def _expert_row(ours: str, parts: Mapping[str, tuple[int, ...]], at: str) -> Row:
    """The family's matrices are gate_proj.weight and so on; vectors, which it does not have, keep their names."""
    theirs = {at + (f"{part}_proj.weight" if len(shape) > 1 else part): shape[0] for part, shape in parts.items()}
    sizes = [(name, rows if len(parts) > 1 else None) for name, rows in theirs.items()]
    return Row(f"layers.{{layer}}.experts.{ours}", tuple(sizes), expert=True)


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


def load_architecture(config: str, experts: ExpertType | None = None) -> Architecture:
    """From a preset's name, a config.json, or a folder that holds one; with experts of another type where given."""
    path = Path(config, "config.json") if Path(config).is_dir() else Path(config)
    try:
        if config in PRESETS:
            text = resources.files("pithtrain.models").joinpath(f"presets/{config}.json").read_text()
        else:
            text = path.read_text(encoding="utf-8")
        arch = from_hf_config(dict(json.loads(text)))
    except OSError:
        raise ValueError(
            f"model.config: {config!r} is neither a preset ({', '.join(PRESETS)}) nor a config.json nor a folder "
            "with one; correct the path"
        ) from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.config: {path}: {error}; correct the file, or name another") from error
    if experts not in (None, "swiglu") and not all(arch.sparse_layers):
        raise ValueError(f"model.experts = {experts}: {config} has dense layers, which are SwiGLU; leave it out")
    return replace(arch, expert_type=experts or arch.expert_type)
