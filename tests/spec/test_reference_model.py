"""The model's equations against torch's operators in float64, transformers' modules, and cases by hand."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from spec.reference.attention import attention, causal_attention
from spec.reference.experts import clamped_swiglu, moe, routed_experts, swiglu
from spec.reference.norm import rms_norm
from spec.reference.rope import apply_rope, rope_tables


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> bool:
    return (got - expected).norm().item() <= tolerance * expected.norm().item()


@pytest.fixture(scope="module")
def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=20,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=12,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rms_norm_eps=1e-3,
        rope_theta=100.0,
        attn_implementation="eager",
    )


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    root = math.sqrt(12.5 + 0.5)
    assert torch.allclose(rms_norm(x, weight, 0.5), torch.tensor([[3 / root, 8 / root]], dtype=torch.float64))


def test_rms_norm_and_its_gradient_are_those_of_torch() -> None:
    x, weight = draw(4, 3, 7).requires_grad_(), draw(7, seed=1).requires_grad_()
    ours = torch.autograd.grad(rms_norm(x, weight, 1e-3).pow(3).sum(), [x, weight])
    theirs = torch.autograd.grad(F.rms_norm(x, (7,), weight, 1e-3).pow(3).sum(), [x, weight])
    assert close(ours[0], theirs[0]) and close(ours[1], theirs[1])


def test_rope_rotates_by_position_times_frequency() -> None:
    cos, sin = rope_tables(torch.tensor([0, 1, 5]), head_dim=4, theta=100.0)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(3, 1, 4)
    out = apply_rope(x, cos, sin)[:, 0]
    for row, position in enumerate([0, 1, 5]):
        for pair, frequency in enumerate([1.0, 0.1]):
            a, angle = complex(1 + pair, 3 + pair), position * frequency
            turned = a * complex(math.cos(angle), math.sin(angle))
            assert out[row, pair].item() == pytest.approx(turned.real, abs=1e-14)
            assert out[row, pair + 2].item() == pytest.approx(turned.imag, abs=1e-14)


def test_rope_tables_are_those_of_transformers(config: Qwen3MoeConfig) -> None:
    positions = torch.arange(50)
    cos, sin = qwen3_moe.Qwen3MoeRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = rope_tables(positions, 8, 100.0)
    assert close(ours[0], cos[0].double(), 1e-6) and close(ours[1], sin[0].double(), 1e-6)


def test_causal_attention_and_its_gradients_are_those_of_torch() -> None:
    q, k, v = draw(2, 5, 6, 4), draw(2, 5, 2, 4, seed=1), draw(2, 5, 2, 4, seed=2)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    theirs = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in inputs), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    ours = causal_attention(q, k, v)
    upstream = draw(*ours.shape, seed=3)
    assert close(ours, theirs)
    pairs = zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(theirs, inputs, upstream),
        strict=True,
    )
    assert all(close(mine, other) for mine, other in pairs)


def test_attention_sees_no_later_position() -> None:
    weights = draw(10 * 8, 20), draw(20, 6 * 8), draw(8), draw(8, seed=1)
    hidden = draw(1, 6, 20)
    changed = hidden.clone()
    changed[:, 4] += 1
    before, after = (attention(x, *weights, 6, 2, 100.0, 1e-6) for x in (hidden, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert all((before[0, t] - after[0, t]).norm() > 1e-3 for t in (4, 5))


def test_attention_block_is_that_of_transformers(config: Qwen3MoeConfig) -> None:
    block = qwen3_moe.Qwen3MoeAttention(config, layer_idx=0)
    for i, parameter in enumerate(block.parameters()):
        parameter.data = draw(*parameter.shape, seed=i).float() * 0.5
    hidden = draw(2, 7, 20, seed=99).float()
    cos, sin = qwen3_moe.Qwen3MoeRotaryEmbedding(config)(hidden, torch.arange(7)[None])
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    expected, _ = block(hidden, (cos, sin), mask)
    qkv = torch.cat([block.q_proj.weight, block.k_proj.weight, block.v_proj.weight]).double()
    norms = block.q_norm.weight.double(), block.k_norm.weight.double()
    ours = attention(hidden.double(), qkv, block.o_proj.weight.double(), *norms, 6, 2, 100.0, 1e-3)
    assert close(ours, expected.double(), 1e-5)


def test_attention_without_qk_norm_differs_from_unit_norm_weights() -> None:
    qkv, o, hidden = draw(10 * 8, 20), draw(20, 48, seed=1), draw(1, 4, 20, seed=2)
    ones = torch.ones(8, dtype=torch.float64)
    plain = attention(hidden, qkv, o, None, None, 6, 2, 100.0, 1e-6)
    normed = attention(hidden, qkv, o, ones, ones, 6, 2, 100.0, 1e-6)
    assert not close(plain, normed, 1e-2)


def test_swiglu_by_hand_gate_first() -> None:
    gate_up = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    down = torch.tensor([[5.0]], dtype=torch.float64)
    out = swiglu(torch.ones(1, 1, dtype=torch.float64), gate_up, down)
    assert out.item() == pytest.approx(2 / (1 + math.exp(-2)) * 3 * 5)


def test_clamped_swiglu_is_that_of_transformers() -> None:
    """There gate and up alternate."""
    experts = GptOssExperts(GptOssConfig(hidden_size=4, intermediate_size=6, num_local_experts=1))
    gate_up = draw(5, 12) * 8
    alternating = gate_up.unflatten(1, (2, 6)).mT.flatten(1)
    expected = experts._apply_gate(alternating)
    assert (experts.alpha, experts.limit) == (1.702, 7.0) and bool((gate_up.abs() > 7).any())
    assert close(clamped_swiglu(gate_up, 1.702, 7.0), expected)
    gate, up = gate_up.chunk(2, dim=-1)
    assert close(clamped_swiglu(gate_up, 1.0, math.inf, 0.0), F.silu(gate) * up)


def test_routed_experts_weigh_and_sum_the_chosen_ones() -> None:
    hidden, gate_up, down = draw(2, 3), draw(4, 10, 3, seed=1), draw(4, 3, 5, seed=2)
    ids = torch.tensor([[2, 0], [3, 2]])
    weights = torch.tensor([[0.75, 0.5], [0.25, 2.0]], dtype=torch.float64)
    out = routed_experts(hidden, weights, ids, gate_up, down)
    by_expert = [swiglu(hidden, gate_up[e], down[e]) for e in range(4)]
    assert close(out[0], 0.75 * by_expert[2][0] + 0.5 * by_expert[0][0])
    assert close(out[1], 0.25 * by_expert[3][1] + 2.0 * by_expert[2][1])


def test_unchosen_expert_gets_a_zero_gradient() -> None:
    gate_up = draw(3, 8, 5).requires_grad_()
    out = routed_experts(
        draw(2, 5), torch.ones(2, 1, dtype=torch.float64), torch.tensor([[0], [2]]), gate_up, draw(3, 5, 4)
    )
    (grad,) = torch.autograd.grad(out.sum(), gate_up)
    assert grad[1].abs().max() == 0 and grad[0].norm() > 0 and grad[2].norm() > 0


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_moe_is_that_of_transformers(config: Qwen3MoeConfig, norm_topk_prob: bool) -> None:
    config.norm_topk_prob = norm_topk_prob
    block = qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for i, parameter in enumerate(block.parameters()):
        parameter.data = draw(*parameter.shape, seed=i).float() * 0.5
    hidden = draw(1, 40, 20, seed=50).float()
    weights = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
    ours, routing = moe(hidden[0].double(), *(w.double() for w in weights), 3, norm_topk_prob)
    assert set(routing.topk_expert_ids.flatten().tolist()) == set(range(5))
    assert torch.equal(routing.topk_expert_ids, block.gate(hidden[0])[2])
    assert close(ours, block(hidden)[0].double(), 1e-5)
