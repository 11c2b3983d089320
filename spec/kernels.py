"""Every Triton kernel of the trainer, compiled ahead of time as it is launched, and what its operator costs.

No GPU is needed: Triton compiles for Hopper (sm_90) and Blackwell (sm_100) anywhere. What a kernel takes is read from
the compiled binary: registers and stack by cuobjdump, spills (loads and stores of local memory) by nvdisasm.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from rich.table import Column, Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pithtrain.layers.router import topk_lowest_index
from pithtrain.metrics import peak_flops
from pithtrain.ops.cross_entropy import chunk_loss
from pithtrain.ops.fp8 import quantise_columns_reference, quantise_rows_reference, quantise_weight_reference
from pithtrain.ops.fp8_gemm import add_weight_gradient_reference, multiply_reference
from pithtrain.ops.kernels import cross_entropy, fp8, fp8_gemm, permute, router, swiglu
from pithtrain.ops.permute import spread, sum_copies
from pithtrain.ops.swiglu import swiglu as swiglu_reference

SHARED_LIMIT = 227 * 1024  # bytes one program may have, on both
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12, "B200": 8.0e12}  # bytes/s, by NVIDIA's data sheets of the SXM modules
INSTRUCTIONS = {
    "wgmma e4m3": r"wgmma\.mma_async\S+\.e4m3\.e4m3",
    "tcgen05 f8f6f4": r"tcgen05\.mma\S+kind::f8f6f4",
    "tcgen05 mxf8f6f4": r"tcgen05\.mma\S+kind::mxf8f6f4",
    "TMA": r"cp\.async\.bulk\.tensor",
    "flush to zero": r"\.ftz",  # would change the quantised bytes of subnormal numbers
}  # by the name that is shown, as they stand in PTX


@dataclass(frozen=True)
class Shape:
    """A layer of experts, and the vocabulary: what the costs are for."""

    tokens: int = 16384
    hidden: int = 2048
    expert_hidden: int = 768
    experts: int = 128
    top_k: int = 8
    vocabulary: int = 151936

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


@dataclass(frozen=True)
class Operator:
    """One launch: `kernel` with its arguments' `types` and its table's row, on `targets`.

    aligned: integers that are multiples of 16 at real shapes. instructions: the ones among INSTRUCTIONS that a target's
    PTX must hold.
    cost: (FLOPs of products, bytes moved to and from memory at the least), at a shape; of the experts' products the
    first.
    """

    name: str
    reference: Callable[..., Any] | None
    kernel: Any
    launch: Mapping[str, int]
    types: Mapping[str, str]
    cost: Callable[[Shape], tuple[float, float]]
    constants: Mapping[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    instructions: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: {90: (), 100: ()})


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: registers a thread; bytes of stack a thread; spills, as instructions; shared
    memory in bytes a program; those of INSTRUCTIONS that its PTX holds."""

    registers: int
    stack: int
    spills: int
    shared: int
    instructions: tuple[str, ...]


def types(**names: str) -> dict[str, str]:
    """The types of a kernel's arguments: each keyword a type, its value the names that have it."""
    known = {"fp8": "*fp8e4nv", "bf16": "*bf16", "fp32": "*fp32", "ints": "*i32", "longs": "*i64", "u8": "*u8"}
    known |= {"i32": "i32", "scalar": "fp32"}
    known |= {f"tile{rows}": f"tensordesc<fp8e4nv[{rows},128]>" for rows in (64, 128)}
    return {name: known[kind] for kind, listed in names.items() for name in listed.split()}


QUANTISE = types(
    bf16="x", ints="table", fp8="by_row by_column", fp32="row_scales column_scales", i32="num_rows features stride"
)
LOGARITHM = {90: ("flush to zero",), 100: ("flush to zero",)}  # within CUDA's, of a sum of at least 1
PRODUCT = {90: ("wgmma e4m3", "TMA"), 100: ("tcgen05 f8f6f4", "TMA")}


def _quantise_cost(copies: int) -> Callable[[Shape], tuple[float, float]]:
    return lambda at: (0, at.rows * at.hidden * (2 + copies * (1 + 4 / 128)))


def _swiglu_cost(tensors: int) -> Callable[[Shape], tuple[float, float]]:
    return lambda at: (0, at.rows * at.expert_hidden * 2 * tensors)


def _sum_cost(at: Shape) -> tuple[float, float]:
    return 0, (at.rows + at.tokens) * at.hidden * 2 + at.rows * (8 + 4)


def _spread_cost(at: Shape) -> tuple[float, float]:
    return 0, (2 * at.rows + at.tokens) * at.hidden * 2 + at.rows * (8 + 4 + 4)


def _weights(at: Shape) -> int:
    return at.experts * 2 * at.expert_hidden * at.hidden


def _product_flops(at: Shape) -> float:
    return 2 * at.rows * at.hidden * 2 * at.expert_hidden


def _product_cost(at: Shape) -> tuple[float, float]:
    return _product_flops(at), at.rows * (at.hidden + 2 * 2 * at.expert_hidden) + _weights(at)


def _weight_gradient_cost(at: Shape) -> tuple[float, float]:
    return _product_flops(at), at.rows * (at.hidden + 2 * at.expert_hidden) + 2 * 4 * _weights(at)


# A further operator adds its row here, a launch each.
OPERATORS = (
    Operator(
        "quantise 1x128", quantise_rows_reference, fp8.quantise_kernel, fp8.QUANTISE,
        QUANTISE, _quantise_cost(1), {"COLUMNS": False}, ("features", "stride"),
    ),
    Operator(
        "quantise 1x128, 128x1", quantise_columns_reference, fp8.quantise_kernel, fp8.QUANTISE,
        QUANTISE, _quantise_cost(2), {"COLUMNS": True}, ("features", "stride"),
    ),
    Operator(
        "quantise 128x128", quantise_weight_reference, fp8.quantise_weight_kernel, fp8.QUANTISE_WEIGHT,
        types(bf16="weight", fp8="plain transposed", fp32="scales", i32="outs ins"),
        lambda at: (0, 4 * _weights(at)), aligned=("outs", "ins"),
    ),
    Operator(
        "FP8 product, M-grouped", multiply_reference, fp8_gemm.multiply_kernel, fp8_gemm.MULTIPLY,
        types(tile128="x weight", fp32="x_scales weight_scales", ints="table", bf16="output",
              i32="num_rows outs depth matrix_stride out_stride in_stride"),
        _product_cost, aligned=("outs", "depth"), instructions=PRODUCT,
    ),
    Operator(
        "FP8 product, K-grouped", add_weight_gradient_reference,
        fp8_gemm.add_weight_gradient_kernel, fp8_gemm.ADD_WEIGHT_GRADIENT,
        types(tile128="grad", tile64="x", fp32="grad_scales x_scales buffer", ints="ends", i32="outs ins"),
        _weight_gradient_cost, aligned=("outs", "ins"), instructions=PRODUCT,
    ),
    Operator(
        "MXFP8 product", None, fp8_gemm.multiply_mx_kernel, fp8_gemm.MULTIPLY_MX,
        types(tile128="x weight", u8="x_scales weight_scales", bf16="output", i32="num_rows outs depth"),
        _product_cost, aligned=("outs",), instructions={100: ("tcgen05 mxf8f6f4", "TMA")},
    ),
    Operator(
        "SwiGLU", swiglu_reference, swiglu.swiglu_kernel, swiglu.SWIGLU,
        types(bf16="gate_up output", i32="features", scalar="alpha limit shift"),
        _swiglu_cost(3), aligned=("features",),
    ),
    Operator(
        "SwiGLU backward", swiglu_reference, swiglu.swiglu_backward_kernel, swiglu.SWIGLU,
        types(bf16="gate_up grad grad_gate_up", i32="features", scalar="alpha limit shift"),
        _swiglu_cost(5), aligned=("features",),
    ),
    Operator(
        "sum of copies", sum_copies, permute.sum_copies_kernel, permute.COPIES,
        types(bf16="copies weights output", longs="order starts", i32="num_copies features"),
        _sum_cost, {"WEIGHTED": False}, ("features",),
    ),
    Operator(
        "weighted sum of copies", sum_copies, permute.sum_copies_kernel, permute.COPIES,
        types(bf16="copies output", longs="order starts", fp32="weights", i32="num_copies features"),
        _sum_cost, {"WEIGHTED": True}, ("features",),
    ),
    Operator(
        "weighted sum backward", spread, permute.spread_kernel, permute.COPIES,
        types(bf16="grad copies grad_copies", longs="rows", fp32="weights products", i32="features"),
        _spread_cost, aligned=("features",),
    ),
    Operator(
        "router top-k", topk_lowest_index, router.top_k_kernel, router.TOP_K,
        types(fp32="scores", longs="chosen", i32="experts top_k"),
        lambda at: (0, at.tokens * (4 * at.experts + 8 * at.top_k)), {"WIDTH": 128}, ("experts",),
    ),
    Operator(
        "loss", chunk_loss, cross_entropy.chunk_loss_kernel, cross_entropy.CHUNK_LOSS,
        types(fp32="logits losses", longs="labels", i32="vocabulary", scalar="scale"),
        lambda at: (0, at.tokens * 4 * at.vocabulary), {"GRADIENT": False}, ("vocabulary",), LOGARITHM,
    ),
    Operator(
        "loss and gradient", chunk_loss, cross_entropy.chunk_loss_kernel, cross_entropy.CHUNK_LOSS,
        types(fp32="logits losses", longs="labels", i32="vocabulary", scalar="scale"),
        lambda at: (0, at.tokens * 8 * at.vocabulary), {"GRADIENT": True}, ("vocabulary",), LOGARITHM,
    ),
)  # fmt: skip


def compile_operator(operator: Operator, target: int, cache: Path) -> Resources:
    """Compiles for sm_`target` what a launch of the operator compiles; `cache` keeps it for the next time."""
    names: list[str] = operator.kernel.arg_names
    options = {name: value for name, value in operator.launch.items() if name not in names}
    constants = {**operator.constants} | {name: value for name, value in operator.launch.items() if name in names}
    assert not set(names) ^ set(operator.types) ^ set(constants), f"{operator.name}: its arguments are {names}"
    aligned = [n for n, kind in operator.types.items() if kind.startswith("*") or n in operator.aligned]
    source = ASTSource(
        operator.kernel,
        {name: operator.types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        compiled = triton.compile(source, GPUTarget("cuda", target, 32), {**options, "enable_fp_fusion": True})
    return _resources(compiled)


def _resources(compiled: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, f"cuobjdump said nothing about registers: {usage}"
        registers, stack = int(found[1]), int(found[2])
        code = _tool(triton.knobs.nvidia.nvdisasm.path, "-c", file.name) if stack else ""  # spills lie on the stack
    held = tuple(name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, compiled.asm["ptx"]))
    return Resources(registers, stack, len(re.findall(r"\b(?:LDL|STL)\b", code)), compiled.metadata.shared, held)


def _tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def roofline(operator: Operator, shape: Shape, gpu: str) -> float:
    """Seconds at the least: FLOPs at the FP8 peak (twice bf16's), or bytes at full bandwidth."""
    flops, moved = operator.cost(shape)
    peak = peak_flops(gpu)
    assert peak, f"no peak is known for {gpu}"
    return max(flops / (2 * peak), moved / BANDWIDTH[gpu])


def name_table() -> Table:
    """Every operator's reference and kernel, under pithtrain/ops."""
    table = Table("operator", Column("reference", overflow="fold"), Column("kernel", overflow="fold"))
    for operator in OPERATORS:
        table.add_row(
            operator.name, _name(operator.reference) if operator.reference else "none", _name(operator.kernel)
        )
    return table


def _name(function: Any) -> str:
    return f"{function.__module__.removeprefix('pithtrain.ops.')}:{function.__name__}"


def resource_table(cache: Path) -> Table:
    """What every launch takes on each target."""
    table = Table("operator", "target", "registers", "stack", "spills", "shared", "instructions")
    for operator in OPERATORS:
        for target in operator.instructions:
            used = compile_operator(operator, target, cache)
            figures = (used.registers, used.stack, used.spills, f"{used.shared / 1024:.0f} KiB")
            table.add_row(operator.name, f"sm_{target}", *map(str, figures), ", ".join(used.instructions))
    return table


def cost_table(shape: Shape) -> Table:
    """FLOPs, bytes and roofline times of every operator at a shape."""
    table = Table("operator", "GFLOP", "MB", *(f"{gpu} µs" for gpu in BANDWIDTH), title="computed, not measured")
    for operator in OPERATORS:
        flops, moved = operator.cost(shape)
        times = [f"{roofline(operator, shape, gpu) * 1e6:.0f}" for gpu in BANDWIDTH]
        table.add_row(operator.name, f"{flops / 1e9:.0f}", f"{moved / 1e6:.0f}", *times)
    return table
