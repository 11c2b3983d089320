"""Cross-entropy fused with the head's product, a chunk of tokens at a time.

The logits of one chunk exist at a time, never all of [T, V]. The loss gives its own gradient in the same pass, since
the scale (one over the global number of labels) is known before it starts.

T tokens, C tokens of a chunk, V vocabulary, D hidden.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops.kernels import use_triton
from pithtrain.ops.linear import Compute, add_linear_weight_gradient, product
from pithtrain.ops.parameter import Weight

IGNORED = -100  # the label of a position that has none
CHUNK = 256  # tokens; its logits should stay in cache on CPU


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """loss: 0-d fp32, summed over labelled tokens, not scaled. grad: [T, D], of scale * loss; None in evaluation."""

    loss: Tensor
    grad: Tensor | None


def chunk_loss(logits: Tensor, labels: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
    """logits [C, V] fp32, labels [C] -> (summed loss, gradient of scale * loss to the logits)."""
    if use_triton(logits):
        from pithtrain.ops.kernels.cross_entropy import chunk_loss_triton

        return chunk_loss_triton(logits, labels, scale)
    labelled = labels != IGNORED
    target = labels.masked_fill(~labelled, 0)[:, None]
    log_probs = F.log_softmax(logits, dim=-1)
    loss = -(log_probs.gather(1, target).squeeze(1) * labelled).sum()
    if scale is None:
        return loss, None
    row_scale = (labelled * scale)[:, None]
    grad = log_probs.exp_().mul_(row_scale)
    grad.scatter_(1, target, grad.gather(1, target) - row_scale)  # one target a row: nothing collides
    return loss, grad


def head_loss(hidden: Tensor, head: Weight, labels: Tensor, scale: float | None, compute: Compute) -> HeadLoss:
    """Loss of hidden [T, D] against labels [T] int64 through head [V, D]; IGNORED labels count for nothing.

    scale: what the loss is multiplied with before it is differentiated; None evaluates without gradients.
    The head's weight gradient, of scale * loss, adds to `head.grad` through `compute`.
    """
    hidden = hidden.detach()
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = None if scale is None else torch.empty_like(hidden)
    for start in range(0, hidden.shape[0], CHUNK):
        chunk = hidden[start : start + CHUNK]
        logits = product(chunk, head.value.T, torch.float32)
        part, grad = chunk_loss(logits, labels[start : start + CHUNK], scale)
        loss += part
        if grad is not None and grad_hidden is not None:
            grad = grad.to(chunk.dtype)
            grad_hidden[start : start + CHUNK] = product(grad, head.value)
            compute.weight_gradient(lambda x=chunk, g=grad: add_linear_weight_gradient(head, x, g))  # type: ignore[misc]
    return HeadLoss(loss, grad_hidden)
