"""Learning rate by the step alone. ``step`` is 0 at the first update and total_steps - 1 at the last.

Warm-up is linear and reaches the peak at step warmup_steps - 1; the last step of a decay has
``lr * min_lr_ratio``. Warm-up and decay together fit into total_steps.
"""

import torch


def constant(step: int, lr: float, warmup_steps: int) -> float:
    """Warm-up, then lr."""
    return lr * min(1.0, (step + 1) / max(warmup_steps, 1))


def warmup_stable_decay(
    step: int, lr: float, total_steps: int, warmup_steps: int, decay_steps: int, min_lr_ratio: float
) -> float:
    """Warm-up, then lr, then a line down to ``lr * min_lr_ratio`` over the last decay_steps.

    Source: arXiv 2404.06395, section 4, with a linear decay.
    """
    start = total_steps - decay_steps
    if step < start:
        return constant(step, lr, warmup_steps)
    progress = (step + 1 - start) / decay_steps
    return lr * (1 - (1 - min_lr_ratio) * progress)


def cosine(step: int, lr: float, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Warm-up, then half a cosine down to ``lr * min_lr_ratio``.

    Source: arXiv 1608.03983, equation 5, without restarts.
    """
    if step < warmup_steps:
        return constant(step, lr, warmup_steps)
    progress = (step + 1 - warmup_steps) / (total_steps - warmup_steps)
    half_wave = (1 + torch.cos(torch.tensor(progress * torch.pi, dtype=torch.float64)).item()) / 2
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * half_wave)
