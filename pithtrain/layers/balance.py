"""Balance losses of the router, by the gradient each sends to the probabilities.

Every balance loss is coef * sum_e f_e P_e over some scope of tokens, summed over layers (arXiv 2412.19437, equations
17 to 20), where f_e counts and carries no gradient. So each is linear in the sums of probabilities that a layer hands
out, prob_sum [B, E], and its gradient to them is known once the scope's counts are: that one tensor gives the loss's
value and its backward pass alike. The scopes are defined in spec/losses.toml.

B sequences of this rank's micro-batch, E experts, K experts a token, M sparse layers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BalanceKind = Literal["none", "sequence", "micro_batch", "global_batch"]


@dataclass(frozen=True)
class Objective:
    """What is added to the cross-entropy. A coefficient of 0 leaves its loss out."""

    balance: BalanceKind = "none"
    balance_coef: float = 0.0
    z_coef: float = 0.0


def load_fraction(counts: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """f_e = E * count_e / (K * tokens), 0 without tokens. counts [.., E] int64, tokens [..] int64 -> [.., E] fp64."""
    return counts.double() * (counts.shape[-1] / (top_k * tokens.clamp(min=1).double()))[..., None]


def sequence_gradient(counts: Tensor, lengths: Tensor, top_k: int, num_sequences: int) -> Tensor:
    """Of the per-sequence loss at coef 1. counts [M, B, E] int64, lengths [B] non-padding tokens,
    num_sequences in the global batch -> [M, B, E] fp32.
    """
    fraction = load_fraction(counts, lengths.expand(counts.shape[:-1]), top_k)
    return (fraction / (lengths.clamp(min=1) * num_sequences)[:, None]).float()


def scope_gradient(counts: Tensor, tokens: int, top_k: int, slice_tokens: int, num_microbatches: int) -> Tensor:
    """Of the per-micro-batch and global-batch losses at coef 1.

    counts [M, E] int64 and tokens: those whose counts multiply; slice_tokens: those whose probabilities are averaged
    -> [M, 1, E] fp32, the same for every sequence.
    """
    fraction = load_fraction(counts, torch.full(counts.shape[:-1], tokens, device=counts.device), top_k)
    return (fraction / (max(slice_tokens, 1) * num_microbatches)).float()[:, None]
