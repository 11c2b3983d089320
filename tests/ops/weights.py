"""Weights whose gradient buffers already hold something, since gradients add; and the oracle's side in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pithtrain.ops.parameter import Weight
from tests.agreement import randn

STARTED = 1.0  # what every buffer holds before


def new_weight(*shape: int, seed: int = 0, std: float = 1.0) -> Weight:
    return Weight(randn(*shape, seed=seed, std=std), torch.full(shape, STARTED))


def added(weight: Weight) -> Tensor:
    """What was added to the weight's buffer. Exact zeros stay exact."""
    assert weight.grad.dtype == torch.float32
    return weight.grad - STARTED


def leaf(x: Tensor) -> Tensor:
    """The same values in float64, to be differentiated."""
    return x.detach().double().requires_grad_()


def gradients(output: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, upstream.to(output.dtype))
