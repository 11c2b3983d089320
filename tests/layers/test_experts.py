"""Every expert type of spec/experts.toml against its formula in float64: values, gradients, counts, in each precision.

A new type is held to its formula by its row there. D hidden, F expert hidden, N rows.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from golden.cases import TINY
from golden.replay import CountCosts
from pithtrain.choices import ExpertType
from pithtrain.layers.experts.base import Experts
from pithtrain.layers.experts.build import expert_class
from pithtrain.models.architecture import layer_specs
from pithtrain.ops.linear import Compute, Groups, Precision, dtype_of
from pithtrain.ops.parameter import Weight
from spec.document import read
from spec.evaluator import evaluate, evaluate_parts
from spec.formula import Formula
from spec.parser import parse
from tests.agreement import randn, relative_difference

FORMULAS = {row.name: parse(row.formula, row.weights) for row in read(Path(__file__).resolve().parents[2]).experts}
D, F = 24, 20
SIZES = (9, 0, 1, 70)  # rows of four experts
# Norm of the difference over the norm, for values and each gradient of each expert, against float64 on the same rounded
# inputs: the largest must be at least the first, which shows the precision at work, and at most the second. Measured
# largest of the types that ship: 2.5e-7, 3.7e-3, 0.15.
BANDS: dict[Precision, tuple[float, float]] = {"fp32": (0.0, 2e-6), "bf16": (5e-4, 2e-2), "fp8": (5e-3, 3e-1)}
EXTREME = 1e-5  # the same in fp32 for inputs thirty times as large, whose products' rounding is larger too


@dataclass(frozen=True)
class Case:
    """Experts of a type on rows, and the same in float64. weights: of each expert by the formula's names."""

    formula: Formula
    experts: Experts
    tensors: dict[str, Weight]
    x: Tensor
    upstream: Tensor

    @staticmethod
    def of(name: ExpertType, precision: Precision, scale: float = 1.0) -> "Case":
        """Weights as wide as they are in training, vectors of 1; the idle expert's are NaN."""
        kind, dtype = expert_class(name), dtype_of(precision)
        tensors = {}
        for seed, (tensor, parts) in enumerate(kind.shapes(D, F).items()):
            rows, inner = sum(shape[0] for shape in parts.values()), next(iter(parts.values()))[1:]
            value = randn(len(SIZES), rows, *inner, seed=seed, std=inner[0] ** -0.5 if inner else 1.0).to(dtype)
            value[SIZES.index(0)] = float("nan")
            tensors[tensor] = Weight(value, torch.zeros(value.shape))
        x = (randn(sum(SIZES), D, seed=8) * scale).to(dtype).requires_grad_()
        return Case(FORMULAS[name], kind(**tensors), tensors, x, randn(sum(SIZES), D, seed=9).to(dtype))

    def run(self, precision: Precision) -> tuple[Tensor, Tensor]:
        """Output and input gradient, in the precision's dtype. Weight gradients are queued, and added at the end."""
        compute = Compute(precision, deferred=[])
        output = self.experts(self.x, Groups.of(SIZES, torch.device("cpu"), compute), compute)
        output.backward(self.upstream)
        assert self.x.grad is not None
        assert not any(weight.grad.any() for weight in self.tensors.values())
        compute.drain()
        assert output.dtype == self.x.grad.dtype == dtype_of(precision)
        return output.detach(), self.x.grad

    def parts(self, what: str, expert: int) -> dict[str, Tensor]:
        """One expert's values or gradients by the formula's names."""
        found: dict[str, Tensor] = {}
        for tensor, shapes in type(self.experts).shapes(D, F).items():
            matrix = getattr(self.tensors[tensor], what)[expert]
            found |= dict(zip(shapes, matrix.split([shape[0] for shape in shapes.values()]), strict=True))
        return found

    def oracle(self, expert: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The formula's output and gradients in float64, for one expert's rows.

        Below fp32 products are rounded as the precision has it, so that kinks are on the same side; gradients are not.
        """
        x, upstream = (tensor.detach().split(SIZES)[expert].double() for tensor in (self.x, self.upstream))
        weights = {name: value.double().requires_grad_() for name, value in self.parts("value", expert).items()}
        products = torch.float64 if self.x.dtype == torch.float32 else self.x.dtype
        output = evaluate(self.formula, x.requires_grad_(), weights, products)
        grad_x, *grads = torch.autograd.grad(output, [x, *weights.values()], upstream)
        return output.detach(), grad_x, dict(zip(weights, grads, strict=True))


Pairs = dict[str, tuple[Tensor, Tensor]]


def pairs(case: Case, precision: Precision) -> Pairs:
    """What was got and what the formula says, for every expert that has rows."""
    output, grad = case.run(precision)
    found: Pairs = {}
    for expert, size in enumerate(SIZES):
        if size:
            expected, expected_grad, expected_grads = case.oracle(expert)
            found[f"output of {expert}"] = output.split(SIZES)[expert], expected
            found[f"gradient to x of {expert}"] = grad.split(SIZES)[expert], expected_grad
            for name, value in case.parts("grad", expert).items():
                found[f"gradient to {name} of {expert}"] = value, expected_grads[name]
    return found


def over(found: dict[str, float], most: float) -> dict[str, float]:
    """NaN is over everything."""
    return {what: value for what, value in found.items() if not value <= most}


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("name", FORMULAS)
def test_experts_are_their_formula(name: ExpertType, precision: Precision) -> None:
    """Experts with many rows, one row and none, whose weights are not read and get an exact zero."""
    case, (least, most) = Case.of(name, precision), BANDS[precision]
    found = {what: relative_difference(*pair) for what, pair in pairs(case, precision).items()}
    assert over(found, most) == {}
    assert max(found.values()) >= least, f"as exact as a higher precision: {found}"
    assert not any(weight.grad[SIZES.index(0)].any() for weight in case.tensors.values())


def largest_scale(case: Case, *scales: float) -> float:
    """Of factors to ordinary inputs, the first at which fp32 holds every part of the formula."""
    x, weights = case.x.detach().split(SIZES)[3].double(), case.parts("value", 3)
    for scale in scales:
        parts = evaluate_parts(case.formula, x * scale, weights).values()
        if all(bool((value.abs() < 1e30).all()) for value in parts):
            return scale
    return 1.0


@pytest.mark.parametrize("name", FORMULAS)
def test_extreme_values(name: ExpertType) -> None:
    """Limits and saturation are those of the formula, and nothing overflows that fp32 can hold.

    Differences are over the norm that ordinary inputs give, where that is larger: a saturated gradient is nearly zero.
    """
    ordinary = Case.of(name, "fp32")
    usual = {what: expected.norm() for what, (_, expected) in pairs(ordinary, "fp32").items()}
    for scale in (1e-3, largest_scale(ordinary, 30, 10, 3)):
        distances = {
            what: float((got.double() - expected).norm() / torch.maximum(usual[what], expected.norm()))
            for what, (got, expected) in pairs(Case.of(name, "fp32", scale), "fp32").items()
        }
        assert over(distances, EXTREME) == {}, f"inputs times {scale}"
    far = largest_scale(ordinary, 1e4, 1e3, 100, 30, 10, 3)
    for precision in get_args(Precision):
        assert all(value.isfinite().all() for value in Case.of(name, precision, far).run(precision))


@pytest.mark.parametrize("name", FORMULAS)
def test_no_rows(name: ExpertType) -> None:
    case = Case.of(name, "fp32")
    case = replace(case, x=torch.zeros(0, D, requires_grad=True))
    groups = Groups.of((0,) * len(SIZES), torch.device("cpu"), Compute())
    output = case.experts(case.x, groups, Compute())
    output.sum().backward()
    assert output.shape == (0, D) and case.x.grad is not None
    assert not any(weight.grad.any() for weight in case.tensors.values())


@pytest.mark.parametrize("name", FORMULAS)
def test_counts_are_those_of_the_formula(name: ExpertType) -> None:
    """Parameters by name and shape, in the model too; FLOPs of the forward products that run."""
    case = Case.of(name, "fp32")
    parts = {part: shape for shapes in type(case.experts).shapes(D, F).values() for part, shape in shapes.items()}
    assert parts == {weight.name: weight.shape(D, F) for weight in case.formula.weights}
    arch = replace(TINY, hidden_size=D, moe_intermediate_size=F, expert_type=name)
    sizes = [torch.Size(spec.shape).numel() for spec in layer_specs(arch, 0) if spec.expert]
    assert sum(sizes) == arch.num_experts * case.formula.num_parameters(D, F)
    with CountCosts() as counter:
        case.experts(case.x, Groups.of(SIZES, torch.device("cpu"), Compute()), Compute())
    assert counter.flops == sum(SIZES) * case.formula.flops(D, F)


def test_every_type_has_its_formula() -> None:
    assert set(FORMULAS) == set(get_args(ExpertType))
