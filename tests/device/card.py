"""The card, what runs on it, and its measured roofline: a large copy, a large bf16 product, a large FP8 product."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

from pithtrain.ops.fp8 import E4M3
from tests.device.measure import interleaved, spread
from tests.device.report import Place, Row, each

ROUNDS = 15


def card(place: Place) -> Iterator[Row]:
    copied, side = (2**14, 64) if place.small else (2**31, 8192)
    yield from each(
        place,
        [
            ("machine", lambda: [Row("machine", "measured", machine(place.device))]),
            ("copy", lambda: [copy(place, copied)]),
            ("bf16 product", lambda: [product(place, side, torch.bfloat16)]),
            ("FP8 product", lambda: [product(place, side, E4M3)]),
        ],
    )


def machine(device: torch.device) -> dict[str, object]:
    versions = {"torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}
    versions |= {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    if device.type != "cuda":
        return {"card": "none", **versions}
    about, driver = torch.cuda.get_device_properties(device), Path("/proc/driver/nvidia/version")
    return {
        "card": about.name,
        "cards": torch.cuda.device_count(),
        "capability": f"{about.major}.{about.minor}",
        "memory GiB": about.total_memory / 2**30,
        "multiprocessors": about.multi_processor_count,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else "unknown",
        **versions,
    }


def copy(place: Place, size: int) -> Row:
    """Bytes a second of a copy within the card's memory, each byte read and written once."""
    source = torch.ones(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return measured("copy", place, lambda: target.copy_(source), 2 * size)


def product(place: Place, side: int, dtype: torch.dtype) -> Row:
    """FLOPs a second of a square product by torch: the dense rate."""
    generator = torch.Generator(place.device).manual_seed(0)
    a, b = (torch.randn(side, side, device=place.device, generator=generator).to(dtype) for _ in range(2))
    one = torch.ones((), device=place.device)

    def multiply() -> Tensor:
        if dtype == E4M3:
            return torch._scaled_mm(
                a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=place.device.type == "cuda"
            )
        return a @ b

    return measured("FP8 product" if dtype == E4M3 else "bf16 product", place, multiply, 2 * side**3)


def measured(name: str, place: Place, call: Callable[[], object], amount: float) -> Row:
    """`amount` of bytes or FLOPs a call, as a rate."""
    middle, deciles = spread(interleaved({name: call}, place.device, 2 if place.small else ROUNDS)[name])
    return Row(name, "measured", {"ms": middle * 1e3, "10%-90% ms": deciles, "rate": amount / middle})
