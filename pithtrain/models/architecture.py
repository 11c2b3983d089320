"""The shape of a decoder, in the trainer's own words. Families translate their config.json to it and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from pithtrain.choices import ExpertType
from pithtrain.layers.experts.base import Shapes
from pithtrain.layers.experts.build import expert_class
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
    expert_type: ExpertType = "swiglu"


def layer_specs(arch: Architecture, layer: int) -> list[ParameterSpec]:
    """The parameters of one decoder layer, in the order in which a token meets them."""
    at, std = f"layers.{layer}.", arch.initializer_range
    hidden, head_dim = arch.hidden_size, arch.head_dim
    query, key = arch.num_attention_heads * head_dim, arch.num_key_value_heads * head_dim
    specs = [
        ParameterSpec(at + "attention_norm", (hidden,), decay=False, mean=1.0, fp32=True),
        ParameterSpec(at + "attention.qkv", (query + 2 * key, hidden), std=std),
        ParameterSpec(at + "attention.q_norm", (head_dim,), decay=False, mean=1.0, fp32=True),
        ParameterSpec(at + "attention.k_norm", (head_dim,), decay=False, mean=1.0, fp32=True),
        ParameterSpec(at + "attention.o", (hidden, query), std=std),
        ParameterSpec(at + "mlp_norm", (hidden,), decay=False, mean=1.0, fp32=True),
    ]
    if not arch.sparse_layers[layer]:
        wide = arch.intermediate_size
        return [
            *specs,
            ParameterSpec(at + "mlp.gate_up", (2 * wide, hidden), std=std),
            ParameterSpec(at + "mlp.down", (hidden, wide), std=std),
        ]
    return [
        *specs,
        ParameterSpec(at + "router", (arch.num_experts, hidden), std=std, fp32=True),
        *(_expert_spec(arch, f"{at}experts.{name}", parts) for name, parts in expert_shapes(arch).items()),
    ]


def expert_shapes(arch: Architecture) -> Shapes:
    """The tensors of one expert of the model: see Experts.shapes."""
    return expert_class(arch.expert_type).shapes(arch.hidden_size, arch.moe_intermediate_size)


def _expert_spec(arch: Architecture, name: str, parts: Mapping[str, tuple[int, ...]]) -> ParameterSpec:
    """Vectors start at zero and do not decay."""
    rows, inner = sum(shape[0] for shape in parts.values()), next(iter(parts.values()))[1:]
    std = arch.initializer_range if inner else 0.0
    return ParameterSpec(name, (arch.num_experts, rows, *inner), expert=True, decay=bool(inner), std=std)


def stage_specs(arch: Architecture, layers: range) -> list[ParameterSpec]:
    """The parameters of consecutive layers, with the embedding before the first and norm and head after the last.

    A tied head is the embedding and has no entry of its own.
    """
    specs = []
    if layers.start == 0:
        specs.append(ParameterSpec("embedding", (arch.vocab_size, arch.hidden_size), std=arch.initializer_range))
    for layer in layers:
        specs += layer_specs(arch, layer)
    if layers.stop == arch.num_layers:
        specs.append(ParameterSpec("norm", (arch.hidden_size,), decay=False, mean=1.0, fp32=True))
        if not arch.tie_word_embeddings:
            specs.append(ParameterSpec("head", (arch.vocab_size, arch.hidden_size), std=arch.initializer_range))
    return specs


def parameter_specs(arch: Architecture) -> list[ParameterSpec]:
    """Every parameter of the model, in the order in which a token meets them."""
    return stage_specs(arch, range(arch.num_layers))


def split_layers(arch: Architecture, num_stages: int) -> tuple[range, ...]:
    """Every layer in one stage, stages of consecutive layers, at least one each, the costliest as cheap as can be.

    A stage costs the parameters that a token meets there: of experts top_k, of the embedding one row, the whole head.
    """
    assert num_stages <= arch.num_layers, f"{arch.num_layers} layers do not fill {num_stages} stages"
    costs = [sum(_touched(arch, spec) for spec in layer_specs(arch, layer)) for layer in range(arch.num_layers)]
    costs[0] += arch.hidden_size
    costs[-1] += arch.vocab_size * arch.hidden_size

    @cache
    def best(stages: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """Of the first `stop` layers: the cost of the costliest of `stages` stages, and where each starts."""
        if stages == 1:
            return sum(costs[:stop]), (0,)
        before = {start: best(stages - 1, start) for start in range(stages - 1, stop)}
        return min((max(cost, sum(costs[start:stop])), (*starts, start)) for start, (cost, starts) in before.items())

    _, starts = best(num_stages, arch.num_layers)
    return tuple(range(start, stop) for start, stop in zip(starts, (*starts[1:], arch.num_layers), strict=True))


def _touched(arch: Architecture, spec: ParameterSpec) -> int:
    share = arch.top_k / arch.num_experts if spec.expert else 1
    return round(prod(spec.shape) * share)
