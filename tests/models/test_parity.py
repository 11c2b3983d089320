"""The model against transformers': logits and every gradient, from the same random weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from pithtrain import passes, step
from pithtrain.data import Batch
from pithtrain.layers.balance import Objective
from pithtrain.models.qwen3_moe import Qwen3MoE, from_hf_config
from pithtrain.ops.linear import Compute
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.tape import drive, unobserved
from pithtrain.parallel.transport import Transport
from tests.agreement import assert_agree, assert_close
from tests.models import hf

SHAPE: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 18,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 26,
    "moe_intermediate_size": 14,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "rope_theta": 100.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "renormalised, a dense layer, 7 experts": SHAPE | {"mlp_only_layers": [1]},
    "not renormalised, tied, every head its own keys": SHAPE
    | {"norm_topk_prob": False, "tie_word_embeddings": True, "num_key_value_heads": 6, "num_experts": 8},
    "every second layer sparse, one key head, top-1": SHAPE
    | {
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 1,
        "num_experts": 5,
    },
    "geglu experts": SHAPE | {"hidden_act": "gelu", "num_hidden_layers": 2},
    "gated relu2 experts": SHAPE | {"hidden_act": "relu2", "num_hidden_layers": 2},
    "every expert chosen": SHAPE | {"num_experts": 5, "num_experts_per_tok": 5, "num_hidden_layers": 2},
}


def oracle(model: Qwen3MoeForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(logits, loss, gradients by released name) of transformers' model."""
    logits = model(input_ids=batch.tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"transformers gave no gradient to {missing}"
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits, loss, hf.released_names(grads)


def logits_of(trainee: step.Trainee, batch: Batch) -> Tensor:
    (choices,) = step.learned(trainee, 1, None)
    inputs = passes.Inputs(batch.tokens, batch.labels, None, trainee.tables, choices, None)
    (stage,) = trainee.stages.values()
    setting, tape = passes.Setting(trainee.mesh, Compute(), Compute()), passes.Tape(unobserved, keeps=False)
    ((hidden, _),) = drive(trainee.transport, passes.encode(stage, inputs, None, setting, tape))
    assert stage.head is not None
    logits: Tensor = stage.final_norm(hidden)[0] @ stage.head.value.T
    return logits.view(*batch.tokens.shape, -1)


def random_batch(vocab_size: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab_size, (6, 24), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :13] = -100
    labels[2, 20:] = -100
    return Batch(tokens[:, :-1], labels)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_and_gradients_are_those_of_transformers(config: dict[str, Any]) -> None:
    model, batch = hf.random_model(config, seed=3), random_batch(config["vocab_size"])
    logits, loss, expected = oracle(model, batch)

    arch = from_hf_config(model.config.to_dict())
    family = Qwen3MoE.of(arch)
    trainee = step.build(arch, make_mesh(), Transport(), batch.tokens.shape[1], torch.device("cpu"))
    state, used = hf.released_names(model.state_dict()), set[str]()

    def read(name: str) -> Tensor:
        assert name not in used, f"{name} was read twice"
        used.add(name)
        return state[name]

    hf.load(trainee, family, read)
    tied = {"lm_head.weight"} if arch.tie_word_embeddings else set()
    assert state.keys() - used == tied, "weights of transformers that we have no place for"

    result = step.gradients(trainee, [batch], Objective(), step.learned(trainee, 1, None), Compute())
    assert bool((result.num_tokens_per_expert > 0).all()), f"an expert got no token: {result.num_tokens_per_expert}"
    assert_close(logits_of(trainee, batch), logits, "logits")
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    got: dict[str, Tensor] = {}
    for name in trainee.shard.placements:
        got |= family.names.to_family(name, trainee.shard.whole(result.flat, name))
    assert_agree(got, expected, "gradients")
    squares = sum(float(grad.double().square().sum()) for grad in expected.values())
    assert result.norm == pytest.approx(squares**0.5, rel=1e-5)
