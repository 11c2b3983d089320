"""An expert type as a formula over a token's hidden state x and named weights: `gelu(x @ up.T) @ down.T`.

A weight is declared with its sizes, `up:F,D down:D,F bias:F`: D is the hidden size, F the experts' own, and numbers and
multiples (2F, 4) are sizes too. A matrix [O, I] stands in a product `h @ w.T`; a vector goes with the entries of a row;
size 1 goes with any other. Everything else is arithmetic with numbers and FUNCTIONS, entry by entry but for softmax and
mean, which are over a row. What cannot be an expert is refused with its place in the text. No torch: see evaluator.py.
"""

import ast
import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

LONGEST, DEEPEST = 1000, 100  # characters of a formula, and parts within one another
FUNCTIONS = {  # name -> how many arguments; clamp's last two are numbers
    **dict.fromkeys(("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "softplus", "mish", "elu"), 1),
    **dict.fromkeys(("exp", "log", "sqrt", "square", "abs", "sin", "cos", "softmax", "mean"), 1),
    "maximum": 2,
    "minimum": 2,
    "clamp": 3,
}
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
Span = tuple[int, int]


class FormulaError(ValueError):
    """What cannot be an expert: the problem with its remedy, the text, and a line under it that marks the place."""

    def __init__(self, what: str, problem: str, text: str, span: Span) -> None:
        start, stop = span
        marks = " " * start + "^" + "~" * (stop - start - 1)
        super().__init__(f"{what}: {problem}\n  {text}\n  {marks}")
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
        return f"{self.name} [{', '.join(map(str, self.sizes))}]"


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
        return list(dict.fromkeys(_walk(self.root)))

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


def _walk(node: Node) -> Iterator[Node]:
    for arg in node.args:
        yield from _walk(arg)
    yield node


def parse_weights(text: str) -> tuple[Declared, ...]:
    """`gate:F,D bias:F` as weights. FormulaError for a name used twice or not allowed, and for sizes that are none."""
    found: list[Declared] = []
    for match in re.finditer(r"\S+", text):
        name, colon, sizes = match[0].partition(":")
        span = match.start(), match.start() + max(len(name), 1)
        if not colon or not re.fullmatch("[a-z][a-z0-9_]*", name):
            problem = f"got {match[0]!r}, expected name:sizes as in gate:F,D, the name in small letters"
            raise FormulaError("weights", problem, text, match.span())
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
        problem = f"got sizes {words!r}, expected one or two of D (hidden), F (the expert's own), 2F, 4, ... as in F,D"
        raise FormulaError("weights", problem, text, span)
    return tuple(Size(int(match[1] or 1), match[2]) for match in matches if match)


def parse(text: str, weights: str) -> Formula:
    """The formula that `text` is over the weights declared. FormulaError says where and why it is none."""
    text, weights = " ".join(text.split()), " ".join(weights.split())
    declared = parse_weights(weights)
    whole = 0, max(len(text), 1)
    if len(text) > LONGEST or not text.isascii():
        at = next((i for i, letter in enumerate(text) if not letter.isascii()), LONGEST)
        problem = f"expected at most {LONGEST} ASCII characters; write the formula with x, names, numbers, + - * / @"
        raise FormulaError("formula", problem, text, (at, at + 1))
    try:
        tree = ast.parse(text, mode="eval")
        if _depth(tree) > DEEPEST:
            raise RecursionError
        root = _Reader(text, {weight.name: weight for weight in declared}).read(tree.body)
    except SyntaxError as error:
        at = min(max((error.offset or 1) - 1, 0), len(text))
        raise FormulaError("formula", f"cannot be read ({error.msg}); mend it here", text, (at, at + 1)) from error
    except (RecursionError, MemoryError) as error:
        raise FormulaError("formula", "nested too deep; write fewer brackets and signs", text, whole) from error
    formula = Formula(text, declared, root)
    if root.size != D:
        problem = f"the result has {_described(root)}, expected [.., D] as x has; end with `@ w.T`, w:D,.."
        raise FormulaError("formula", problem, text, whole)
    if not root.depends:
        raise FormulaError("formula", "x is not used: every token would get the same; use x", text, whole)
    if not declared:
        raise FormulaError("formula", "no weight is in it, so it cannot learn; declare and use some", text, whole)
    used = {node.weight for node in formula.nodes()}
    for weight in declared:
        if weight.name not in used:
            problem = f"{weight.name!r} is not used in the formula; use it or leave it out"
            raise FormulaError("weights", problem, weights, weight.span)
    return formula


def _described(node: Node) -> str:
    return "no shape: it is a number" if node.size is None else f"shape [.., {node.size}]"


class _Reader:
    """Python's syntax tree into nodes, sizes checked on the way."""

    def __init__(self, text: str, weights: dict[str, Declared]) -> None:
        self.text, self.weights = text, weights

    def fail(self, at: ast.AST | Node, problem: str) -> NoReturn:
        raise FormulaError("formula", problem, self.text, at.span if isinstance(at, Node) else _span(at))

    def read(self, tree: ast.expr) -> Node:
        match tree:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self.number(tree, lambda: float(value))
            case ast.Name():
                return self.name(tree)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return self.signed(tree, sign, self.read(operand))
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                return self.matmul(tree, self.read(left), right)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
                return self.binary(tree, OPERATORS[type(operator)], self.read(left), self.read(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(tree, name, args)
            case ast.Attribute(value=ast.Name(id=name), attr="T") if name in self.weights:
                self.fail(tree, f"{name}.T stands alone; write a product, h @ {name}.T")
        self.fail(tree, "not allowed here; expected x, weights, numbers, + - * / **, h @ w.T and functions f(..)")

    def number(self, tree: ast.expr, value: Callable[[], float]) -> Node:
        try:
            found = value()
        except (ArithmeticError, ValueError):
            found = float("nan")
        if isinstance(found, complex) or not abs(found) < 1e30:
            self.fail(tree, "this number is not finite, or 1e30 and more; write an ordinary one")
        return Node("number", (), None, False, _span(tree), value=found)

    def name(self, tree: ast.Name) -> Node:
        if tree.id == "x":
            return Node("x", (), D, True, _span(tree))
        if tree.id in FUNCTIONS:
            self.fail(tree, f"{tree.id} is a function; write {tree.id}(..)")
        if tree.id not in self.weights:
            known = ", ".join(["x", *self.weights])
            self.fail(tree, f"no weight is called {tree.id!r}, expected one of {known}; declare it, as {tree.id}:F,D")
        weight = self.weights[tree.id]
        if len(weight.sizes) == 2:
            self.fail(tree, f"{weight} is a matrix; use it in a product, h @ {tree.id}.T")
        return Node("weight", (), weight.sizes[0], False, _span(tree), weight=tree.id)

    def signed(self, tree: ast.UnaryOp, sign: ast.unaryop, operand: Node) -> Node:
        if isinstance(sign, ast.UAdd):
            return operand
        if operand.size is None:
            return self.number(tree, lambda: -operand.value)
        return Node("negate", (operand,), operand.size, operand.depends, _span(tree))

    def matmul(self, tree: ast.BinOp, left: Node, right: ast.expr) -> Node:
        match right:
            case ast.Attribute(value=ast.Name(id=name), attr="T") if name in self.weights:
                weight = self.weights[name]
            case ast.Name(id=name) if name in self.weights:
                self.fail(right, f"expected {name}.T: weights are [out, in]; write @ {name}.T, and {name}:out,in")
            case _:
                self.fail(right, "the right side of @ is a weight's transpose, expected w.T of a weight w")
        if len(weight.sizes) != 2:
            self.fail(right, f"{weight} is a vector, expected a matrix; use * or + with it, or declare {name}:..,..")
        if left.size != weight.sizes[1]:
            problem = f"the left side has {_described(left)}, {weight} expects [.., {weight.sizes[1]}]"
            self.fail(tree, f"{problem}; declare {name}:{weight.sizes[0]},{left.size or 'D'} or change the left side")
        matrix = Node("weight", (), weight.sizes[0], False, _span(right), weight=name)
        return Node("@", (left, matrix), weight.sizes[0], left.depends, _span(tree))

    def binary(self, tree: ast.expr, sign: str, left: Node, right: Node) -> Node:
        if left.size is None and right.size is None:
            return self.number(tree, lambda: _calculate(sign, left.value, right.value))
        if sign == "**" and right.size is not None:
            self.fail(right, "an exponent is a number; write exp(b * log(a)) for other powers")
        return Node(sign, (left, right), self.common(tree, left, right), left.depends or right.depends, _span(tree))

    def common(self, tree: ast.expr, left: Node, right: Node) -> Size | None:
        """The size of two rows joined entry by entry; a number or a single entry goes with any."""
        sizes = [size for size in (left.size, right.size) if size not in (None, ONE)]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            self.fail(tree, f"shapes [.., {sizes[0]}] and [.., {sizes[1]}] do not fit; expected equal ones, or size 1")
        return sizes[0] if sizes else ONE

    def call(self, tree: ast.Call, name: str, args: list[ast.expr]) -> Node:
        if name not in FUNCTIONS:
            self.fail(tree.func, f"unknown function {name!r}, expected one of {', '.join(FUNCTIONS)}; use one of these")
        if len(args) != FUNCTIONS[name]:
            self.fail(tree, f"{name} got {len(args)} arguments, expected {FUNCTIONS[name]}; give it as many")
        nodes = tuple(self.read(arg) for arg in args)
        for node in nodes[1:] if name == "clamp" else ():
            if node.size is not None:
                self.fail(node, "clamp's limits are numbers: clamp(h, low, high); use minimum and maximum for others")
        if name == "clamp" and not nodes[1].value < nodes[2].value:
            self.fail(tree, f"clamp got low {nodes[1].value:g} and high {nodes[2].value:g}; give the lower limit first")
        if nodes[0].size is None and (len(nodes) != 2 or nodes[1].size is None):
            self.fail(nodes[0], f"{name} of a number is a number; write the number itself")
        size = self.common(tree, *nodes) if len(nodes) == 2 else ONE if name == "mean" else nodes[0].size
        return Node(name, nodes, size, any(node.depends for node in nodes), _span(tree))


def _depth(tree: ast.AST) -> int:
    return 1 + max((_depth(part) for part in ast.iter_child_nodes(tree)), default=0)


def _span(tree: ast.AST) -> Span:
    assert isinstance(tree, ast.expr) and tree.end_col_offset is not None
    return tree.col_offset, tree.end_col_offset


def _calculate(sign: str, left: float, right: float) -> float:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right
        case _:
            return float(left**right)
