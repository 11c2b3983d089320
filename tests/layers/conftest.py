"""Operators start from poisoned memory: torch fills every tensor that it does not initialise with NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3).isnan().all(), "torch no longer fills uninitialised memory in deterministic mode"
    yield
    torch.set_deterministic_debug_mode("default")
