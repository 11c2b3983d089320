"""Layers split into stages: every layer once, as even as can be, the embedding and the head counted."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from pithtrain.models.architecture import Architecture, parameter_specs, split_layers, stage_specs
from pithtrain.models.decoder import build_stage
from pithtrain.ops.parameter import ParameterSpec
from tests.whole_model import ARCH, new_trainee


def deep(layers: int, vocab_size: int = 31, every: int = 1, tied: bool = False) -> Architecture:
    """Every so many-th layer is sparse."""
    sparse = tuple(layer % every == 0 for layer in range(layers))
    return replace(
        ARCH, num_layers=layers, vocab_size=vocab_size, sparse_layers=sparse, tie_word_embeddings=tied, top_k=2
    )


ARCHITECTURES = {
    "even": deep(8),
    "a wide head": deep(8, vocab_size=1000),
    "dense and sparse": deep(9, every=3),
    "tied": deep(7, every=2, tied=True),
}


def cost(arch: Architecture, layer: int) -> int:
    """Parameters that a token meets, by hand."""
    hidden, head = arch.hidden_size, arch.head_dim
    heads, keys = arch.num_attention_heads, arch.num_key_value_heads
    total = 2 * hidden + 2 * head + (heads + 2 * keys) * head * hidden + hidden * heads * head
    if arch.sparse_layers[layer]:
        total += arch.num_experts * hidden + arch.top_k * 3 * hidden * arch.moe_intermediate_size
    else:
        total += 3 * hidden * arch.intermediate_size
    total += hidden if layer == 0 else 0
    return total + (arch.vocab_size * hidden if layer == arch.num_layers - 1 else 0)


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_no_other_split_has_a_cheaper_costliest_stage(arch: Architecture) -> None:
    costs = [cost(arch, layer) for layer in range(arch.num_layers)]
    for stages in range(1, arch.num_layers + 1):
        splits = [(0, *cuts, arch.num_layers) for cuts in combinations(range(1, arch.num_layers), stages - 1)]
        best = min(max(sum(costs[start:stop]) for start, stop in pairwise(split)) for split in splits)
        got = split_layers(arch, stages)
        assert max(sum(costs[layer] for layer in part) for part in got) == best


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (7, 4), (48, 8), (5, 5), (9, 8), (3, 1)])
def test_every_layer_is_in_one_stage(layers: int, stages: int) -> None:
    split = split_layers(deep(layers), stages)
    assert [layer for part in split for layer in part] == list(range(layers))
    assert len(split) == stages and all(len(part) for part in split)


def test_a_wide_head_leaves_its_stage_fewer_layers() -> None:
    plain, wide = (split_layers(ARCHITECTURES[name], 2) for name in ("even", "a wide head"))
    assert [len(part) for part in plain] == [4, 4] and [len(part) for part in wide] == [7, 1]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 layers do not fill 4 stages"):
        split_layers(deep(3), 4)


def names(specs: list[ParameterSpec]) -> list[str]:
    return [spec.name for spec in specs]


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_the_stages_parameters_are_the_models(arch: Architecture) -> None:
    """Each once, in the model's order; a tied head has none of its own."""
    for stages in (1, 2, 3, arch.num_layers):
        split = split_layers(arch, stages)
        parts = [stage_specs(arch, part) for part in split]
        assert [spec for part in parts for spec in part] == parameter_specs(arch)
        assert names(parts[0])[0] == "embedding" and names(parts[-1])[-2:].count("norm") == 1
        assert ("head" in names(parts[-1])) == (not arch.tie_word_embeddings)
        for part, specs in zip(split, parts, strict=True):
            layers = {int(name.split(".")[1]) for name in names(specs) if name.startswith("layers.")}
            assert layers == set(part)


def test_stages_have_what_their_place_asks_for() -> None:
    """The embedding in the first, norm and head in the last; a sparse layer keeps its place among the model's."""
    arch = ARCHITECTURES["tied"]
    weights = new_trainee(4, arch).shard.weights()
    first, middle, last = (build_stage(arch, weights, part, arch.num_experts) for part in split_layers(arch, 3))
    assert first.embedding is last.head is weights["embedding"] and last.norm is weights["norm"]
    assert [first.norm, first.head, middle.embedding, middle.norm, middle.head, last.embedding] == [None] * 6
    assert [*first.rows, *middle.rows, *last.rows] == list(range(4))
    rows = {layer: row for row, layer in enumerate(index for index, sparse in enumerate(arch.sparse_layers) if sparse)}
    for stage in (first, middle, last):
        assert stage.rows == [rows[int(layer.name.split(".")[1])] for layer in stage.layers if hasattr(layer, "row")]
