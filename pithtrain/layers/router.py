"""The router: which experts a token goes to, and with what weight. Always fp32.

T tokens, E experts, K experts a token. Ties go to the lowest expert index.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops.kernels import use_triton
from pithtrain.ops.linear import Compute, linear
from pithtrain.ops.parameter import Weight


@dataclass(frozen=True, eq=False)
class Learned:
    """Experts by score: the K highest of probability plus expert_bias [E] (fp32, None for no bias)."""

    expert_bias: Tensor | None = None


@dataclass(frozen=True)
class Balanced:
    """Experts in turn, by position in the sequence: every expert gets the same number of tokens (for measuring)."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """Experts as recorded earlier: topk_expert_ids [T, K] int64."""

    topk_expert_ids: Tensor


Choice = Learned | Balanced | Replayed


@dataclass(frozen=True, eq=False)
class Routing:
    """topk_weights [T, K] fp32; topk_expert_ids [T, K] int64; probs [T, E] fp32; logsumexp [T] fp32."""

    topk_weights: Tensor
    topk_expert_ids: Tensor
    probs: Tensor
    logsumexp: Tensor


def topk_lowest_index(scores: Tensor, k: int) -> Tensor:
    """The k highest of each row of scores [T, E], NaN first, equals by the lowest index: [T, k] int64, best first."""
    if use_triton(scores):
        from pithtrain.ops.kernels.router import topk_lowest_index_triton

        return topk_lowest_index_triton(scores, k)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def topk_gap(scores: Tensor, k: int) -> Tensor:
    """0-d: over the rows of scores [T, E], the smallest distance between the k-th and the next score (inf if none)."""
    if k == scores.shape[-1]:
        return scores.new_full((), torch.inf)
    best = scores.topk(k + 1, dim=-1).values
    return (best[:, k - 1] - best[:, k]).min()


@dataclass(frozen=True, eq=False)
class Router:
    """weight: [E, D] fp32. norm_topk_prob: the K weights of a token are divided by their sum."""

    weight: Weight
    top_k: int
    norm_topk_prob: bool

    def __call__(self, hidden_states: Tensor, length: int, choice: Choice, compute: Compute) -> Routing:
        """hidden_states [T, D], T = sequences of `length` positions -> Routing. Weights never include the bias."""
        router_logits = linear(hidden_states.float(), self.weight, compute)
        probs = F.softmax(router_logits, dim=-1)
        topk_expert_ids = self.choose(probs.detach(), length, choice)
        topk_weights = probs.gather(-1, topk_expert_ids)
        if self.norm_topk_prob:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return Routing(topk_weights, topk_expert_ids, probs, router_logits.logsumexp(-1))

    def choose(self, probs: Tensor, length: int, choice: Choice) -> Tensor:
        """probs [T, E] -> expert ids [T, K] int64."""
        match choice:
            case Learned(expert_bias=bias):
                return topk_lowest_index(probs if bias is None else probs + bias, self.top_k)
            case Balanced():
                tokens, num_experts = probs.shape
                first = torch.arange(tokens, device=probs.device) % length * self.top_k
                return (first[:, None] + torch.arange(self.top_k, device=probs.device)) % num_experts
            case Replayed(topk_expert_ids=ids):
                return ids

    def gap(self, probs: Tensor, choice: Choice) -> Tensor:
        """0-d: the smallest distance over tokens, in what the choice is made by, between the last expert chosen and the
        best one left out; inf where the choice is given. probs [T, E].
        """
        match choice:
            case Learned(expert_bias=bias):
                return topk_gap(probs if bias is None else probs + bias, self.top_k)
            case Balanced() | Replayed():
                return probs.new_full((), torch.inf)
