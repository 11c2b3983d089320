"""One step of the optimizers, and clipping by the global norm."""

from collections.abc import Sequence

import torch
from torch import Tensor


def adamw_step(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW with decoupled decay and bias correction; ``step`` is 1 at the first update.

    All tensors of one shape -> (weight, exp_avg, exp_avg_sq). Source: arXiv 1711.05101, algorithm 2, with
    lr multiplying the decay and eps added after the root of the corrected second moment, as in
    torch.optim.AdamW.
    """
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    mean = exp_avg / (1 - beta1**step)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt()
    weight = weight * (1 - lr * weight_decay) - lr * mean / (root + eps)
    return weight, exp_avg, exp_avg_sq


def sgd_step(weight: Tensor, grad: Tensor, lr: float, weight_decay: float = 0.0) -> Tensor:
    """Plain gradient descent without momentum; decay is decoupled, as in AdamW."""
    return weight * (1 - lr * weight_decay) - lr * grad


def clip_by_global_norm(grads: Sequence[Tensor], clip_norm: float) -> tuple[list[Tensor], Tensor]:
    """Scale all gradients by ``min(1, clip_norm / (norm + 1e-6))``, norm being that of all of them as one
    vector.

    -> (gradients, norm before clipping). Source: torch.nn.utils.clip_grad_norm_; arXiv 1211.5063, algorithm
    1.
    """
    norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in grads], norm
