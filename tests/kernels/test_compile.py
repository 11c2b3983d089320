"""Every launch compiles for Hopper and Blackwell as it is launched: no spills, no stack, the instructions it is for."""

import dataclasses
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from typer.testing import CliRunner

from pithtrain.ops.fp8 import Quantised, RowBlocks, quantise, quantise_weight
from pithtrain.ops.kernels import cross_entropy, fp8, fp8_gemm, permute, router, swiglu, use_triton
from pithtrain.ops.permute import plan
from spec.kernels import OPERATORS, SHARED_LIMIT, Operator, Shape, compile_operator, roofline
from typer_cli.main import app

CACHE = Path(__file__).resolve().parents[2] / "runs" / "kernels"
LAUNCHES = [(operator, target) for operator in OPERATORS for target in operator.instructions]
NAMES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
PRODUCT = next(operator for operator in OPERATORS if operator.kernel is fp8_gemm.multiply_kernel)


@pytest.mark.parametrize("operator,target", LAUNCHES, ids=lambda part: getattr(part, "name", part))
def test_launches_compile_without_spills(operator: Operator, target: int) -> None:
    used = compile_operator(operator, target, CACHE)
    assert (used.stack, used.spills) == (0, 0), used
    assert 0 < used.registers < 255 and used.shared <= SHARED_LIMIT, used
    assert used.instructions == operator.instructions[target]


def test_a_launch_that_spills_is_seen() -> None:
    """Half the warps hold twice the sums."""
    fewer = dataclasses.replace(PRODUCT, launch={**PRODUCT.launch, "num_warps": 4})
    used = compile_operator(fewer, 90, CACHE)
    assert used.stack > 0 and used.spills > 0, used


def type_of(argument: object) -> str:
    """As Triton writes an argument's type."""
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<fp8e4nv[{','.join(map(str, argument.block_shape))}]>"
    if isinstance(argument, torch.Tensor):
        return "*" + NAMES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def launch_memory_bound(x: torch.Tensor) -> None:
    """x [133, 64]: rows, or two copies of each of 66 rows and one of the last."""
    swiglu.swiglu_triton(x.clone().requires_grad_()).sum().backward()
    ids = torch.tensor([[0, 1]] * 66 + [[1, -1]])
    permutation = plan(ids, 2, 133)
    permute.sum_copies_triton(x, permutation, None)
    permute.sum_copies_triton(x, permutation, x[:, 0].float())
    permute.spread_triton(x, permutation, x, x[:, 0].float())
    router.topk_lowest_index_triton(torch.randn(3, 100), 2)
    for scale in (None, 0.5):
        cross_entropy.chunk_loss_triton(torch.randn(3, 100), torch.zeros(3, dtype=torch.int64), scale)


def test_launches_are_those_that_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launchers hand to Triton, in bf16: types, constants and parameters are those of OPERATORS."""
    seen = {}

    def note(kernel: JITFunction, *arguments: object, grid: object, warmup: bool, **options: int) -> None:
        given = dict(zip(kernel.params, arguments, strict=False))
        types = {at.name: type_of(value) for at, value in given.items() if not at.is_constexpr}
        constants = {at.name: value for at, value in given.items() if at.is_constexpr}
        seen[kernel.__name__, *constants.values()] = (types, constants, options)

    monkeypatch.setattr(JITFunction, "run", note)
    blocks = RowBlocks.of((3, 130), torch.device("cpu"))
    x, weight = torch.randn(133, 64).bfloat16(), torch.randn(2, 32, 64).bfloat16()
    rows, columns = quantise(x, blocks)
    copy, _ = quantise_weight(weight)
    fp8.quantise_triton(x, blocks, columns=False)
    fp8.quantise_triton(x, blocks, columns=True)
    fp8.quantise_weight_triton(weight)
    fp8_gemm.multiply_triton(rows, copy, blocks, torch.bfloat16)
    fp8_gemm.add_weight_gradient_triton(torch.zeros(2, 64, 64), columns, columns, blocks)
    mx = Quantised(rows.values, torch.ones(133, 4, dtype=torch.uint8))
    fp8_gemm.multiply_mx_triton(mx, mx, torch.bfloat16)
    launch_memory_bound(x)
    for operator in OPERATORS:
        launch = seen.pop((operator.kernel.__name__, *operator.constants.values()))
        assert launch == (operator.types, operator.constants, operator.launch), operator.name
    assert not seen


@pytest.mark.parametrize(
    "module", [cross_entropy, fp8, fp8_gemm, permute, router, swiglu], ids=lambda module: module.__name__
)
def test_every_kernel_is_an_operator(module: ModuleType) -> None:
    here = {name for name, item in vars(module).items() if isinstance(item, JITFunction) and name.endswith("_kernel")}
    listed = {row.kernel.__name__ for row in OPERATORS if row.kernel.__module__ == module.__name__}
    assert here == listed and here


def test_only_tensors_on_a_gpu_go_to_the_kernels() -> None:
    on_gpu = cast("torch.Tensor", SimpleNamespace(is_cuda=True))
    assert use_triton(on_gpu) and not use_triton(torch.empty(1))


def test_roofline_by_hand() -> None:
    """4 tokens x 2 experts each, 256 features to 2 x 128: 8 x 256 x 256 multiply-adds; bytes decide here."""
    shape = Shape(tokens=4, hidden=256, expert_hidden=128, experts=2, top_k=2)
    flops, moved = PRODUCT.cost(shape)
    assert flops == 2 * 8 * 256 * 256
    assert moved == 8 * 256 + 2 * 256 * 256 + 2 * 8 * 256
    assert roofline(PRODUCT, shape, "H100") == pytest.approx(moved / 3.35e12)
    large = Shape(tokens=2**16, hidden=4096, expert_hidden=2048, experts=2, top_k=2)
    assert roofline(PRODUCT, large, "H200") == pytest.approx(2 * 2**17 * 4096 * 4096 / 1978e12)


def test_pith_ops_shows_every_operator() -> None:
    result = CliRunner().invoke(app, ["ops", "--tokens", "1024"], env={"COLUMNS": "120"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for operator in OPERATORS:
        assert result.output.count(operator.name) >= 2 + len(operator.instructions), operator.name
    assert "computed, not measured" in result.output and "tcgen05 f8f6f4, TMA" in result.output
