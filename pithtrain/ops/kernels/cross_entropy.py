"""Triton kernel of the loss of logits, a row a program: a pass for the loss, another for the gradient in place."""

import triton
import triton.language as tl
from torch import Tensor

from pithtrain.ops.cross_entropy import IGNORED

CHUNK_LOSS = {"TILE": 4096, "num_warps": 8, "num_stages": 1}

NO_LABEL = tl.constexpr(IGNORED)


@triton.jit
def chunk_loss_kernel(logits, labels, losses, scale, vocabulary, GRADIENT: tl.constexpr, TILE: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    logits += row * vocabulary
    label = tl.load(labels + row)
    labelled = label != NO_LABEL
    target = tl.load(logits + tl.where(labelled, label, 0))  # before the gradient lies there
    largest, total = -3.4e38, 0.0  # not -inf, whose difference to -inf is NaN
    for start in range(0, vocabulary, TILE):
        tile = tl.load(logits + start + lane, start + lane < vocabulary, -float("inf"))
        larger = tl.maximum(largest, tl.max(tile, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(tile - larger), 0)
        largest = larger
    log_total = tl.log(total)
    tl.store(losses + row, -(target - largest - log_total) * labelled.to(tl.float32))
    if GRADIENT:
        factor = scale * labelled.to(tl.float32)
        for start in range(0, vocabulary, TILE):
            at, token = logits + start + lane, start + lane
            prob = tl.exp(tl.load(at, token < vocabulary, 0.0) - largest - log_total)
            tl.store(at, prob * factor - tl.where(token == label, factor, 0.0), token < vocabulary)


def chunk_loss_triton(logits: Tensor, labels: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
    """`chunk_loss`, the gradient in the logits' place."""
    assert logits.is_contiguous() and labels.is_contiguous(), "expected logits and labels to be contiguous"
    losses, gradient = logits.new_empty(logits.shape[0]), scale is not None
    chunk_loss_kernel[logits.shape[0],](logits, labels, losses, scale or 0.0, logits.shape[1], gradient, **CHUNK_LOSS)
    return losses.sum(), logits if gradient else None
