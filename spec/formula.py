"""An expert type as a formula over a token's hidden state x and named weights: `gelu(x @ up.T) @ down.T`.

A weight is declared with its sizes, `up:F,D down:D,F bias:F`: D is the hidden size, F the experts' own, and numbers and
multiples (2F, 4) are sizes too. A matrix [O, I] stands in a product `h @ w.T`; a vector goes with the entries of a row;
size 1 goes with any other. Everything else is arithmetic with numbers and FUNCTIONS, entry by entry but for softmax and
mean, which are over a row. parser.py reads one, evaluator.py computes it.
"""

import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from spec.hints import mended_weights

FUNCTIONS = {  # name -> how many arguments; clamp's last two are numbers
    **dict.fromkeys(("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "softplus", "mish", "elu"), 1),
    **dict.fromkeys(("exp", "log", "sqrt", "square", "abs", "sin", "cos", "softmax", "mean"), 1),
    "maximum": 2,
    "minimum": 2,
    "clamp": 3,
}
Span = tuple[int, int]


class FormulaError(ValueError):
    """What cannot be an expert: the problem with its remedy, the text, and a line under it that marks the place.

    instead: what to write, the whole text; one more line where there is some.
    """

    def __init__(self, what: str, problem: str, text: str, span: Span, instead: str = "") -> None:
        start, stop = span
        marks = " " * start + "^" + "~" * (stop - start - 1)
        said = f"{what}: {problem}\n  {text}\n  {marks}"
        super().__init__(f"{said}\n  write: {instead}" if instead else said)
        self.problem, self.span = problem, span


@dataclass(frozen=True)
class Size:
    """count times the hidden size (letter D), the experts' own (F), or 1 (no letter)."""

    count: int
    letter: str = ""

    def at(self, hidden: int, wide: int) -> int:
        return self.count * {"D": hidden, "F": wide, "": 1}[self.letter]

    def __str__(self) -> str:
        return self.letter if self.letter and self.count == 1 else f"{self.count}{self.letter}"


ONE, D, F = Size(1), Size(1, "D"), Size(1, "F")


@dataclass(frozen=True)
class Declared:
    """A weight: a matrix [O, I], or a vector. span: its name's place in the text of the weights."""

    name: str
    sizes: tuple[Size, ...]
    span: Span = field(compare=False)

    def shape(self, hidden: int, wide: int) -> tuple[int, ...]:
        return tuple(size.at(hidden, wide) for size in self.sizes)

    def __str__(self) -> str:
        return f"{self.name}:{','.join(map(str, self.sizes))}"


@dataclass(frozen=True)
class Node:
    """A part of a formula. Equal parts are equal nodes, wherever they stand.

    name: "x", "number", "weight", "negate", "@" (of a row and a matrix), an operator's sign or a function's.
    size: of its rows; None for a number. depends: whether x matters. weight, value: of a weight and a number.
    """

    name: str
    args: tuple["Node", ...]
    size: Size | None
    depends: bool
    span: Span = field(compare=False)
    weight: str = ""
    value: float = 0.0


@dataclass(frozen=True)
class Formula:
    """A formula that can be an expert, and what follows from it."""

    text: str
    weights: tuple[Declared, ...]
    root: Node

    def nodes(self) -> list[Node]:
        """Every different part once, arguments first."""
        return list(dict.fromkeys(walk(self.root)))

    def products(self) -> list[Node]:
        return [node for node in self.nodes() if node.name == "@"]

    def num_parameters(self, hidden: int, wide: int) -> int:
        """Of one expert."""
        return sum(_product(weight.shape(hidden, wide)) for weight in self.weights)

    def flops(self, hidden: int, wide: int) -> int:
        """Forward, for one token in one expert: 2 for each weight in a product, equal products once."""
        matrices = {weight.name: _product(weight.shape(hidden, wide)) for weight in self.weights}
        return sum(2 * matrices[node.args[1].weight] for node in self.products())


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def walk(node: Node) -> Iterator[Node]:
    """Every part at every place it stands, arguments first."""
    for arg in node.args:
        yield from walk(arg)
    yield node


def parse_weights(text: str) -> tuple[Declared, ...]:
    """`gate:F,D bias:F` as weights. FormulaError for a name used twice or not allowed, and for sizes that are none."""
    found: list[Declared] = []
    for match in re.finditer(r"\S+", text):
        name, colon, sizes = match[0].partition(":")
        span = match.start(), match.start() + max(len(name), 1)
        if not colon or not re.fullmatch("[a-z][a-z0-9_]*", name):
            problem = f"got {match[0]!r}, expected name:sizes as in gate:F,D; write names in small letters"
            raise FormulaError("weights", problem, text, match.span(), mended_weights(text))
        if name == "x" or name in FUNCTIONS or keyword.iskeyword(name):
            taken = "the token's hidden state" if name == "x" else "a function or a word of Python"
            raise FormulaError("weights", f"{name!r} is {taken}; call the weight something else", text, span)
        if name in (weight.name for weight in found):
            raise FormulaError("weights", f"{name!r} is declared twice; declare each weight once", text, span)
        start = span[0] + len(name) + 1
        found.append(Declared(name, _sizes(sizes, text, (start, max(match.end(), start + 1))), span))
    return tuple(found)


def _sizes(words: str, text: str, span: Span) -> tuple[Size, ...]:
    matches = [re.fullmatch(r"([1-9][0-9]{0,5})?([DF]?)", word) for word in words.split(",")]
    if len(matches) > 2 or not all(match and match[0] for match in matches):
        problem = f"got sizes {words!r}, expected one or two of D (hidden), F (the expert's own), 2F, 4; write F,D"
        raise FormulaError("weights", problem, text, span, mended_weights(text))
    return tuple(Size(int(match[1] or 1), match[2]) for match in matches if match)
