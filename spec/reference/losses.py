"""The losses, all over the global batch: cross-entropy, the three balance losses, z-loss.

Balance losses take one layer and are summed over layers by the caller. In a scope (a set of tokens) of T
non-padding tokens, with ``count_e`` tokens choosing expert e: ``f_e = E * count_e / (K * T)``, ``P_e`` is
the mean probability of e, and the loss is ``coef * sum_e f_e * P_e``. Counts carry no gradient. Perfect
balance gives coef. Source of the form: arXiv 2412.19437, equations 17 to 20.
"""

import torch
from torch import Tensor

from spec.reference.router import count_tokens_per_expert


def token_mean_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean of ``-log softmax(logits)[label]`` over the labels that are not ignored; 0 if all are.

    logits [..., V], labels [...] int64 -> scalar, nats per token.
    """
    kept = labels != ignore_index
    picked = logits[kept].gather(-1, labels[kept][:, None])[:, 0]
    losses = logits[kept].logsumexp(dim=-1) - picked
    return losses.sum() / max(int(kept.sum()), 1)


def load_fraction(counts: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """``f_e``: an expert's share of the choices times E. counts [E] int64 -> [E]; zeros when there is no
    token.
    """
    return counts.to(torch.float64) * counts.shape[0] / (top_k * max(num_tokens, 1))


def mean_probability(probs: Tensor, padding: Tensor) -> Tensor:
    """``P_e`` over the non-padding tokens. probs [..., E], padding [...] -> [E]; zeros when there is no
    token.
    """
    kept = probs[~padding]
    return kept.sum(dim=0) / max(kept.shape[0], 1)


def _no_padding(probs: Tensor, padding: Tensor | None) -> Tensor:
    return torch.zeros(probs.shape[:-1], dtype=torch.bool) if padding is None else padding


def _scope_loss(probs: Tensor, topk_expert_ids: Tensor, padding: Tensor) -> Tensor:
    num_experts, top_k = probs.shape[-1], topk_expert_ids.shape[-1]
    counts = count_tokens_per_expert(topk_expert_ids, num_experts, padding)
    fraction = load_fraction(counts, int((~padding).sum()), top_k)
    return (fraction * mean_probability(probs, padding)).sum()


def sequence_balance_loss(probs: Tensor, topk_expert_ids: Tensor, coef: float, padding: Tensor | None = None) -> Tensor:
    """Scope: one sequence. The mean over the B sequences of the global batch.

    probs [B, S, E], topk_expert_ids [B, S, K], padding [B, S] -> scalar.
    Invariant to the mesh and to the number of micro-batches.
    """
    padding = _no_padding(probs, padding)
    per_sequence = [_scope_loss(probs[b], topk_expert_ids[b], padding[b]) for b in range(probs.shape[0])]
    return coef * torch.stack(per_sequence).mean()


def micro_batch_balance_loss(
    probs: Tensor, topk_expert_ids: Tensor, coef: float, num_microbatches: int, padding: Tensor | None = None
) -> Tensor:
    """Scope: slice i of the global batch, over all data ranks. The mean over the n slices, each weighing
    the same.

    probs [B, S, E], topk_expert_ids [B, S, K], padding [B, S] -> scalar. Invariant to the mesh at equal n.
    """
    slices = _slices(probs, topk_expert_ids, padding, num_microbatches)
    return coef * torch.stack([_scope_loss(p, ids, pad) for p, ids, pad in slices]).mean()


def global_batch_balance_loss(
    probs: Tensor, topk_expert_ids: Tensor, coef: float, num_microbatches: int, padding: Tensor | None = None
) -> Tensor:
    """For slice i: ``P`` of slice i, ``f`` from counts and tokens gathered over slices 0..i. The mean over
    n.

    probs [B, S, E], topk_expert_ids [B, S, K], padding [B, S] -> scalar. Invariant to the mesh at equal n.
    Equal to the loss whose scope is the whole batch at n = 1; with more, only the last slice sees the whole
    batch's counts. Source: arXiv 2501.11873, section 3, with its buffer of accumulated counts.
    """
    num_experts, top_k = probs.shape[-1], topk_expert_ids.shape[-1]
    counts, num_tokens, losses = torch.zeros(num_experts, dtype=torch.int64), 0, []
    for p, ids, pad in _slices(probs, topk_expert_ids, padding, num_microbatches):
        counts = counts + count_tokens_per_expert(ids, num_experts, pad)
        num_tokens += int((~pad).sum())
        losses.append((load_fraction(counts, num_tokens, top_k) * mean_probability(p, pad)).sum())
    return coef * torch.stack(losses).mean()


def _slices(
    probs: Tensor, topk_expert_ids: Tensor, padding: Tensor | None, num_microbatches: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    size = probs.shape[0] // num_microbatches
    pieces = (torch.split(whole, size) for whole in (probs, topk_expert_ids, _no_padding(probs, padding)))
    return list(zip(*pieces, strict=True))


def z_loss(logsumexp: Tensor, coef: float, padding: Tensor | None = None) -> Tensor:
    """``coef`` times the mean over the global batch's non-padding tokens of the squared log-sum-exp of the
    router's logits, one layer.

    logsumexp [B, S], padding [B, S] -> scalar. Source: arXiv 2202.08906, equation 5.
    """
    kept = logsumexp if padding is None else logsumexp[~padding]
    return coef * kept.pow(2).sum() / max(kept.numel(), 1)
