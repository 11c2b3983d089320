"""Optimizers over flat master shards, clipping, and the learning rate of a step.

torch's own fused AdamW does the arithmetic; state is flat like the masters, so a checkpoint addresses it by parameter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pithtrain.parallel.shard import Flat, Shard


@dataclass(frozen=True)
class LearningRate:
    """lr by step, 0 at the first update: a linear warm-up, then the schedule (spec.reference.schedule)."""

    kind: Literal["wsd", "cosine", "constant"]
    lr: float
    total_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    min_lr_ratio: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of update number `step`; the last decayed one has lr * min_lr_ratio."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * self._decay(step)

    def _decay(self, step: int) -> float:
        floor = self.min_lr_ratio
        match self.kind:
            case "constant":
                return 1.0
            case "wsd":
                start = self.total_steps - self.decay_steps
                done = max(0, step + 1 - start) / max(self.decay_steps, 1)
                return 1 - (1 - floor) * min(1.0, done)
            case "cosine":
                done = (step + 1 - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
                return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2


@dataclass(frozen=True, eq=False)
class AdamW:
    """AdamW (arXiv 1711.05101) as torch.optim.AdamW defines it; weight decay on matrices only."""

    shard: Shard
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    exp_avg: Flat
    exp_avg_sq: Flat

    @staticmethod
    def create(shard: Shard, beta1: float, beta2: float, eps: float, weight_decay: float) -> "AdamW":
        exp_avg, exp_avg_sq = (
            {name: torch.zeros_like(master) for name, master in shard.masters().items()} for _ in range(2)
        )
        return AdamW(shard, beta1, beta2, eps, weight_decay, exp_avg, exp_avg_sq)

    def state(self) -> dict[str, Flat]:
        """What a checkpoint keeps besides the weights, by name."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def step(self, grads: Flat, lr: float, updates: int) -> None:
        """One update of the masters; `updates` counts those before this one."""
        masters = self.shard.masters()
        for bucket, part, decays in decay_parts(self.shard):
            adamw(
                params=[masters[bucket][part]],
                grads=[grads[bucket][part]],
                exp_avgs=[self.exp_avg[bucket][part]],
                exp_avg_sqs=[self.exp_avg_sq[bucket][part]],
                max_exp_avg_sqs=[],
                state_steps=[torch.tensor(float(updates), device=masters[bucket].device)],
                fused=True,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=lr,
                weight_decay=self.weight_decay if decays else 0.0,
                eps=self.eps,
                maximize=False,
            )


@dataclass(frozen=True, eq=False)
class SGD:
    """Plain gradient descent: no momentum, no state; weight decay on matrices only."""

    shard: Shard
    weight_decay: float = 0.0

    def state(self) -> dict[str, Flat]:
        return {}

    def step(self, grads: Flat, lr: float, updates: int) -> None:
        masters = self.shard.masters()
        for bucket, part, decays in decay_parts(self.shard):
            master = masters[bucket][part]
            if decays and self.weight_decay:
                master.mul_(1 - lr * self.weight_decay)
            master.add_(grads[bucket][part], alpha=-lr)


Optimizer = AdamW | SGD


def decay_parts(shard: Shard) -> Iterator[tuple[str, slice, bool]]:
    """(bucket, part of this rank's slice, whether it decays), nothing empty."""
    for name, bucket in shard.buckets.items():
        stop = min(max(bucket.decay_stop - bucket.start, 0), bucket.chunk)
        for part, decays in ((slice(0, stop), True), (slice(stop, bucket.chunk), False)):
            if part.stop > part.start:
                yield name, part, decays


def clip(grads: Flat, grad_norm: float, clip_norm: float) -> None:
    """Scales gradients in place by min(1, clip_norm / (grad_norm + 1e-6)); grad_norm is that of the whole model."""
    scale = clip_norm / (grad_norm + 1e-6)
    if scale < 1:
        for flat in grads.values():
            flat.mul_(scale)


def updated_bias(expert_bias: Tensor, num_tokens_per_expert: Tensor, rate: float) -> Tensor:
    """Bias balancing without a loss (arXiv 2408.15664; DeepSeek-V3): an expert below the mean load is raised by `rate`,
    one above it lowered, one at it left. expert_bias [layers, E] fp32, counts [layers, E] int64 -> fp32.
    """
    counts = num_tokens_per_expert
    below = torch.sign(counts.sum(-1, keepdim=True) - counts.shape[-1] * counts)  # exact: integers
    return expert_bias + rate * below.to(torch.float32)
