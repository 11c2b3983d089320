"""Triton kernel of the router's choice, a row a program: the best left is found K times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOP_K = {"num_warps": 1, "num_stages": 1}


@triton.jit
def top_k_kernel(scores, chosen, experts, top_k, WIDTH: tl.constexpr):
    """Experts compete as 64-bit integers: above, the score's bits in its order, NaN highest; below, WIDTH - expert."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    score = tl.load(scores + row * experts + lane, lane < experts, 0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = tl.where(score != score, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    none = -(2**63)
    ranked = tl.where(lane < experts, (bits.to(tl.int64) << 32) + WIDTH - lane, none)
    for k in range(top_k):
        best = tl.max(ranked, 0)
        tl.store(chosen + row * top_k + k, WIDTH - (best & 0xFFFFFFFF))
        ranked = tl.where(ranked == best, none, ranked)


def topk_lowest_index_triton(scores: Tensor, k: int) -> Tensor:
    """`topk_lowest_index`."""
    (rows, experts), scores = scores.shape, scores.contiguous()
    chosen = scores.new_empty(rows, k, dtype=torch.int64)
    top_k_kernel[rows,](scores, chosen, experts, k, triton.next_power_of_2(experts), **TOP_K)
    return chosen
