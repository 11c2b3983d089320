"""A formula's value in float64, and whether anything can be learned through it."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from spec.formula import Formula, FormulaError, Node, walk
from spec.parser import parse

HIDDEN, WIDE, ROWS = 6, 5, 64  # of the sample that a formula is tried on
UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "negate": torch.neg,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "abs": torch.abs,
    "sin": torch.sin,
    "cos": torch.cos,
    "softmax": lambda h: h.softmax(-1),
    "mean": lambda h: h.mean(-1, keepdim=True),
}


def evaluate(
    formula: Formula, x: Tensor, weights: Mapping[str, Tensor], products: torch.dtype = torch.float64
) -> Tensor:
    """x [.., D] and one expert's weights by name, in float64 -> [.., D] in float64, with gradients to both.

    products: the dtype that they take and give. Their values are rounded to it, gradients are not: where a formula has
    a kink, as maximum has one between two products, rounding decides on which side a value is.
    """
    return evaluate_parts(formula, x, weights, products)[formula.root]


def evaluate_parts(
    formula: Formula, x: Tensor, weights: Mapping[str, Tensor], products: torch.dtype = torch.float64
) -> dict[Node, Tensor]:
    """The same of every part, arguments first."""
    parts: dict[Node, Tensor] = {}
    for node in formula.nodes():
        args = [parts[arg] for arg in node.args]
        if node.name == "@":
            parts[node] = _rounded(_rounded(args[0], products) @ args[1].T, products)
        else:
            parts[node] = _value(node, args, x, weights)
    return parts


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if dtype == torch.float64 else value + (value.detach().to(dtype).double() - value.detach())


def _value(node: Node, args: list[Tensor], x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    match node.name:
        case "x":
            return x.double()
        case "weight":
            return weights[node.weight].double()
        case "number":
            return torch.tensor(node.value, dtype=torch.float64)
        case "+":
            return args[0] + args[1]
        case "-":
            return args[0] - args[1]
        case "*":
            return args[0] * args[1]
        case "/":
            return args[0] / args[1]
        case "**":
            return args[0] ** node.args[1].value
        case "clamp":
            return args[0].clamp(node.args[1].value, node.args[2].value)
        case "minimum" | "maximum":
            return _bounded(node, args[0], args[1])
    return UNARY[node.name](args[0])


def _bounded(node: Node, left: Tensor, right: Tensor) -> Tensor:
    """At a limit that is a number the gradient passes, as clamp has it; of two equal entries each gets half."""
    numbers, row = [arg.value for arg in node.args if arg.size is None], left if node.args[0].size else right
    if node.name == "minimum":
        return row.clamp(max=numbers[0]) if numbers else torch.minimum(left, right)
    return row.clamp(min=numbers[0]) if numbers else torch.maximum(left, right)


def sample(formula: Formula) -> tuple[Tensor, dict[str, Tensor]]:
    """x [ROWS, HIDDEN] and weights of ordinary size, leaves that want gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, dtype=torch.float64, generator=generator) * scale).requires_grad_()

    shapes = {weight.name: weight.shape(HIDDEN, WIDE) for weight in formula.weights}
    values = {name: draw(shape, shape[1] ** -0.5 if len(shape) == 2 else 1.0) for name, shape in shapes.items()}
    return draw((ROWS, HIDDEN)), values


def refuse_useless(formula: Formula) -> None:
    """FormulaError where ordinary inputs, or vectors at zero as they start, give no finite number or no gradient."""
    x, values = sample(formula)
    grads = _gradients(formula, x, values, "on ordinary inputs")
    for name, grad in grads.items():
        if not grad.any():
            problem = f"no gradient reaches {name}: the result is the same whatever it is; let it matter"
            raise FormulaError("formula", problem, formula.text, _place(formula, name))
    if (idle := idle_at_start(formula)).issuperset(_names(formula, 2)):
        first = next(iter((*_names(formula, 1), *values)))
        problem = (
            f"while vectors are zero, as they start, every expert computes the same: {', '.join(sorted(idle))} and"
        )
        remedy = f"the router get no gradient; write (1 + {first}) where {first} is a factor, or use a matrix"
        raise FormulaError("formula", f"{problem} {remedy}", formula.text, _place(formula, first), with_ones(formula))


def _names(formula: Formula, dims: int) -> list[str]:
    """Of the vectors (1) or the matrices (2)."""
    return [weight.name for weight in formula.weights if len(weight.sizes) == dims]


def idle_at_start(formula: Formula) -> set[str]:
    """x and the weights to which no gradient flows while vectors are zero, as they start."""
    x, values = sample(formula)
    values |= {name: torch.zeros_like(values[name]).requires_grad_() for name in _names(formula, 1)}
    grads = _gradients(formula, x, values, "where vectors are zero, as they start")
    return {name for name, grad in grads.items() if not grad.any()}


def with_ones(formula: Formula) -> str:
    """The formula's text with (1 + v) for every vector v that is a factor; "" where something stays idle even so."""
    factors = {
        arg.span: arg.weight for node in walk(formula.root) if node.name == "*" for arg in node.args if arg.weight
    }
    text = formula.text
    for (start, stop), name in sorted(factors.items(), reverse=True):
        text = f"{text[:start]}(1 + {name}){text[stop:]}"
    weights = " ".join(map(str, formula.weights))
    return "" if not factors or idle_at_start(parse(text, weights)) else text


def _gradients(formula: Formula, x: Tensor, values: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Of the sum of the result, to x and the weights. FormulaError for what is not finite."""
    parts = evaluate_parts(formula, x, values)
    for node, value in parts.items():
        if not value.isfinite().all():
            problem = f"not finite {where}; keep the argument where it is, as log(1 + square(h)) does"
            raise FormulaError("formula", problem, formula.text, node.span)
    leaves = {"x": x, **values}
    grads = torch.autograd.grad(parts[formula.root].sum(), list(leaves.values()), allow_unused=True)
    found = {name: leaves[name] * 0 if grad is None else grad for name, grad in zip(leaves, grads, strict=True)}
    for name, grad in found.items():
        if not grad.isfinite().all():
            problem = f"the gradient to {name} is not finite {where}; keep off kinks, as sqrt has at 0"
            raise FormulaError("formula", problem, formula.text, _place(formula, name))
    return found


def _place(formula: Formula, name: str) -> tuple[int, int]:
    return next(node.span for node in formula.nodes() if name in (node.weight, node.name))
