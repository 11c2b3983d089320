"""Pytest plugin of the process that interprets kernels: mends the interpreter's arithmetic, and poisons memory.

As shipped (3.6 and 3.9), the interpreter truncates fp32 to bf16, rounds wrongly to E4M3, does not saturate, and
computes with bf16 and FP8 as if their bits were integers. Conversions go through torch's casts here, which round to
nearest, ties to even; FP8 saturates, as on the GPU. `interpreted/mended.py` tests this file.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.ops.conftest import poisoned_memory  # noqa: F401  a fixture for every test here

TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any = None) -> np.ndarray:
    """Floats of type `source` as bits of type `target`."""
    values = torch.from_numpy(np.array(data)).view(TORCH[source])
    wanted = TORCH[target]
    if target.is_fp8():
        most = torch.finfo(wanted).max
        values = values.float().clamp(-most, most)
    return values.to(wanted).view(BITS[wanted.itemsize]).numpy()


def widened(handle: TensorHandle) -> TensorHandle:
    """bf16 and FP8 as fp32; anything else as it is."""
    kind = handle.dtype.scalar
    if kind == tl.bfloat16 or kind.is_fp8():
        return TensorHandle(convert(handle.data, kind, tl.float32).view(np.float32), tl.float32)
    return handle


def mend() -> None:
    dot, binary_op = InterpreterBuilder.create_dot, InterpreterBuilder.binary_op

    def mended_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, widened(a), widened(b), *rest)

    def mended_binary_op(self: Any, a: TensorHandle, b: TensorHandle, op: Any) -> TensorHandle:
        kind, result = a.dtype.scalar, binary_op(self, widened(a), widened(b), op)
        if kind != tl.bfloat16 or result.data.dtype == np.bool_:
            return result
        return TensorHandle(convert(result.data, tl.float32, kind), kind)

    interpreter._convert_float = convert
    InterpreterBuilder.create_dot = mended_dot
    InterpreterBuilder.binary_op = mended_binary_op


def pytest_configure() -> None:
    mend()
