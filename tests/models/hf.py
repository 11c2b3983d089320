"""transformers' model as the oracle, its tensors under the names of released folders: one a projection and expert."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from pithtrain.models.qwen3_moe import Qwen3MoE
from pithtrain.step import Trainee


def released_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers keeps a layer's experts in fused tensors; released folders hold them one by one."""
    released: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            at = name.removesuffix("gate_up_proj")
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                released[f"{at}{expert}.gate_proj.weight"] = gate
                released[f"{at}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix("down_proj")
            released |= {f"{at}{expert}.down_proj.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            released[name] = tensor
    return released


def random_model(config: Mapping[str, Any], seed: int, std: float = 0.3) -> Qwen3MoeForCausalLM:
    """A model with every parameter, norms too, drawn anew: no two alike, none at its default.

    Its experts are a plain loop, which takes sizes of any alignment.
    """
    model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**config), experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, std, generator=generator)
    return model


def load(trainee: Trainee, family: Qwen3MoE, read: Callable[[str], Tensor]) -> None:
    """Fills the trainee's weights from the family's tensors."""
    masters = trainee.shard.masters()
    for name in trainee.shard.placements:
        tensor = family.names.from_family(name, trainee.shard.local_experts(name), read)
        trainee.shard.keep(masters, name, tensor)
    trainee.shard.gather()
