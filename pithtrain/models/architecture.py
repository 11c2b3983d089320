"""The shape of a decoder, in the trainer's own words. Families translate their config.json to it and back."""

from dataclasses import dataclass

from pithtrain.ops.parameter import ParameterSpec


@dataclass(frozen=True)
class Architecture:
    """One decoder. Sizes are counts of elements; every field means what it means in the family's config.json."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    tie_word_embeddings: bool
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    initializer_range: float


def layer_specs(arch: Architecture, layer: int) -> list[ParameterSpec]:
    """The parameters of one decoder layer, in the order in which a token meets them."""
    at, std = f"layers.{layer}.", arch.initializer_range
    hidden, head_dim = arch.hidden_size, arch.head_dim
    query, key = arch.num_attention_heads * head_dim, arch.num_key_value_heads * head_dim
    specs = [
        ParameterSpec(at + "attention_norm", (hidden,), decay=False),
        ParameterSpec(at + "attention.qkv", (query + 2 * key, hidden), std=std),
        ParameterSpec(at + "attention.q_norm", (head_dim,), decay=False),
        ParameterSpec(at + "attention.k_norm", (head_dim,), decay=False),
        ParameterSpec(at + "attention.o", (hidden, query), std=std),
        ParameterSpec(at + "mlp_norm", (hidden,), decay=False),
    ]
    if not arch.sparse_layers[layer]:
        wide = arch.intermediate_size
        return [
            *specs,
            ParameterSpec(at + "mlp.gate_up", (2 * wide, hidden), std=std),
            ParameterSpec(at + "mlp.down", (hidden, wide), std=std),
        ]
    experts, wide = arch.num_experts, arch.moe_intermediate_size
    return [
        *specs,
        ParameterSpec(at + "router", (experts, hidden), std=std),
        ParameterSpec(at + "experts.gate_up", (experts, 2 * wide, hidden), expert=True, std=std),
        ParameterSpec(at + "experts.down", (experts, hidden, wide), expert=True, std=std),
    ]


def parameter_specs(arch: Architecture) -> list[ParameterSpec]:
    """Every parameter of the model. A tied head is the embedding and has no entry of its own."""
    specs = [ParameterSpec("embedding", (arch.vocab_size, arch.hidden_size), std=arch.initializer_range)]
    for layer in range(arch.num_layers):
        specs += layer_specs(arch, layer)
    specs.append(ParameterSpec("norm", (arch.hidden_size,), decay=False))
    if not arch.tie_word_embeddings:
        specs.append(ParameterSpec("head", (arch.vocab_size, arch.hidden_size), std=arch.initializer_range))
    return specs
