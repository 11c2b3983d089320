"""Optimizer steps against torch.optim, clipping against torch, schedules by hand."""

import pytest
import torch
from torch import Tensor

from spec.reference.optim import adamw_step, clip_by_global_norm, sgd_step
from spec.reference.schedule import constant, cosine, warmup_stable_decay


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_adamw_is_that_of_torch() -> None:
    weight, exp_avg, exp_avg_sq = draw(3, 4, seed=0), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    parameter = torch.nn.Parameter(weight.clone())
    settings = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.3}
    optimizer = torch.optim.AdamW([parameter], betas=(0.8, 0.95), **settings)
    for step in range(1, 6):
        grad = draw(3, 4, seed=step)
        weight, exp_avg, exp_avg_sq = adamw_step(
            weight, grad, exp_avg, exp_avg_sq, step, beta1=0.8, beta2=0.95, **settings
        )
        parameter.grad = grad
        optimizer.step()
    assert torch.allclose(weight, parameter.detach(), rtol=1e-13, atol=0)
    assert torch.allclose(exp_avg_sq, optimizer.state[parameter]["exp_avg_sq"], rtol=1e-13, atol=0)


def test_first_adamw_step_is_the_rate_times_the_sign() -> None:
    weight, grad = torch.tensor([1.0, 1.0]).double(), torch.tensor([0.5, -3.0]).double()
    zeros = torch.zeros_like(weight)
    moved, _, _ = adamw_step(weight, grad, zeros, zeros, 1, 0.1, 0.9, 0.99, 0.0, 0.0)
    assert torch.allclose(moved, torch.tensor([0.9, 1.1]).double())


def test_sgd_by_hand() -> None:
    weight, grad = torch.full((1,), 2.0).double(), torch.full((1,), 4.0).double()
    assert sgd_step(weight, grad, 0.1).item() == pytest.approx(1.6)
    assert sgd_step(weight, grad, 0.1, weight_decay=0.5).item() == pytest.approx(1.5)


@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
def test_clipping_is_that_of_torch(clip_norm: float) -> None:
    grads = [draw(3, 2, seed=1), draw(5, seed=2)]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    clipped, ours = clip_by_global_norm(grads, clip_norm)
    assert torch.allclose(ours, norm, rtol=1e-14, atol=0)
    for mine, parameter in zip(clipped, parameters, strict=True):
        assert parameter.grad is not None and torch.allclose(mine, parameter.grad, rtol=1e-14, atol=0)


def test_warmup_reaches_the_peak_at_its_last_step() -> None:
    assert [constant(s, 2.0, 4) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert [constant(s, 2.0, 0) for s in range(2)] == [2.0, 2.0]


def test_warmup_stable_decay_by_hand() -> None:
    rates = [warmup_stable_decay(s, 1.0, 10, 2, 4, 0.2) for s in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_by_hand() -> None:
    rates = [cosine(s, 1.0, 6, 2, 0.5) for s in range(6)]
    half = 0.5**0.5
    assert rates == pytest.approx([0.5, 1, 0.75 + half / 4, 0.75, 0.75 - half / 4, 0.5])
