"""bf16 and FP8 products against float64, and what each leaves in fp32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pithtrain.ops import linear as linear_module
from pithtrain.ops.fp8 import RowBlocks, dequantise, dequantise_weight, quantise, quantise_weight
from pithtrain.ops.linear import Compute, Groups, add_product, grouped_linear, linear, product
from pithtrain.ops.parameter import Weight
from tests.agreement import randn, relative_difference

CPU = torch.device("cpu")
BF16_ULP = 2.0**-8  # of a value, at most, when it is rounded


def bf16_weight(*shape: int, seed: int = 0) -> Weight:
    return Weight(randn(*shape, seed=seed).bfloat16(), torch.zeros(shape))


def test_bf16_products_add_up_in_fp32() -> None:
    """Each output is within one rounding of float64's; with sums in bf16 it would be far off."""
    left, right = randn(9, 700).bfloat16(), randn(700, 11, seed=1).bfloat16()
    expected = left.double() @ right.double()
    assert product(left, right).dtype == torch.bfloat16
    assert bool(((product(left, right).double() - expected).abs() <= BF16_ULP * expected.abs() + 1e-4).all())
    assert relative_difference(product(left, right, torch.float32), expected) < 1e-6
    buffer = torch.full((9, 11), 4096.0)
    add_product(buffer, left, right)  # a bf16 buffer would round to multiples of 32
    assert relative_difference(buffer - 4096, expected) < 1e-4


def fp8(x: Tensor, sizes: tuple[int, ...], columns: bool) -> Tensor:
    """x as FP8 has it, in float64: rows for a sum over features, columns for one over rows."""
    rows, turned = quantise(x, RowBlocks.of(sizes, CPU))
    if not columns:
        return dequantise(rows)[:, : x.shape[1]].double()
    padded = dequantise(turned).T.double()
    parts, start = [], 0
    for size in sizes:
        parts.append(padded[start : start + size])
        start += -(-size // 128) * 128
    return torch.cat(parts)


def test_an_fp8_product_is_that_of_its_quantised_operands() -> None:
    """Forward, input gradient and weight gradient, each with the blocks that it sums over."""
    weight, x, grad = bf16_weight(70, 200), randn(3, 50, 200).bfloat16(), randn(3, 50, 70, seed=2).bfloat16()
    x.requires_grad_()
    output = linear(x, weight, Compute("fp8"))
    output.backward(grad)
    rows, grads = x.detach().flatten(0, 1), grad.flatten(0, 1)
    ours, turned = (dequantise_weight(copy)[0].double() for copy in quantise_weight(weight.value[None]))
    ours, turned = ours[:, :200], turned[:, :70]
    assert torch.equal(ours, turned.T), "one scale for both copies"
    expected = fp8(rows, (150,), columns=False) @ ours.T
    assert relative_difference(output.flatten(0, 1), expected) < BF16_ULP / 2
    assert x.grad is not None
    expected = fp8(grads, (150,), columns=False) @ ours
    assert relative_difference(x.grad.flatten(0, 1), expected) < BF16_ULP / 2
    expected = fp8(grads, (150,), columns=True).T @ fp8(rows, (150,), columns=True)
    assert relative_difference(weight.grad, expected) < 1e-6
    plain = rows.double() @ weight.value.double().T
    assert 1e-3 < relative_difference(output.flatten(0, 1), plain) < 5e-2


def test_grouped_fp8_products_and_their_queue() -> None:
    sizes, queue = (3, 0, 140, 1), list[object]()
    groups = Groups.of(sizes, CPU, Compute("fp8"))
    x, grad = randn(144, 40).bfloat16().requires_grad_(), randn(144, 24, seed=1).bfloat16()
    now, later = bf16_weight(4, 24, 40), bf16_weight(4, 24, 40)
    grouped_linear(x, now, groups, Compute("fp8")).backward(grad)
    compute = Compute("fp8", deferred=[])
    grouped_linear(x, later, groups, compute).backward(grad)
    assert not later.grad.any() and not queue
    compute.drain()
    assert torch.equal(later.grad, now.grad) and not now.grad[1].any()
    xs, grads = fp8(x.detach(), sizes, True).split(sizes), fp8(grad, sizes, True).split(sizes)
    for slot, rows, part in zip(now.grad, xs, grads, strict=True):
        assert relative_difference(slot, part.T @ rows) < 1e-6


def test_weights_are_quantised_once_for_a_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over forward and backward and every micro-batch; another Compute, another step, takes the new values."""
    calls = list[Tensor]()
    real = linear_module.quantise_weight
    monkeypatch.setattr(linear_module, "quantise_weight", lambda value: calls.append(value) or real(value))
    weight, x, compute = bf16_weight(8, 16), randn(4, 16).bfloat16().requires_grad_(), Compute("fp8")
    for _ in range(3):
        linear(x, weight, compute).sum().backward()
    assert len(calls) == 1
    other = bf16_weight(12, 16)
    linear(x, other, replace(compute, deferred=[]))
    assert [*compute.blocks] == [4], "blocks of rows are made once too, for every weight and however gradients wait"
    before = linear(x, weight, compute)
    weight.value.mul_(2)
    assert torch.equal(linear(x, weight, Compute("fp8")), before * 2) and len(calls) == 3


def test_what_is_for_the_weight_gradient_is_not_quantised_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()
    real = linear_module.quantise
    monkeypatch.setattr(
        linear_module, "quantise", lambda x, blocks, columns=True: asked.append(columns) or real(x, blocks, columns)
    )
    weight, x = bf16_weight(8, 16), randn(4, 16).bfloat16()
    evaluated = linear(x, weight, Compute("fp8"))
    assert torch.equal(linear(x.requires_grad_(), weight, Compute("fp8")), evaluated) and asked == [False, True]


def test_an_fp32_weight_stays_out_of_fp8() -> None:
    """The router's: its product is exact whatever the precision."""
    weight, x = Weight(randn(6, 16), torch.zeros(6, 16)), randn(5, 16)
    assert torch.equal(linear(x, weight, Compute("fp8")), linear(x, weight, Compute("fp32")))


def test_fp8_rows_do_not_know_their_neighbours() -> None:
    """On another mesh a row meets other rows: same outputs to the bit. Blocks of tokens differ: gradients to 1e-4."""
    weight, other = bf16_weight(2, 96, 128), bf16_weight(2, 96, 128)
    x, grad = randn(300, 128).bfloat16(), randn(300, 96, seed=1).bfloat16()
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    first, second = order[:130].sort().values, order[130:].sort().values
    whole = grouped_linear(x, weight, Groups.of((180, 120), CPU, Compute("fp8")), Compute("fp8"))
    inputs = x.clone().requires_grad_()
    grouped_linear(inputs, weight, Groups.of((180, 120), CPU, Compute("fp8")), Compute("fp8")).backward(grad)
    for part in (first, second):
        sizes = (int((part < 180).sum()), int((part >= 180).sum()))
        rows = x[part].requires_grad_()
        output = grouped_linear(rows, other, Groups.of(sizes, CPU, Compute("fp8")), Compute("fp8"))
        output.backward(grad[part])
        assert torch.equal(output, whole[part])
        assert inputs.grad is not None and rows.grad is not None and torch.equal(rows.grad, inputs.grad[part])
    for got, expected in zip(other.grad, weight.grad, strict=True):
        assert relative_difference(got, expected) < 1e-4
