"""The whole decoder and its losses from the reference equations, in float64, on one rank: the oracle of a step.

B sequences, S positions, M sparse layers, n micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pithtrain import step
from pithtrain.data import Batch
from pithtrain.layers.balance import Objective
from pithtrain.models.architecture import Architecture
from pithtrain.models.decoder import Stage
from pithtrain.parallel.mesh import make_mesh
from pithtrain.parallel.transport import Transport
from spec.reference import losses
from spec.reference.attention import attention
from spec.reference.experts import moe, swiglu
from spec.reference.norm import rms_norm
from spec.reference.router import Routing, count_tokens_per_expert

ARCH = Architecture(
    vocab_size=31,
    hidden_size=12,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=14,
    moe_intermediate_size=10,
    num_experts=6,
    top_k=3,
    norm_topk_prob=True,
    sparse_layers=(True, False, True),
    tie_word_embeddings=False,
    rope_theta=100.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=32,
    initializer_range=0.4,
)
PLAIN = Objective()
Biases = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class Expected:
    """What a global batch gives: grads by our names, counts [M, E], ids [M][B, S, K], logits [B, S, V]."""

    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    grads: dict[str, Tensor]
    counts: Tensor
    ids: list[Tensor]
    logits: Tensor


def new_trainee(
    length: int,
    arch: Architecture = ARCH,
    seed: int = 3,
    transport: Transport | None = None,
    execution: step.Execution | None = None,
) -> step.Trainee:
    """One rank's model with norms moved off their ones, so that nothing hides behind a factor of one."""
    trainee = step.build(arch, make_mesh(), transport or Transport(), length, torch.device("cpu"), execution)
    trainee.shard.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in trainee.shard.weights().items():
        if name.endswith("norm"):
            weight.value.uniform_(0.5, 1.5, generator=generator)
    return trainee


def whole_of(trainee: step.Trainee) -> Stage:
    """The one stage of a trainee that has the whole model in one."""
    (stage,) = trainee.stages.values()
    return stage


def new_batch(sequences: int, length: int, seed: int = 0, vocab_size: int = ARCH.vocab_size) -> Batch:
    """Labels are the next tokens; the first sequence has one, the next a third, later ones all of theirs."""
    tokens = torch.randint(vocab_size, (sequences, length + 1), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    labels[0, 1:] = -100
    labels[1, length // 3 :] = -100
    return Batch(tokens[:, :-1].contiguous(), labels)


def split(batch: Batch, n: int) -> list[Batch]:
    """The batch in n micro-batches, on one rank."""
    size = batch.tokens.shape[0] // n
    padding = [None] * n if batch.padding is None else batch.padding.split(size)
    return [Batch(*parts) for parts in zip(batch.tokens.split(size), batch.labels.split(size), padding, strict=True)]


def decode(
    weights: Mapping[str, Tensor], arch: Architecture, tokens: Tensor, biases: Biases, ids: Sequence[Tensor] | None
) -> tuple[Tensor, list[Routing]]:
    """tokens [B, S] -> (logits [B, S, V], every sparse layer's routing of the T = B * S tokens)."""
    hidden, routings = weights["embedding"][tokens], list[Routing]()
    for layer, sparse in enumerate(arch.sparse_layers):
        at = {name.removeprefix(f"layers.{layer}."): weight for name, weight in weights.items()}
        normed = rms_norm(hidden, at["attention_norm"], arch.rms_norm_eps)
        projections = at["attention.qkv"], at["attention.o"], at["attention.q_norm"], at["attention.k_norm"]
        heads = arch.num_attention_heads, arch.num_key_value_heads
        hidden = hidden + attention(normed, *projections, *heads, arch.rope_theta, arch.rms_norm_eps)
        normed = rms_norm(hidden, at["mlp_norm"], arch.rms_norm_eps)
        if not sparse:
            hidden = hidden + swiglu(normed, at["mlp.gate_up"], at["mlp.down"])
            continue
        experts = at["router"], at["experts.gate_up"], at["experts.down"]
        forced = None if ids is None else ids[len(routings)]
        bias = biases[len(routings)]
        output, routing = moe(normed.flatten(0, 1), *experts, arch.top_k, arch.norm_topk_prob, bias, forced)
        hidden = hidden + output.view_as(hidden)
        routings.append(routing)
    head = weights["embedding" if arch.tie_word_embeddings else "head"]
    return rms_norm(hidden, weights["norm"], arch.rms_norm_eps) @ head.T, routings


def balance_loss(objective: Objective, routing: Routing, batch: Batch, n: int) -> Tensor:
    probs, ids = (x.view(*batch.tokens.shape, -1) for x in (routing.probs, routing.topk_expert_ids))
    match objective.balance:
        case "none":
            return probs.new_zeros(())
        case "sequence":
            return losses.sequence_balance_loss(probs, ids, objective.balance_coef, batch.padding)
        case "micro_batch":
            return losses.micro_batch_balance_loss(probs, ids, objective.balance_coef, n, batch.padding)
        case "global_batch":
            return losses.global_batch_balance_loss(probs, ids, objective.balance_coef, n, batch.padding)


def expect(
    trainee: step.Trainee,
    batch: Batch,
    objective: Objective = PLAIN,
    n: int = 1,
    expert_bias: Tensor | None = None,
    ids: Sequence[Tensor] | None = None,
) -> Expected:
    """Losses and gradients of the trainee's weights, as they are now, on a global batch."""
    arch = trainee.arch
    weights = {name: weight.value.double().requires_grad_() for name, weight in trainee.shard.weights().items()}
    biases: Biases = [None] * trainee.num_sparse_layers if expert_bias is None else list(expert_bias.double())
    logits, routings = decode(weights, arch, batch.tokens, biases, ids)
    zero = torch.zeros((), dtype=torch.float64)
    loss = losses.token_mean_cross_entropy(logits, batch.labels)
    balance = sum((balance_loss(objective, routing, batch, n) for routing in routings), zero)
    spreads = [routing.logsumexp.view(batch.tokens.shape) for routing in routings]
    z = sum((losses.z_loss(spread, objective.z_coef, batch.padding) for spread in spreads), zero)
    grads = torch.autograd.grad(loss + balance + z, list(weights.values()), materialize_grads=True)
    shaped = [routing.topk_expert_ids.view(*batch.tokens.shape, -1) for routing in routings]
    empty = torch.zeros(0, arch.num_experts, dtype=torch.int64)
    counts = torch.cat([empty, *(count_tokens_per_expert(x, arch.num_experts, batch.padding)[None] for x in shaped)])
    by_name = dict(zip(weights, grads, strict=True))
    return Expected(loss.detach(), balance.detach(), z.detach(), by_name, counts, shaped, logits.detach())


def grads_of(trainee: step.Trainee, result: step.Gradients) -> dict[str, Tensor]:
    """The reduced gradients by our names."""
    return {name: trainee.shard.whole(result.flat, name) for name in trainee.shard.placements}
