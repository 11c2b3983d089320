"""What a step's parts cost in plain torch: the same shapes on the same ranks at the same time, none of our code.

A part that takes many times its yardstick is slow for a reason of its own, whatever its share of the step. Parts that
only move or wait have none.

B sequences a micro-batch and rank, S positions, T = B * S, D hidden, E experts, K experts a token, n micro-batches.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pithtrain.models.architecture import Architecture
from pithtrain.parallel.mesh import Axis
from pithtrain.step import Trainee

REPEATS = 7


def yardstick(trainee: Trainee, global_batch_size: int, num_microbatches: int) -> dict[str, float]:
    """Collective. Milliseconds a step on this rank, by cause."""
    arch, device = trainee.arch, trainee.device
    batch = global_batch_size // trainee.mesh.data_ranks // num_microbatches
    length = trainee.tables[0].shape[0]
    layers = sum(len(stage.layers) for stage in trainee.stages.values())
    sparse = sum(len(stage.rows) for stage in trainee.stages.values())
    heads = sum(stage.head is not None for stage in trainee.stages.values())
    x = torch.randn(batch, length, arch.hidden_size, device=device)
    flat = x.view(-1, arch.hidden_size)
    dense = layers - sparse
    n = num_microbatches
    found = {
        "data": n * _timed(device, lambda: _order(batch)),
        "attention": n * layers * _timed(device, lambda: _attention(arch, x)),
        "router": n * sparse * _timed(device, lambda: _router(arch, flat)) if sparse else 0.0,
        "experts": n * sparse * _timed(device, lambda: _experts(arch, flat)) if sparse else 0.0,
        "aggregate": n * sparse * _timed(device, lambda: _aggregate(flat)) if sparse else 0.0,
        "loss": n * heads * _timed(device, lambda: _loss(arch, flat)) if heads else 0.0,
        "optimizer": _timed(device, lambda: _optimizer(sum(m.numel() for m in trainee.shard.masters().values()), x)),
    }
    if dense:
        found["attention"] += n * dense * _timed(device, lambda: _mlp(flat, arch.intermediate_size))
    exchange = _timed(device, lambda: _exchange(flat, trainee.mesh.ep)) if trainee.mesh.ep.size > 1 else 0.0
    found["dispatch"] = n * sparse * (2 * exchange + 2 * found["aggregate"] / max(n * sparse, 1))
    found["combine"] = n * sparse * exchange
    grads = torch.zeros(sum(bucket.grads.numel() for bucket in trainee.shard.buckets.values()), device=device)
    found["gradient reduction"] = _timed(device, lambda: _reduce(grads, len(trainee.shard.specs), trainee.mesh.dense))
    return found


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    """Milliseconds: the quickest of a few, after a warm-up."""
    taken = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return min(taken[1:])


def _order(batch: int) -> None:
    """A shuffle by integer arithmetic on indices: hundreds of small numpy calls."""
    indices = np.arange(batch, dtype=np.uint64)
    for _ in range(300):
        indices = indices ^ (indices >> np.uint64(3))


def _weight(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape, device=x.device, requires_grad=True)


def _attention(arch: Architecture, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    heads, groups, size = arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim
    normed = F.rms_norm(x, (arch.hidden_size,))
    qkv = F.linear(normed, _weight(x, (heads + 2 * groups) * size, arch.hidden_size))
    query, key, value = qkv.unflatten(-1, (-1, size)).transpose(1, 2).split([heads, groups, groups], dim=1)
    query, key = F.rms_norm(query, (size,)), F.rms_norm(key, (size,))
    query, key = query * 0.5 + query.flip(-1), key * 0.5 + key.flip(-1)  # as much work as rotary positions
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != groups)
    y = x + F.linear(y.transpose(1, 2).flatten(2), _weight(x, arch.hidden_size, heads * size))
    F.rms_norm(y, (arch.hidden_size,)).sum().backward()


def _mlp(flat: Tensor, inner: int) -> None:
    x = flat.clone().requires_grad_()
    gate, up = F.linear(x, _weight(x, 2 * inner, x.shape[1])).chunk(2, dim=-1)
    F.linear(F.silu(gate) * up, _weight(x, x.shape[1], inner)).sum().backward()


def _router(arch: Architecture, flat: Tensor) -> None:
    x = flat.clone().requires_grad_()
    logits = F.linear(x, _weight(x, arch.num_experts, arch.hidden_size))
    probs = logits.softmax(-1)
    weights, _ = probs.topk(arch.top_k, dim=-1)
    (weights / weights.sum(-1, keepdim=True) + logits.logsumexp(-1, keepdim=True)).sum().backward()


def _experts(arch: Architecture, flat: Tensor) -> None:
    """All copies of this rank's tokens through as many experts, evenly, with their permutation."""
    x, groups, inner = flat.clone().requires_grad_(), arch.num_experts, arch.moe_intermediate_size
    each = max(x.shape[0] * arch.top_k // groups, 1)
    order = torch.arange(groups * each, device=x.device) % x.shape[0]
    rows = torch.index_select(x, 0, order).view(groups, each, -1)
    gate, up = (rows @ _weight(x, groups, x.shape[1], 2 * inner)).chunk(2, dim=-1)
    copies = (F.silu(gate) * up) @ _weight(x, groups, inner, x.shape[1])
    torch.zeros_like(x).index_add(0, order, copies.flatten(0, 1)).sum().backward()


def _aggregate(flat: Tensor) -> None:
    x = flat.clone().requires_grad_()
    order = torch.arange(x.shape[0], device=x.device)
    (x + torch.index_select(x, 0, order)).sum().backward()


def _loss(arch: Architecture, flat: Tensor) -> None:
    x = flat.clone().requires_grad_()
    logits = F.linear(F.rms_norm(x, (arch.hidden_size,)), _weight(x, arch.vocab_size, arch.hidden_size))
    F.cross_entropy(logits, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)).backward()


def _optimizer(size: int, like: Tensor) -> None:
    """AdamW's arithmetic."""
    value, grad, first, second = (torch.ones(size, device=like.device) for _ in range(4))
    first.lerp_(grad, 0.1)
    second.mul_(0.95).addcmul_(grad, grad, value=0.05)
    value.mul_(0.99).addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-3)


def _exchange(flat: Tensor, ep: Axis) -> None:
    even = flat[: flat.shape[0] // ep.size * ep.size].contiguous()
    dist.all_to_all_single(torch.empty_like(even), even, group=ep.group)


def _reduce(grads: Tensor, parameters: int, dense: Axis) -> None:
    for part in grads.chunk(parameters):
        part.square().sum()
    if dense.size > 1:
        dist.all_reduce(grads, group=dense.group)
