"""Top-k routing over a softmax of all experts, its counts, and balancing by a bias instead of a loss."""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """What the router decides for T tokens, the best expert first."""

    topk_weights: Tensor  # [T, K]
    topk_expert_ids: Tensor  # [T, K] int64
    probs: Tensor  # [T, E]
    logsumexp: Tensor  # [T], of the logits


def route(
    hidden_states: Tensor,
    weight: Tensor,
    top_k: int,
    norm_topk_prob: bool,
    expert_bias: Tensor | None = None,
    topk_expert_ids: Tensor | None = None,
) -> Routing:
    """Softmax over all experts, then the k largest; equal scores go to the lowest expert.

    hidden_states [T, D], weight [E, D], expert_bias [E] -> Routing. The bias takes part in the choice only,
    never in the weights. With ``topk_expert_ids`` [T, K] the choice is given (forced or replayed routing)
    and the weights are those experts' probabilities. ``norm_topk_prob`` divides a token's k weights by
    their sum. Source: transformers, ``Qwen3MoeTopKRouter``; bias arXiv 2412.19437, equation 16.
    """
    logits = hidden_states @ weight.T
    probs = logits.softmax(dim=-1)
    if topk_expert_ids is None:
        scores = probs if expert_bias is None else probs + expert_bias
        topk_expert_ids = scores.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    topk_weights = probs.gather(1, topk_expert_ids)
    if norm_topk_prob:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    return Routing(topk_weights, topk_expert_ids, probs, logits.logsumexp(dim=-1))


def count_tokens_per_expert(topk_expert_ids: Tensor, num_experts: int, padding: Tensor | None = None) -> Tensor:
    """How many non-padding tokens chose each expert.

    topk_expert_ids [..., K] int64, padding [...] bool -> [E] int64.
    """
    if padding is not None:
        topk_expert_ids = topk_expert_ids[~padding]
    chosen = topk_expert_ids.reshape(-1, 1) == torch.arange(num_experts)
    return chosen.sum(dim=0)


def update_expert_bias(expert_bias: Tensor, num_tokens_per_expert: Tensor, rate: float) -> Tensor:
    """One update a step: raise the bias of experts below the mean load, lower it above, by a fixed rate.

    expert_bias [E], num_tokens_per_expert [E] (the whole global batch) -> [E]; an expert at the mean stays.
    Source: arXiv 2412.19437, section 2.1.2; arXiv 2408.15664, algorithm 1.
    """
    counts = num_tokens_per_expert.to(torch.float64)
    return expert_bias + rate * (counts.mean() - counts).sign()
