"""The product kernels: to the bit where sums are exact, within the bound elsewhere; groups do not touch each other."""

import pytest
import torch
import triton
from triton.runtime.errors import InterpreterError

from pithtrain.ops import fp8, fp8_gemm
from pithtrain.ops.fp8 import E4M3, Quantised, RowBlocks, dequantise, dequantise_weight, quantise, quantise_weight
from pithtrain.ops.fp8_gemm import add_weight_gradient_reference, multiply_reference
from pithtrain.ops.kernels.fp8_gemm import add_weight_gradient_triton, multiply_mx_triton, multiply_triton
from tests.agreement import randn
from tests.ops.test_fp8_gemm import by_group, integers, within_bound

CPU = torch.device("cpu")
SIZES = [(0, 3, 129, 0), (1,), (0, 0), (200,)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_products(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    outs, ins, blocks = 140, 260, RowBlocks.of(sizes, CPU)
    x, grad = integers(sum(sizes), ins, seed=1), integers(sum(sizes), outs, seed=2)
    (x8, x_columns), (grad8, grad_columns) = quantise(x, blocks), quantise(grad, blocks)
    copy, transposed = quantise_weight(integers(len(sizes), outs, ins, seed=3))
    for rows, weight in ((x8, copy), (grad8, transposed)):
        assert torch.equal(
            multiply_triton(rows, weight, blocks, dtype), multiply_reference(rows, weight, blocks, dtype)
        )
    got, expected = torch.ones(2, len(sizes), outs, ins).unbind(0)
    add_weight_gradient_triton(got, grad_columns, x_columns, blocks)
    add_weight_gradient_reference(expected, grad_columns, x_columns, blocks)
    assert torch.equal(got, expected)


def test_a_block_writes_its_own_rows_only() -> None:
    """So the last to write does not hide another's mistake: blocks run from the last to the first."""
    blocks = RowBlocks.of((3, 129, 5), CPU)
    turned = RowBlocks(blocks.sizes, blocks.table.flip(0), blocks.ends)
    x, weight = quantise(integers(137, 40, seed=1), blocks)[0], quantise_weight(integers(3, 24, 40, seed=2))[0]
    expected = multiply_reference(x, weight, blocks, torch.float32)
    assert torch.equal(multiply_triton(x, weight, turned, torch.float32), expected)


def test_other_products_are_within_the_bound() -> None:
    sizes, outs, ins = (130, 5), 150, 300
    blocks = RowBlocks.of(sizes, CPU)
    x, grad = randn(135, ins) * torch.exp2(torch.arange(135) % 40 - 20)[:, None], randn(135, outs, seed=1)
    (x8, x_columns), (_, grad_columns) = quantise(x, blocks), quantise(grad, blocks)
    copy, _ = quantise_weight(randn(2, outs, ins, seed=2))
    a, b = dequantise(x8).double(), dequantise_weight(copy).double()
    magnitudes = by_group(a.abs(), b.abs(), sizes)
    within_bound(multiply_triton(x8, copy, blocks, torch.float32), by_group(a, b, sizes), magnitudes, ins)
    buffer = torch.ones(2, outs, ins)
    add_weight_gradient_triton(buffer, grad_columns, x_columns, blocks)
    a, b = dequantise(grad_columns).double(), dequantise(x_columns).double()
    for slot, part in zip(buffer, (slice(0, 256), slice(256, 384)), strict=True):
        magnitudes = 1 + a[:, part].abs() @ b[:, part].abs().T
        within_bound(slot, 1 + a[:, part] @ b[:, part].T, magnitudes, 256)


def test_groups_do_not_touch_each_other() -> None:
    """NaN in one group's rows, weight and buffer, and in every idle group's, changes no bit of the others."""
    sizes, blocks = (3, 0, 130, 2), RowBlocks.of((3, 0, 130, 2), CPU)
    x, weight, buffer = randn(135, 70), randn(4, 30, 70, seed=1), randn(4, 30, 70, seed=2)
    poisoned_x, poisoned_weight, poisoned_buffer = x.clone(), weight.clone(), buffer.clone()
    poisoned_x[:3] = poisoned_weight[:2] = poisoned_buffer[:2] = float("nan")
    grads = quantise(randn(135, 30, seed=3), blocks)[1]
    outputs = []
    for some_x, some_weight, some_buffer in ((x, weight, buffer), (poisoned_x, poisoned_weight, poisoned_buffer)):
        rows, columns = quantise(some_x, blocks)
        outputs.append(multiply_triton(rows, quantise_weight(some_weight)[0], blocks, torch.float32))
        add_weight_gradient_triton(some_buffer, grads, columns, blocks)
    assert outputs[1][:3].isnan().all() and torch.equal(outputs[0][3:], outputs[1][3:])
    assert poisoned_buffer[:2].isnan().all() and torch.equal(buffer[2:], poisoned_buffer[2:])
    assert torch.equal(buffer[1], randn(4, 30, 70, seed=2)[1]), f"group without rows in {sizes}"


def test_the_public_functions_choose_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, blocks = (2, 129), RowBlocks.of((2, 129), CPU)
    x, weight = randn(131, 40), randn(2, 24, 40, seed=1)

    def run() -> list[torch.Tensor]:
        rows, columns = fp8.quantise(x, blocks)
        copy, transposed = fp8.quantise_weight(weight)
        output = fp8_gemm.multiply(fp8.quantise(x, blocks, columns=False)[0], copy, blocks, torch.bfloat16)
        grads = fp8.quantise(output.float(), blocks)
        buffer = torch.zeros(2, 24, 40)
        fp8_gemm.add_weight_gradient(buffer, grads[1], columns, blocks)
        return [rows.scales, output, fp8_gemm.multiply(grads[0], transposed, blocks, torch.float32), buffer]

    by_reference = run()
    asked: list[torch.Tensor] = []
    for module in (fp8, fp8_gemm):
        monkeypatch.setattr(module, "use_triton", lambda x: asked.append(x) is None)
    by_kernel = run()
    assert len(asked) == 7, f"{len(asked)} of 7 calls on {sizes} asked which to run"
    assert torch.equal(by_kernel[0], by_reference[0])
    for got, expected in zip(by_kernel[1:], by_reference[1:], strict=True):
        assert ((got - expected).norm() / expected.norm()).item() < 1e-2  # bf16 in between


@pytest.mark.xfail(
    triton.__version__.startswith("3.6."),
    raises=InterpreterError,
    strict=True,
    reason="3.6 cannot interpret dot_scaled",
)
def test_mxfp8() -> None:
    """Blocks of 32 with E8M0 scales, against float64."""
    x, weight = randn(130, 256).to(E4M3), randn(20, 256, seed=1).to(E4M3)
    scales = torch.randint(120, 134, (150, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    x_scales, weight_scales = scales[:130].contiguous(), scales[130:].contiguous()

    def wide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return values.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)

    a, b = wide(x, x_scales), wide(weight, weight_scales)
    got = multiply_mx_triton(Quantised(x, x_scales), Quantised(weight, weight_scales), torch.float32)
    within_bound(got, a @ b.T, a.abs() @ b.abs().T, 256)


def test_scales_far_apart() -> None:
    """2^120 times 2^-126 is taken in fp32 and is exact."""
    huge = Quantised(torch.ones(1, 128).to(E4M3), torch.full((1, 1), 2.0**120))
    tiny = Quantised(torch.ones(1, 1, 128).to(E4M3), torch.full((1, 1, 1), 2.0**-126))
    assert multiply_triton(huge, tiny, RowBlocks.of((1,), CPU), torch.float32).tolist() == [[2.0]]
