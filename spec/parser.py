"""Reads the text of a formula: Python's syntax tree into nodes, sizes checked on the way.

What cannot be an expert is refused with its place in the text and, where it is clear, with what to write instead.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from spec.formula import FUNCTIONS, ONE, D, Declared, Formula, FormulaError, Node, Size, Span, parse_weights
from spec.hints import NAMES, RECIPES, filled, nearest, recipe
from spec.text import refuse_signs, unreadable

DEEPEST = 100  # parts within one another
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}


def parse(text: str, weights: str) -> Formula:
    """The formula that `text` is over the weights declared. FormulaError says where and why it is none."""
    text, weights = " ".join(text.split()), " ".join(weights.split())
    declared = parse_weights(weights)
    refuse_signs(text)
    try:
        tree = ast.parse(text, mode="eval")
        if _depth(tree) > DEEPEST:
            raise RecursionError
        root = _Reader(text, {weight.name: weight for weight in declared}).read(tree.body)
    except SyntaxError as error:
        raise unreadable(text, error) from error
    except (RecursionError, MemoryError) as error:
        problem = "nested too deep; write fewer brackets and signs"
        raise FormulaError("formula", problem, text, (0, len(text))) from error
    formula = Formula(text, declared, root)
    _refuse_whole(formula, weights)
    return formula


def _refuse_whole(formula: Formula, weights: str) -> None:
    root, text, declared = formula.root, formula.text, {weight.name: weight for weight in formula.weights}
    whole = 0, len(text)
    if root.size != D:
        remedy = f"end with `@ w.T` and declare w:D,{root.size or 'F'}"
        raise FormulaError(
            "formula", f"the result {_sized(root, declared)}, expected [.., D] as x is; {remedy}", text, whole
        )
    if not root.depends:
        raise FormulaError("formula", "x is not used: every token would get the same; use x", text, whole)
    if not formula.weights:
        raise FormulaError("formula", "no weight is in it, so it cannot learn; declare and use some", text, whole)
    used = {node.weight for node in formula.nodes()}
    for weight in formula.weights:
        if weight.name not in used:
            problem = f"{weight.name!r} is not used in the formula; use it or leave it out"
            raise FormulaError("weights", problem, weights, weight.span)


def _sized(node: Node, weights: Mapping[str, Declared]) -> str:
    """Its size, and the weight that gives it as it is declared."""
    if node.size is None:
        return "is a number"
    weight = weights.get(_origin(node))
    return f"is [.., {node.size}]" + (f" by {weight}" if weight else "")


def _origin(node: Node) -> str:
    """The name of the weight that gives a row its size; "" where x does."""
    if node.weight or node.name == "@":
        return node.weight or node.args[1].weight
    return next((name for arg in node.args if arg.size == node.size and (name := _origin(arg))), "")


def _dotted(tree: ast.expr) -> list[str]:
    """The names of np.linalg.norm, of w.t() and of w[0]; empty for what else there is."""
    match tree:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*names, name] if (names := _dotted(value)) else []
        case ast.Call(func=ast.Attribute() as value) | ast.Subscript(value=value):
            return _dotted(value)
    return []


class _Reader:
    """One method for each kind of part."""

    def __init__(self, text: str, weights: dict[str, Declared]) -> None:
        self.text, self.weights = text, weights

    def fail(self, at: ast.AST | Node, problem: str, instead: str | None = None) -> NoReturn:
        """instead: what to write in place of `at`."""
        start, stop = span = at.span if isinstance(at, Node) else _span(at)
        whole = "" if instead is None else self.text[:start] + instead + self.text[stop:]
        raise FormulaError("formula", problem, self.text, span, whole)

    def source(self, at: ast.AST | Node) -> str:
        start, stop = at.span if isinstance(at, Node) else _span(at)
        return self.text[start:stop]

    def read(self, tree: ast.expr) -> Node:
        match tree:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self.number(tree, lambda: float(value))
            case ast.Name():
                return self.name(tree)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return self.signed(tree, sign, self.read(operand))
            case ast.BinOp(op=ast.MatMult()):
                return self.matmul(tree)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
                self.refuse_matrix(tree)
                return self.binary(tree, OPERATORS[type(operator)], self.read(left), self.read(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return self.call(tree, name, args)
            case ast.Call(func=ast.Attribute() as function):
                self.refuse_method(tree, function)
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
            self.unknown(tree, tree.id, f"{tree.id}:F", "")
        weight = self.weights[tree.id]
        if len(weight.sizes) == 2:
            self.fail(tree, f"{tree.id} is a matrix, declared {weight}; use it in a product, h @ {tree.id}.T")
        return Node("weight", (), weight.sizes[0], False, _span(tree), weight=tree.id)

    def unknown(self, tree: ast.expr, name: str, declared: str, suffix: str) -> NoReturn:
        near = nearest(name, ["x", *self.weights] if not suffix else self.weights)
        known = ", ".join(["x", *self.weights])
        instead = near + suffix if near else None
        remedy = f"write {instead}" if instead else f"declare it, as {declared}"
        self.fail(tree, f"no weight is called {name!r}, expected one of {known}; {remedy}", instead)

    def signed(self, tree: ast.UnaryOp, sign: ast.unaryop, operand: Node) -> Node:
        if isinstance(sign, ast.UAdd):
            return operand
        if operand.size is None:
            return self.number(tree, lambda: -operand.value)
        return Node("negate", (operand,), operand.size, operand.depends, _span(tree))

    def is_matrix(self, tree: ast.expr) -> bool:
        """Is it a matrix of the weights, transposed or not."""
        names = _dotted(tree)
        return names[1:] in ([], ["T"]) and len(names) > 0 and self.shape(names[0]) == 2

    def shape(self, name: str) -> int:
        return len(self.weights[name].sizes) if name in self.weights else 0

    def refuse_matrix(self, tree: ast.BinOp) -> None:
        """h * w.T for h @ w.T."""
        if isinstance(tree.op, ast.Mult) and self.is_matrix(tree.right):
            name, left = _dotted(tree.right)[0], self.text[tree.col_offset : tree.right.col_offset]
            problem = (
                f"* goes entry by entry, and {name} is a matrix, declared {self.weights[name]}; write h @ {name}.T"
            )
            self.fail(tree, problem, f"{left[: left.rindex('*')]}@ {name}.T")

    def matmul(self, tree: ast.BinOp) -> Node:
        if self.is_matrix(tree.left) and not self.is_matrix(tree.right):
            name, right = _dotted(tree.left)[0], self.source(tree.right)
            rows = f"({right})" if isinstance(tree.right, ast.BinOp) else right
            problem = f"{name} stands left of @, expected a row there, as x; write h @ {name}.T, with {name}:out,in"
            self.fail(tree, problem, f"{rows} @ {name}.T")
        left, weight = self.read(tree.left), self.transposed(tree.right)
        if left.size != weight.sizes[1]:
            self.misfit(tree, left, weight)
        matrix = Node("weight", (), weight.sizes[0], False, _span(tree.right), weight=weight.name)
        return Node("@", (left, matrix), weight.sizes[0], left.depends, _span(tree))

    def transposed(self, right: ast.expr) -> Declared:
        """The matrix w of w.T, the right side of a product."""
        names = _dotted(right)
        found = [name for name in names if name in self.weights]
        if names == [*found, "T"] and isinstance(right, ast.Attribute):
            if self.shape(found[0]) == 2:
                return self.weights[found[0]]
            said = f"{found[0]} is a vector, declared {self.weights[found[0]]}, expected a matrix"
            self.fail(right, f"{said}; use * or + with it, or declare {found[0]}:..,..")
        if len(found) == 1:
            name = found[0]
            problem = f"got {self.source(right)}, expected {name}.T; write @ {name}.T, with {name}:out,in"
            self.fail(right, problem, f"{name}.T")
        if names in ([*names[:1]], [*names[:1], "T"]) and names:
            self.unknown(right, names[0], f"{names[0]}:F,D", ".T")
        self.fail(right, "the right side of @ is a weight's transpose, expected w.T of a weight w; write h @ w.T")

    def misfit(self, tree: ast.BinOp, left: Node, weight: Declared) -> NoReturn:
        """Of a product."""
        out, inner = weight.sizes
        said = f"{self.quoted(left)} {_sized(left, self.weights)}, but {weight.name}.T takes [.., {inner}] by {weight}"
        remedy = f"declare {weight.name}:{out},{left.size or D} or change the left side"
        if left.size == out:
            remedy = f"sizes are out,in: declare {weight.name}:{inner},{out}"
        self.fail(tree, f"sizes do not fit: {said}; {remedy}")

    def quoted(self, node: Node) -> str:
        text = self.source(node)
        return f"`{text if len(text) <= 60 else text[:28] + ' .. ' + text[-28:]}`"

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
            said = [f"{self.quoted(node)} {_sized(node, self.weights)}" for node in (left, right)]
            vectors = [(one.weight, other.size) for one, other in ((left, right), (right, left)) if one.weight]
            remedy = f"declare {vectors[0][0]}:{vectors[0][1]}" if vectors else "declare weights alike"
            self.fail(tree, f"sizes do not fit: {said[0]}, but {said[1]}, expected equal sizes or size 1; {remedy}")
        return sizes[0] if sizes else ONE

    def call(self, tree: ast.Call, name: str, args: list[ast.expr]) -> Node:
        if name not in FUNCTIONS:
            self.unknown_function(tree, name, args)
        if tree.keywords:
            got, positional = tree.keywords[0].arg, ", ".join(map(self.source, args))
            self.fail(tree, f"got {got}=.., expected no keywords; write {name}(..) alone", f"{name}({positional})")
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

    def unknown_function(self, tree: ast.Call, name: str, args: list[ast.expr]) -> NoReturn:
        if text := recipe(name):
            whole = filled(text, self.source(args[0])) if len(args) == 1 and re.search(r"\bh\b", text) else None
            self.fail(tree, f"unknown function {name!r}, expected it in terms of others; write {text}", whole)
        if near := nearest(name, FUNCTIONS):
            self.fail(tree.func, f"unknown function {name!r}, expected a known one, as {near}; write {near}", near)
        self.fail(tree.func, f"unknown function {name!r}, expected one of {', '.join(FUNCTIONS)}; use one of these")

    def refuse_method(self, tree: ast.Call, function: ast.Attribute) -> None:
        """np.tanh(h) and h.tanh() for tanh(h)."""
        name, names = NAMES.get(function.attr, function.attr), _dotted(function)
        if name not in FUNCTIONS and name not in RECIPES:
            return
        bare = bool(names) and names[0] not in ("x", *self.weights)
        args = [self.source(arg) for arg in (*([] if bare else [function.value]), *tree.args)]
        got = self.source(function) if bare else f"the method .{function.attr}"
        self.fail(tree, f"got {got}, expected a function by its name; write {name}(..)", f"{name}({', '.join(args)})")


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
