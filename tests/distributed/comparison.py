"""What two meshes measured of one case, side by side."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.agreement import TOLERANCE, assert_agree, relative_difference

Results = dict[str, Any]


def tensors(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def check(got: Results, expected: Results, what: str) -> float:
    """One case against another: scalars, gradients per parameter and expert; counts and ids exactly."""
    what = f"{what} (smallest top-k gap {expected['gap']:.1e})"
    assert got["num_labels"] == expected["num_labels"], what
    assert np.array_equal(got["counts"], expected["counts"]), f"{what}: counts"
    assert np.array_equal(got["ids"], expected["ids"]), f"{what}: expert ids"
    for field in ("loss", "balance_loss", "z_loss", "norm"):
        assert got[field] == pytest.approx(expected[field], rel=TOLERANCE, abs=0), f"{what}: {field}"
    for name, square in expected["square_norms"].items():
        assert got["square_norms"][name] == pytest.approx(square, rel=2 * TOLERANCE, abs=0), f"{what}: {name}"
    return assert_agree(tensors(got["grads"]), tensors(expected["grads"]), what)


def check_run(got: Results, expected: Results, initial: Results, what: str) -> None:
    """One run of several steps against another: biases exactly, losses and weights, every one of which has moved."""
    what = f"{what} (smallest top-k gap {expected['gap']:.1e})"
    same_bytes(got["bias"], expected["bias"], f"{what}: expert bias")
    assert got["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE, abs=0), what
    assert_agree(tensors(got["weights"]), tensors(expected["weights"]), what)
    for name, start in tensors(initial).items():
        assert relative_difference(torch.from_numpy(got["weights"][name]), start) > 0, f"{name} did not move"


def same_bytes(got: Any, expected: Any, what: str) -> None:
    """Nested results, equal to the bit."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), what
        for key, value in expected.items():
            same_bytes(got[key], value, f"{what}: {key}")
    elif isinstance(expected, np.ndarray):
        assert got.tobytes() == expected.tobytes(), what
    else:
        assert got == expected, what
