"""Bugs to plant in a formula's module: what people get wrong, each another formula or a lost gradient.

Each is named by the text of the user's formula: "`+ bias` is lost", "`silu(x @ up.T)` passes no gradient".
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec.evaluator import evaluate, sample
from spec.formula import Formula, Node

OTHERS = {  # a function that is easily taken for another
    "silu": "gelu",
    "gelu": "gelu_tanh",
    "gelu_tanh": "gelu",
    "relu": "silu",
    "sigmoid": "tanh",
    "tanh": "sigmoid",
    "softplus": "relu",
    "mish": "silu",
    "elu": "relu",
    "square": "abs",
    "abs": "square",
    "sin": "cos",
    "cos": "sin",
    "maximum": "minimum",
    "minimum": "maximum",
    "softmax": "sigmoid",
}
MOST = 8  # bugs of one type
SEEN = 1e-4  # a relative difference that fp32 shows
LONGEST = 48  # characters of a slug, and of the user's text in its words
SIGNS = {"**": "power", "+": "plus", "-": "minus", "*": "times", "/": "over", ".T": "", "@": ""}


@dataclass(frozen=True)
class Bug:
    """The formula with a bug in it. words: what it is, with the user's text in it."""

    words: str
    root: Node

    @property
    def slug(self) -> str:
        """The words in small letters, digits and hyphens; signs are spelt out, and a long one loses its middle."""
        words = self.words
        for sign, word in SIGNS.items():
            words = words.replace(sign, f" {word} ")
        parts = re.findall(r"[a-z0-9]+", words.lower())
        while len("-".join(parts)) > LONGEST:
            del parts[len(parts) // 2]
        return "-".join(parts)


def bugs_of(formula: Formula) -> list[Bug]:
    """At most MOST, kinds in turn, each with other values or gradients than the formula on some input."""
    kinds = [list(kind(formula)) for kind in (_wrong_functions, _lost_terms, _swapped, _lost_gradients, _wrong_numbers)]
    found: dict[Node, Bug] = {}
    for round_ in range(MOST):
        for kind in kinds:
            if round_ < len(kind) and kind[round_].root not in found and _differs(formula, kind[round_].root):
                found[kind[round_].root] = kind[round_]
    return list(found.values())[:MOST]


def _quoted(formula: Formula, start: int, stop: int) -> str:
    """A part of the user's text, without its middle where it is long."""
    text, half = formula.text[start:stop], LONGEST // 2 - 1
    return f"`{text if len(text) <= LONGEST else text[:half] + '..' + text[-half:]}`"


def _replaced(node: Node, old: Node, new: Node) -> Node:
    if node == old:
        return new
    return replace(node, args=tuple(_replaced(arg, old, new) for arg in node.args))


def _wrong_functions(formula: Formula) -> Iterator[Bug]:
    for node in formula.nodes():
        if node.name in OTHERS:
            new = replace(node, name=OTHERS[node.name])
            yield Bug(f"{_quoted(formula, *node.span)} is computed with {new.name}", _replaced(formula.root, node, new))


def _lost_terms(formula: Formula) -> Iterator[Bug]:
    """The right side of a sum, or of a product of rows."""
    for node in formula.nodes():
        if node.name in ("+", "-", "*") and node.args[0].size == node.size:
            start = formula.text.index(node.name, node.args[0].span[1])
            yield Bug(f"{_quoted(formula, start, node.span[1])} is lost", _replaced(formula.root, node, node.args[0]))


def _swapped(formula: Formula) -> Iterator[Bug]:
    """Two matrices, or two vectors, of the same sizes."""
    for index, one in enumerate(formula.weights):
        for other in formula.weights[index + 1 :]:
            if one.sizes == other.sizes:
                names = {one.name: other.name, other.name: one.name}
                root = _renamed(formula.root, names)
                yield Bug(f"{one.name} and {other.name} are swapped", root)


def _renamed(node: Node, names: dict[str, str]) -> Node:
    args = tuple(_renamed(arg, names) for arg in node.args)
    return replace(node, args=args, weight=names.get(node.weight, node.weight))


def _lost_gradients(formula: Formula) -> Iterator[Bug]:
    """Of a vector, of what a product reads, and of x in every product."""
    nodes = formula.nodes()
    vectors = [node for node in nodes if node.name == "weight" and any(node in other.args for other in nodes)]
    vectors = [node for node in vectors if len(_sizes(formula, node)) == 1]
    rows = [node.args[0] for node in formula.products() if node.args[0].name != "x"]
    for node in [*vectors, *dict.fromkeys(rows)]:
        detached = Node("detach", (node,), node.size, node.depends, node.span)
        words = f"{_quoted(formula, *node.span)} {'gets' if node.weight else 'passes'} no gradient"
        yield Bug(words, _replaced(formula.root, node, detached))
    yield Bug("`x` gets no gradient through products", _cut_from_x(formula.root))


def _cut_from_x(node: Node) -> Node:
    if node.name == "@" and node.args[0].name == "x":
        x = node.args[0]
        return replace(node, args=(Node("detach", (x,), x.size, True, x.span), node.args[1]))
    return replace(node, args=tuple(_cut_from_x(arg) for arg in node.args))


def _sizes(formula: Formula, node: Node) -> tuple[object, ...]:
    return next(weight.sizes for weight in formula.weights if weight.name == node.weight)


def _wrong_numbers(formula: Formula) -> Iterator[Bug]:
    exponents = {node.args[1] for node in formula.nodes() if node.name == "**"}
    for node in formula.nodes():
        if node.name == "number":
            new = replace(node, value=node.value + 1 if node in exponents else node.value * 1.25 or 0.25)
            yield Bug(f"{_quoted(formula, *node.span)} is taken for {new.value:g}", _replaced(formula.root, node, new))


def _differs(formula: Formula, root: Node) -> bool:
    """Whether values or gradients are others, on inputs of ordinary size or ten times that."""
    if any(node.name == "detach" for node in Formula("", formula.weights, root).nodes()):
        return True
    changed = replace(formula, root=root)
    return any(_distance(formula, changed, scale) > SEEN for scale in (1.0, 10.0))


def _distance(formula: Formula, changed: Formula, scale: float) -> float:
    """The largest relative difference of the values and of each gradient."""
    expected, got = _outcome(formula, scale), _outcome(changed, scale)
    pairs = zip(expected, got, strict=True)
    return max(float((left - right).norm() / (left.norm() + 1e-30)) for left, right in pairs)


def _outcome(formula: Formula, scale: float) -> list[Tensor]:
    x, weights = sample(formula)
    value = evaluate(formula, x * scale, weights)
    leaves = [x, *weights.values()]
    grads = torch.autograd.grad(value.square().sum(), leaves, allow_unused=True)
    return [
        value.detach(),
        *(leaf.detach() * 0 if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)),
    ]
