"""SwiGLU feed-forward, dense and as routed experts."""

import torch
from torch import Tensor

from spec.reference.router import Routing, route


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``down(silu(gate(x)) * up(x))``: the dense MLP, and one expert.

    x [..., D], gate_up [2F, D] (gate rows first), down [D, F] -> [..., D]. Source: arXiv 2002.05202,
    equation 6.
    """
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, shift: float = 1.0) -> Tensor:
    """``(up + shift) * gate * sigmoid(alpha * gate)`` with the gate at most ``limit`` and up within +-``limit``.

    gate_up [..., 2F], gate first -> [..., F]. Alpha 1, limit inf and shift 0 give SwiGLU. Source: transformers,
    ``GptOssExperts``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + shift) * gate * torch.sigmoid(alpha * gate)


def routed_experts(
    hidden_states: Tensor, topk_weights: Tensor, topk_expert_ids: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Each token's k experts applied one by one, weighted and summed; no token is dropped.

    hidden_states [T, D], topk_weights [T, K], topk_expert_ids [T, K], gate_up [E, 2F, D], down [E, D, F] ->
    [T, D].
    """
    rows = []
    for t in range(hidden_states.shape[0]):
        row = torch.zeros_like(hidden_states[t])
        for k in range(topk_expert_ids.shape[1]):
            e = int(topk_expert_ids[t, k])
            row = row + topk_weights[t, k] * swiglu(hidden_states[t], gate_up[e], down[e])
        rows.append(row)
    return torch.stack(rows)


def moe(
    hidden_states: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    norm_topk_prob: bool,
    expert_bias: Tensor | None = None,
    topk_expert_ids: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """The sparse block: route, then the routed experts.

    hidden_states [T, D], router [E, D], gate_up [E, 2F, D], down [E, D, F] -> ([T, D], Routing).
    Source: transformers, ``Qwen3MoeSparseMoeBlock``.
    """
    routing = route(hidden_states, router, top_k, norm_topk_prob, expert_bias, topk_expert_ids)
    output = routed_experts(hidden_states, routing.topk_weights, routing.topk_expert_ids, gate_up, down)
    return output, routing
