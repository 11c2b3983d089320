"""What a parameter starts from."""

import pytest
import torch

from pithtrain.ops.parameter import ParameterSpec, initial_values

MATRIX = ParameterSpec("layers.0.attention.o", (300, 200), std=0.02)
EXPERTS = ParameterSpec("layers.0.experts.down", (6, 120, 100), expert=True, std=0.5)


def test_initial_values() -> None:
    """fp64 normal draws of the given width, a function of name, expert and seed alone."""
    values = initial_values(MATRIX, None, 3)
    assert values.dtype == torch.float64 and values.shape == (300, 200) and values.device.type == "cpu"
    assert values.std().item() == pytest.approx(0.02, rel=0.02) and abs(values.mean().item()) < 3e-4
    assert ((values.abs() < 0.02).double().mean().item()) == pytest.approx(0.6827, abs=0.01)
    torch.randn(5)
    assert torch.equal(initial_values(MATRIX, None, 3), values)

    others = [
        initial_values(MATRIX, None, 4),
        initial_values(ParameterSpec("layers.1.attention.o", (300, 200), std=0.02), None, 3),
    ]
    for other in others:
        assert other.shape == values.shape and abs(torch.corrcoef(torch.stack([values, other]).flatten(1))[0, 1]) < 0.02


def test_no_two_experts_are_alike() -> None:
    draws = torch.stack([initial_values(EXPERTS, expert, 3).flatten() for expert in range(6)])
    assert draws.shape == (6, 120 * 100)
    assert draws.std().item() == pytest.approx(0.5, rel=0.02)
    assert (torch.corrcoef(draws) - torch.eye(6)).abs().max() < 0.05
    dense = initial_values(ParameterSpec(EXPERTS.name, (120, 100), std=0.5), None, 3)
    assert not any(torch.equal(dense.flatten(), expert) for expert in draws)


def test_name_expert_and_seed_are_not_run_together() -> None:
    """Expert 1 of seed 23 is not expert 12 of seed 3."""
    assert not torch.equal(initial_values(EXPERTS, 1, 23), initial_values(EXPERTS, 12, 3))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    initial_values(MATRIX, None, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_norms_start_at_one() -> None:
    values = initial_values(ParameterSpec("norm", (9,), decay=False, mean=1.0), None, 3)
    assert values.dtype == torch.float64 and torch.equal(values, torch.ones(9, dtype=torch.float64))
