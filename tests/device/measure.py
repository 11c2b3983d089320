"""The two ways of comparing, and the way of timing."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Clock = Callable[[Callable[[], object], torch.device], float]  # seconds that a call takes

WARM_UP = 2
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLUSH = 2**29  # bytes written before a timed call: more than any cache, and time for the host to launch what follows


def different(got: Tensor, expected: Tensor) -> int:
    """How many elements differ in a bit; all of them where shape or dtype does."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return max(got.numel(), expected.numel(), 1)
    got, expected = (x.detach().contiguous().view(BITS[x.element_size()]) for x in (got, expected.to(got.device)))
    return int((got != expected).sum())


def worst(got: Tensor, exact: Tensor, allowance: Tensor | float) -> float:
    """The largest |got - exact| / allowance; 0 / 0 is 0, what is not finite is infinite, and so is another shape."""
    if got.shape != exact.shape:
        return float("inf")
    error = (got.detach().double() - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / allowance).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(ratio.max()) if ratio.numel() else 0.0


def interleaved(
    contestants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, clock: Clock | None = None
) -> dict[str, list[float]]:
    """Seconds of every call by contestant, `rounds` each, in turns, after WARM_UP rounds that do not count.

    clock: None for the card's own events, where there is a card.
    """
    clock = clock or (on_card if device.type == "cuda" else on_host)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(WARM_UP + rounds):
        for name, call in contestants.items():
            taken = clock(call, device)
            if turn >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def on_card(call: Callable[[], object], device: torch.device) -> float:
    """Seconds between two events on the card, caches cold."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def on_host(call: Callable[[], object], device: torch.device) -> float:
    """Seconds by the host's clock, until the device is done."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(seconds: Sequence[float]) -> tuple[float, str]:
    """The median in seconds, and the 10% and 90% deciles as text, in milliseconds."""
    middle = statistics.median(seconds)
    low, *_, high = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else (middle, middle)
    return middle, f"{low * 1e3:.3f}-{high * 1e3:.3f}"
