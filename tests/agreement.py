"""How far tensors are apart: the norm of the difference over the norm, for each parameter and each expert in it."""

from collections.abc import Mapping

import torch
from torch import Tensor

TOLERANCE = 1e-5


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """norm(got - expected) / norm(expected) in float64; 0 where both are exact zeros, inf where only one is."""
    assert got.shape == expected.shape, f"got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.detach().double(), expected.detach().double()
    if not bool(expected.any()):
        return 0.0 if not bool(got.any()) else float("inf")
    return float((got - expected).norm() / expected.norm())


def relative_differences(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Of every parameter by name, and of every expert within it as name[expert]."""
    assert got.keys() == expected.keys(), f"only on one side: {sorted(got.keys() ^ expected.keys())}"
    differences = {}
    for name, tensor in expected.items():
        differences[name] = relative_difference(got[name], tensor)
        if ".experts." in name and tensor.ndim == 3:
            for expert in range(tensor.shape[0]):
                differences[f"{name}[{expert}]"] = relative_difference(got[name][expert], tensor[expert])
    return differences


def assert_agree(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = "") -> float:
    """Asserts that nothing differs by more than TOLERANCE; returns the largest difference."""
    differences = relative_differences(got, expected)
    wrong = {name: value for name, value in differences.items() if not value <= TOLERANCE}
    assert not wrong, f"{what}: relative difference over {TOLERANCE}: {wrong}"
    return max(differences.values())


def assert_close(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Asserts the same of one tensor. NaN never agrees."""
    difference = relative_difference(got, expected)
    assert difference <= TOLERANCE, f"{what}: relative difference {difference:.2e} over {TOLERANCE}"


def randn(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    """Normal fp32 values from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
