"""The SwiGLU kernels against their definitions in float64; in bf16, the fp32 result rounded once."""

import math

import pytest
import torch
from torch import Tensor

from pithtrain.ops import swiglu as operator
from pithtrain.ops.kernels.swiglu import swiglu_triton
from spec.reference.experts import clamped_swiglu as reference
from tests.agreement import randn
from tests.ops.weights import gradients, leaf

PLAIN, CLAMPED = (1.0, math.inf, 0.0), (1.702, 1.5, 1.0)  # alpha, limit, shift
SHAPES = [(11, 2 * 259), (2, 3, 6), (1, 2), (0, 8)]


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    gate_up = randn(*shape, std=2.0)
    gate_up.view(-1)[::7] *= 60  # sigmoids of exactly 0 and 1
    gate_up.view(-1)[3::13] = CLAMPED[1]
    return gate_up, randn(*shape[:-1], shape[-1] // 2, seed=1)


def within(got: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """|got - expected| <= 2^-24 * magnitude."""
    excess = (got.double() - expected).abs() - 2.0**-24 * magnitude
    assert got.shape == expected.shape and not bool((~(excess <= 0)).any()), excess.max()


@pytest.mark.parametrize("form", [PLAIN, CLAMPED], ids=["plain", "clamped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_definition(shape: tuple[int, ...], form: tuple[float, float, float]) -> None:
    alpha, limit, shift = form
    gate_up, upstream = inputs(shape)
    oracle = leaf(gate_up)
    got, expected = swiglu_triton(gate_up.requires_grad_(), *form), reference(oracle, alpha, limit, shift)
    gate, up = oracle.detach().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + shift
    sigmoid = torch.sigmoid(alpha * gate) + 2.0**-102  # it may be 0 where it is under 2^-126
    slope = sigmoid * (8 + 2 * (alpha * gate).abs())  # its relative error grows with its argument
    within(got, expected, slope * (gate * up).abs())
    grad, expected_grad = (gradients(out, [at], upstream)[0] for out, at in ((got, gate_up), (expected, oracle)))
    parts = slope * (upstream * up).abs() * (1 + (alpha * gate).abs()), slope * (upstream * gate).abs()
    within(grad, expected_grad, torch.cat(parts, -1))


@pytest.mark.parametrize("form", [PLAIN, CLAMPED], ids=["plain", "clamped"])
def test_bf16_is_fp32_rounded_once(form: tuple[float, float, float]) -> None:
    gate_up, upstream = (part.bfloat16() for part in inputs((5, 34)))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        given = gate_up.to(dtype).requires_grad_()
        output = swiglu_triton(given, *form)
        results.append([output, *gradients(output, [given], upstream)])
    for narrow, wide in zip(*results, strict=True):
        assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide.bfloat16())


def test_strides_do_not_matter() -> None:
    gate_up, upstream = inputs((5, 12))
    turned, across = (part.T.contiguous().T for part in (gate_up, upstream))
    plain, strided = gate_up.clone().requires_grad_(), turned.clone().requires_grad_()
    outputs = swiglu_triton(plain), swiglu_triton(strided)
    assert torch.equal(*outputs)
    assert torch.equal(gradients(outputs[0], [plain], upstream)[0], gradients(outputs[1], [strided], across)[0])


def test_what_is_not_finite_stays_so() -> None:
    nan = float("nan")
    given = torch.tensor([[nan, 1.0, 2.0, nan]]).requires_grad_()  # gate NaN, then up NaN
    for form in (PLAIN, CLAMPED):
        output = swiglu_triton(given, *form)
        assert output.isnan().all(), form
        assert gradients(output, [given], torch.ones(1, 2))[0][0, :2].isnan().all(), form


def test_the_public_functions_choose_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, upstream = inputs((3, 10))

    def run() -> list[Tensor]:
        given = gate_up.clone().requires_grad_()
        outputs = operator.swiglu(given), operator.clamped_swiglu(given, 1.702, 1.5)
        return [*outputs, *(gradients(output, [given], upstream)[0] for output in outputs)]

    by_reference = run()
    asked: list[Tensor] = []
    monkeypatch.setattr(operator, "use_triton", lambda x: asked.append(x) is None)
    for got, expected in zip(run(), by_reference, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert len(asked) == 2
