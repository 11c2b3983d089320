"""The mended interpreter converts and computes as torch does."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.agreement import randn

E4M3 = torch.float8_e4m3fn
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


@triton.jit
def convert_kernel(source, target, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(target + lane, tl.load(source + lane).to(target.dtype.element_ty))


@triton.jit
def arithmetic_kernel(a, b, results, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    x, y = tl.load(a + lane), tl.load(b + lane)
    tl.store(results + lane, x * y)
    tl.store(results + SIZE + lane, x - y)
    tl.store(results + 2 * SIZE + lane, tl.where(x < y, x, y))


@triton.jit
def dot_kernel(a, b, result, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(result + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def every_bf16() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def every_e4m3() -> Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3)


def many_fp32() -> Tensor:
    """Every value of bf16's bits on top, with the bits below it at, beside and far from a tie; and drawn ones."""
    top = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x4321])
    drawn = torch.randint(0, 2**32, (2**16,), generator=torch.Generator().manual_seed(0))
    return torch.cat([(top[:, None] + low).flatten(), drawn]).to(torch.uint32).view(torch.float32)


def bits(x: Tensor) -> Tensor:
    """NaN counts as NaN, whatever its payload."""
    x = x.clone()
    values = x.view(UNSIGNED[x.dtype.itemsize]).to(torch.int64)
    return values.masked_fill(x.float().isnan(), -1)


CONVERSIONS = {
    "bf16 to fp32": (every_bf16, torch.float32),
    "bf16 to e4m3": (every_bf16, E4M3),
    "e4m3 to fp32": (every_e4m3, torch.float32),
    "e4m3 to bf16": (every_e4m3, torch.bfloat16),
    "fp32 to bf16": (many_fp32, torch.bfloat16),
    "fp32 to e4m3": (many_fp32, E4M3),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions(name: str) -> None:
    make, target = CONVERSIONS[name]
    source = make()
    got = torch.zeros(source.shape, dtype=target)
    convert_kernel[1,](source, got, SIZE=source.numel())
    expected = (source.float().clamp(-448, 448) if target == E4M3 else source).to(target)
    assert torch.equal(bits(got), bits(expected))


def test_bf16_arithmetic() -> None:
    a, b = randn(1024).bfloat16(), randn(1024, seed=1).bfloat16()
    results = torch.zeros(3, 1024, dtype=torch.bfloat16)
    arithmetic_kernel[1,](a, b, results, SIZE=1024)
    assert torch.equal(results, torch.stack([a * b, a - b, torch.minimum(a, b)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_dot(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-8, 9, (32, 32)).float() for _ in range(2))
    result = torch.zeros(32, 32)
    dot_kernel[1,](a.to(dtype), b.to(dtype), result, SIDE=32)
    assert torch.equal(result, a @ b)


def test_memory_is_poisoned_in_every_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, E4M3):
        assert torch.empty(64, dtype=dtype).float().isnan().all(), dtype
