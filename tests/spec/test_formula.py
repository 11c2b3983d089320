"""Formulas of experts: what they compute, what follows from them, and where a text that is none is refused."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spec.check import check_experts
from spec.document import read
from spec.evaluator import evaluate, idle_at_start, refuse_useless, with_ones
from spec.formula import FormulaError
from spec.hints import RECIPES, filled
from spec.parser import parse
from spec.reference.experts import clamped_swiglu, swiglu

ROOT = Path(__file__).resolve().parents[2]
TWO = "up:F,D down:D,F"


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_formulas_of_the_spec_can_be_experts() -> None:
    experts = read(ROOT).experts
    assert {"swiglu", "clamped_swiglu", "geglu", "gated_relu2", "relu2", "gelu"} <= {expert.name for expert in experts}
    for expert in experts:
        refuse_useless(parse(expert.formula, expert.weights))


def test_spec_formulas_are_the_reference_equations() -> None:
    """SwiGLU's and GPT-OSS's, which have equations of their own."""
    formulas = {expert.name: parse(expert.formula, expert.weights) for expert in read(ROOT).experts}
    x = draw(9, 4, seed=0) * 6
    weights = {"gate": draw(3, 4, seed=1), "up": draw(3, 4, seed=2), "down": draw(4, 3, seed=3)}
    both = torch.cat([weights["gate"], weights["up"]])
    torch.testing.assert_close(evaluate(formulas["swiglu"], x, weights), swiglu(x, both, weights["down"]))
    biases = {"gate_bias": draw(3, seed=4), "up_bias": draw(3, seed=5), "down_bias": draw(4, seed=6)}
    hidden = clamped_swiglu(x @ both.T + torch.cat([biases["gate_bias"], biases["up_bias"]]), 1.702, 7.0)
    expected = hidden @ weights["down"].T + biases["down_bias"]
    torch.testing.assert_close(evaluate(formulas["clamped_swiglu"], x, weights | biases), expected)


def test_spec_check_reads_formulas() -> None:
    """A row whose formula does not fit its weights is a problem, with the place."""
    document = read(ROOT)
    wrong = document.experts[0].model_copy(update={"weights": "gate:F,D up:F,F down:D,F"})
    [problem] = check_experts(document.model_copy(update={"statements": (wrong, *document.experts[1:])}))
    assert problem.where == wrong.id and "up.T takes [.., F] by up:F,F" in problem.what and "^~" in problem.what


CASES = {
    "x - 2 * (x @ w.T) / 4": lambda x, w, v: x - (x @ w.T) / 2,
    "-x ** 2 + +v": lambda x, w, v: v - x**2,
    "1 / (1 + exp(-x)) + v": lambda x, w, v: torch.sigmoid(x) + v,
    "x * mean(square(x)) ** -0.5 * v": lambda x, w, v: x * v / (x**2).mean(-1, keepdim=True).sqrt(),
    "softmax(x @ w.T) * v": lambda x, w, v: (x @ w.T).softmax(-1) * v,
    "maximum(x, v) + minimum(x, 1) * maximum(-1, v)": lambda x, w, v: (
        torch.maximum(x, v) + x.clamp(max=1) * v.clamp(min=-1)
    ),
    "clamp(x, -1, 0.5) + v": lambda x, w, v: x.clamp(-1, 0.5) + v,
    "silu(x) + gelu(x) + gelu_tanh(x) + relu(x) + tanh(x) + v": lambda x, w, v: (
        F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.relu(x) + torch.tanh(x) + v
    ),
    "softplus(x) + mish(x) + elu(x) + log(1 + abs(x)) + sqrt(2 + sin(x)) + cos(x) + v": lambda x, w, v: (
        F.softplus(x) + F.mish(x) + F.elu(x) + torch.log1p(x.abs()) + (2 + x.sin()).sqrt() + x.cos() + v
    ),
}


@pytest.mark.parametrize("text", CASES)
def test_what_a_formula_computes(text: str) -> None:
    """Every operator and function, and Python's precedence of signs and powers."""
    x, w, v = draw(5, 4, seed=0), draw(4, 4, seed=1), draw(4, seed=2)
    declared = "w:D,D v:D" if "w.T" in text and "v" in text.replace("w.T", "") else "w:D,D" if "w.T" in text else "v:D"
    formula = parse(text, declared)
    torch.testing.assert_close(evaluate(formula, x, {"w": w, "v": v}), CASES[text](x, w, v))


def test_products_can_be_rounded_as_a_precision_has_them() -> None:
    """Values are, gradients are not: 1.001 and 1 are a tie in bf16, of which each gets half."""
    formula = parse("maximum(x @ a.T, x @ b.T)", "a:D,D b:D,D")
    x, one = torch.ones(1, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    weights = {"a": (one * 1.001).requires_grad_(), "b": one.clone().requires_grad_()}
    for products, value, shares in ((torch.float64, 1.001, (1.0, 0.0)), (torch.bfloat16, 1.0, (0.5, 0.5))):
        output = evaluate(formula, x, weights, products)
        assert torch.equal(output, torch.full_like(x, value))
        grads = torch.autograd.grad(output.sum(), list(weights.values()))
        assert [float(grad[0, 0]) for grad in grads] == list(shares)
    third = evaluate(parse("x @ a.T", "a:D,D"), x / 3, {"a": one}, torch.bfloat16)
    assert torch.equal(third, (x / 3).bfloat16().double())


def test_counts() -> None:
    """An equal product is computed once; vectors are parameters and no product; 2F and numbers are sizes."""
    text = "(silu(x @ a.T) * (x @ a.T) + bias) @ b.T @ c.T"
    formula = parse(text, "a:2F,D bias:2F b:3,2F c:D,3")
    assert formula.num_parameters(8, 5) == 10 * 8 + 10 + 3 * 10 + 8 * 3
    assert formula.flops(8, 5) == 2 * (10 * 8 + 3 * 10 + 8 * 3)
    assert len(formula.products()) == 3


REFUSED = [
    # formula, weights, the part marked, what is said
    ("swosh(x @ up.T) @ down.T", TWO, "swosh", "unknown function 'swosh', expected one of silu"),
    ("silu(x @ wide.T) @ down.T", TWO, "wide.T", "no weight is called 'wide', expected one of x, up, down; declare"),
    ("silu(x @ (2 * x)) @ down.T", TWO, "2 * x", "right side of @"),
    ("silu(x @ up.T) + b", TWO, "b", "no weight is called 'b', expected one of x, up, down; declare it, as b:F"),
    (
        "silu(x @ up.T) @ down.T",
        "up:F,D down:F,D",
        "silu(x @ up.T) @ down.T",
        "is [.., F] by up:F,D, but down.T takes [.., D] by down:F,D; sizes are out,in: declare down:D,F",
    ),
    ("silu(x @ up.T)", "up:F,D", "silu(x @ up.T)", "the result is [.., F] by up:F,D, expected [.., D]"),
    (
        "x @ a.T + x @ b.T @ c.T",
        "a:D,D b:F,D c:F,F",
        "x @ a.T + x @ b.T @ c.T",
        "`x @ a.T` is [.., D] by a:D,D, but `x @ b.T @ c.T` is [.., F] by c:F,F",
    ),
    (
        "silu(x @ up.T) * b @ down.T",
        TWO + " b:D",
        "silu(x @ up.T) * b",
        "`b` is [.., D] by b:D, expected equal sizes or size 1; declare b:F",
    ),
    (
        "silu(x @ up.T) @ down.T",
        "up:F,D down:D,2F",
        "silu(x @ up.T) @ down.T",
        "declare down:D,F or change the left side",
    ),
    ("silu(x @ up.T, 2) @ down.T", TWO, "silu(x @ up.T, 2)", "silu got 2 arguments, expected 1"),
    ("up * x", "up:F,D", "up", "up is a matrix, declared up:F,D"),
    ("x @ v.T", "v:D", "v.T", "v is a vector, declared v:D"),
    ("x + up.T", "up:D,D", "up.T", "up.T stands alone"),
    ("x ** v", "v:D", "v", "an exponent is a number"),
    ("clamp(x, v, 2)", "v:D", "v", "clamp's limits are numbers"),
    ("clamp(x, 2, -2) * v", "v:D", "clamp(x, 2, -2)", "low 2 and high -2"),
    ("relu(3) * x + v", "v:D", "3", "relu of a number"),
    ("x * v + 1 / 0", "v:D", "1 / 0", "not finite"),
    ("x * v[0]", "v:D", "v[0]", "not allowed here"),
    ("x.sum() * v", "v:D", "x.sum()", "not allowed here"),
    ("x if v else x", "v:D", "x if v else x", "not allowed here"),
    ("'x' * v", "v:D", "'x'", "not allowed here"),
    ("True * x * v", "v:D", "True", "not allowed here"),
    ("silu(x @ up.T @ down.T", TWO, "(", "this bracket is never closed"),
    ("silu(x @ up.T)) @ down.T", TWO, ")", "no bracket is open"),
    ("silu(x up.T) @ down.T", TWO, "u", "no sign stands before this"),
    ("silu(x @ up.T * 2x) @ down.T", TWO, "2", "cannot be read (invalid decimal literal), expected x"),
    ("  ", TWO, None, "empty; write what an expert makes of x"),
    ("x * vé", "v:D", "é", "ASCII"),
    ("-" * 400 + "x * v", "v:D", None, "nested too deep"),
    ("-" * 99 + "x * v" + " " * 3, "v:D", None, "nested too deep"),
    ("v + 1", "v:D", "v + 1", "x is not used"),
    ("2 * 3", "", "2 * 3", "the result is a number"),
    ("x * 2", "", "x * 2", "no weight"),
    ("0 * x + v", "v:D", "x", "no gradient reaches x"),
    ("x + relu(-square(v))", "v:D", "v", "no gradient reaches v"),
    ("softmax(x @ g.T) * x", "g:1,D", "g.T", "no gradient reaches g"),
    ("log(x @ w.T)", "w:D,D", "log(x @ w.T)", "not finite on ordinary inputs"),
    ("x / v", "v:D", "x / v", "not finite where vectors are zero"),
    (
        "-v * x @ w.T",
        "v:D w:D,D",
        "v",
        "every expert computes the same: w, x and the router get no gradient; write (1 + v)",
    ),
    ("x + v", "v:D", "v", "every expert computes the same"),
    ("x + v * w", "v:D w:D", "v", "every expert computes the same: v, w and the router"),
    ("sqrt(abs(x - x)) + w", "w:D", "x", "the gradient to x is not finite"),
]


@pytest.mark.parametrize(("text", "weights", "marked", "said"), REFUSED, ids=[row[3] for row in REFUSED])
def test_a_formula_that_is_none_is_refused_with_its_place(
    text: str, weights: str, marked: str | None, said: str
) -> None:
    with pytest.raises(FormulaError) as refused:
        refuse_useless(parse(text, weights))
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("formula: ") and said in lines[0]
    if marked is not None:
        start = lines[2].index("^")
        assert lines[1][start : len(lines[2])] == marked


MENDED = [
    # formula, weights, the part marked, what to write instead
    ("silu(x @ up) @ down.T", TWO, "up", "silu(x @ up.T) @ down.T"),
    ("silu(x @ self.up.T) @ down.T", TWO, "self.up.T", "silu(x @ up.T) @ down.T"),
    ("silu(x @ up.weight.t()) @ down.T", TWO, "up.weight.t()", "silu(x @ up.T) @ down.T"),
    ("silu(x @ upp.T) @ down.T", TWO, "upp.T", "silu(x @ up.T) @ down.T"),
    ("silu(X @ up.T) @ down.T", TWO, "X", "silu(x @ up.T) @ down.T"),
    ("down @ silu(x @ up.T)", TWO, "down @ silu(x @ up.T)", "silu(x @ up.T) @ down.T"),
    ("silu(up.T @ (x + 1)) @ down.T", TWO, "up.T @ (x + 1)", "silu((x + 1) @ up.T) @ down.T"),
    ("silu(x * up.T) @ down.T", TWO, "x * up.T", "silu(x @ up.T) @ down.T"),
    ("(swish(x @ up.T)) @ down.T", TWO, "swish", "(silu(x @ up.T)) @ down.T"),
    ("SiLU(x @ up.T) @ down.T", TWO, "SiLU", "silu(x @ up.T) @ down.T"),
    ("sigmoidal(x @ up.T) @ down.T", TWO, "sigmoidal", "sigmoid(x @ up.T) @ down.T"),
    ("F.silu(x @ up.T) @ down.T", TWO, "F.silu(x @ up.T)", "silu(x @ up.T) @ down.T"),
    ("torch.nn.functional.silu(x) @ up.T @ down.T", TWO, "torch.nn.functional.silu(x)", "silu(x) @ up.T @ down.T"),
    ("np.clip(x, -1, 1) @ up.T @ down.T", TWO, "np.clip(x, -1, 1)", "clamp(x, -1, 1) @ up.T @ down.T"),
    ("(x @ up.T).relu() @ down.T", TWO, "(x @ up.T).relu()", "relu(x @ up.T) @ down.T"),
    ("softmax(x @ up.T, dim=-1) @ down.T", TWO, "softmax(x @ up.T, dim=-1)", "softmax(x @ up.T) @ down.T"),
    ("leaky_relu(x) @ up.T @ down.T", TWO, "leaky_relu(x)", "maximum(x, 0.01 * x) @ up.T @ down.T"),
    (
        "x * quick_gelu(x + v) @ w.T",
        "v:D w:D,D",
        "quick_gelu(x + v)",
        "x * ((x + v) * sigmoid(1.702 * (x + v))) @ w.T",
    ),
    ("relu(x @ up.T)^2 @ down.T", TWO, "^", "relu(x @ up.T) ** 2 @ down.T"),
    ("y = silu(x @ up.T) @ down.T", TWO, "y = ", "silu(x @ up.T) @ down.T"),
    ("σ(x @ upᵀ) @ down.T", TWO, "σ", "sigmoid(x @ up.T) @ down.T"),
    ("(v * silu(x @ up.T)) @ down.T", TWO + " v:F", "v", "((1 + v) * silu(x @ up.T)) @ down.T"),
    (
        "(v * silu(x @ up.T) - v * relu(x @ up.T)) @ down.T",
        TWO + " v:F",
        "v",
        "((1 + v) * silu(x @ up.T) - (1 + v) * relu(x @ up.T)) @ down.T",
    ),
    ("x * v * w @ m.T", "v:D w:D m:D,D", "v", "x * (1 + v) * (1 + w) @ m.T"),
    ("x + v * tanh(x @ m.T)", "v:D m:D,D", "v", "x + (1 + v) * tanh(x @ m.T)"),
]


@pytest.mark.parametrize(("text", "weights", "marked", "instead"), MENDED, ids=[row[0] for row in MENDED])
def test_what_was_probably_meant_is_shown_in_the_formula(text: str, weights: str, marked: str, instead: str) -> None:
    """One more line after the mark: the whole formula, which holds."""
    with pytest.raises(FormulaError) as refused:
        refuse_useless(parse(text, weights))
    said, shown, marks, write = str(refused.value).splitlines()
    start = marks.index("^")
    assert said.startswith("formula: ") and shown[start : len(marks)] == marked
    assert write == f"  write: {instead}"
    refuse_useless(parse(instead, weights))


@pytest.mark.parametrize("name", RECIPES)
def test_what_stands_for_a_missing_function_is_a_formula(name: str) -> None:
    """With an argument in it that needs its brackets."""
    declared = {"w": "w:D,D", "gate": "gate:F,D", "up": "up:F,D"}
    text = filled(RECIPES[name], "square(x - v) + 1")
    weights = ["down:D,F", "v:D", *(row for word, row in declared.items() if f"{word}.T" in text)]
    formula = f"(2 * {text}) @ down.T + v" if "gate.T" in text else f"x * {text} @ into.T @ down.T + v"
    refuse_useless(parse(formula, " ".join([*weights, *(["into:F,D"] if "into" in formula else [])])))
    with pytest.raises(FormulaError, match="unknown function"):
        parse(f"{name}(x) * v", "v:D")


REFUSED_WEIGHTS = [
    ("up:F,D down:D,F b:F", "b", "'b' is not used"),
    ("up:F,D down:D,F up:F,D", "up", "declared twice"),
    ("up:F,D down:D,F x:D", "x", "the token's hidden state"),
    ("up:F,D down:D,F silu:D", "silu", "a function"),
    ("up:F,D down:D,F lambda:D", "lambda", "a word of Python"),
    ("up:F,D down:H,F", "H,F", "got sizes 'H,F'"),
    ("up:F,D down:D,F,D", "D,F,D", "got sizes 'D,F,D'"),
    ("up:F,D down:0F,D", "0F,D", "got sizes"),
    ("up:F,D down", "down", "expected name:sizes"),
    ("up:F,D Down:D,F", "Down:D,F", "small letters"),
    ("up:F,D down:", None, "got sizes ''"),
]


@pytest.mark.parametrize(("weights", "marked", "said"), REFUSED_WEIGHTS, ids=[row[2] for row in REFUSED_WEIGHTS])
def test_weights_that_are_none_are_refused_with_their_place(weights: str, marked: str | None, said: str) -> None:
    with pytest.raises(FormulaError) as refused:
        parse("gelu(x @ up.T) @ down.T", weights)
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("weights: ") and said in lines[0]
    if marked is not None:
        start = lines[2].rindex("^")
        assert lines[1][start : len(lines[2])] == marked


WEIGHTS = [
    "up=F,D down=D,F",
    "up: F, D down: D, F",
    "up:F,D, down:D,F",
    "up:[F,D] down:[D,F]",
    "UP:f,d; DOWN:d,f",
    "up:FxD down:D×F",
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_written_otherwise_are_shown_as_they_should_be(weights: str) -> None:
    with pytest.raises(FormulaError) as refused:
        parse("gelu(x @ up.T) @ down.T", weights)
    assert str(refused.value).splitlines()[3:] == ["  write: up:F,D down:D,F"]


def test_weights_that_nobody_can_guess_are_not_guessed() -> None:
    with pytest.raises(FormulaError) as refused:
        parse("gelu(x @ up.T) @ down.T", "my up:F,D down:D,F")
    assert "write:" not in str(refused.value)


def test_what_idles_at_the_start() -> None:
    """A factor of zero keeps what it scales from learning, though it learns itself; 1 + a factor does not."""
    text, weights = "x @ w.T + v * (silu(x @ up.T) @ down.T)", TWO + " v:D w:D,D"
    formula = parse(text, weights)
    refuse_useless(formula)
    assert idle_at_start(formula) == {"up", "down"}
    assert with_ones(formula) == "x @ w.T + (1 + v) * (silu(x @ up.T) @ down.T)"
    assert idle_at_start(parse(with_ones(formula), weights)) == set()
