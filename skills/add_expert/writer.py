"""A formula as a module of pithtrain/layers/experts: plain torch between grouped products, fused where that is simple.

Products take and give the precision's dtype, everything between them is in fp32. Products that read the same rows are
one fused product, when their outputs are equally wide; silu(gate) * up is then the fused operator.
"""

from dataclasses import dataclass, replace
from textwrap import wrap

from spec.formula import Declared, Formula, Node, Size

WIDTH = 120
RESERVED = {"x", "self", "groups", "compute", "shapes", "torch", "wide", "swiglu", "grouped_linear", "grouped_vector"}
METHODS = {
    **{name: f"F.{name}({{}})" for name in ("silu", "gelu", "softplus", "mish", "elu")},
    **{name: f"torch.{name}({{}})" for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "square", "abs")},
    "sin": "torch.sin({})",
    "cos": "torch.cos({})",
    "gelu_tanh": 'F.gelu({}, approximate="tanh")',
    "softmax": "torch.softmax({}, -1)",
    "mean": "torch.mean({}, -1, keepdim=True)",
    "detach": "torch.detach({})",
}
LIBRARIES = {"torch.": "import torch", "F.": "import torch.nn.functional as F"}
OURS = {f"{word}(": f"from pithtrain.ops.{word} import {word}" for word in ("swiglu", "wide")}
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3, "**": 4}  # of operators; everything else is an atom
ATOM = 5


@dataclass(frozen=True)
class Field:
    """A weight of the class: the formula's weights one below another, mostly one."""

    name: str
    parts: tuple[Declared, ...]

    @property
    def sizes(self) -> tuple[str, ...]:
        first = self.parts[0].sizes
        return (str(replace(first[0], count=len(self.parts) * first[0].count)), *map(str, first[1:]))


def fields_of(formula: Formula) -> tuple[Field, ...]:
    """The formula's weights in order, those of products that read the same rows fused at the first one's place."""
    fused: dict[str, tuple[Declared, ...]] = {}
    declared = {weight.name: weight for weight in formula.weights}
    by_rows: dict[Node, list[Declared]] = {}
    names = [node.args[1].weight for node in formula.products()]
    for node in formula.products():
        if names.count(weight := node.args[1].weight) == 1:
            by_rows.setdefault(node.args[0], []).append(declared[weight])
    for weights in by_rows.values():
        same = tuple(weight for weight in weights if weight.sizes[0] == weights[0].sizes[0])
        if len(same) > 1 and "_".join(weight.name for weight in same) not in declared:
            fused |= {weight.name: _gate_first(formula, same) for weight in same}
    fields = [fused.get(weight.name, (weight,)) for weight in formula.weights]
    return tuple(Field("_".join(part.name for part in parts), parts) for parts in dict.fromkeys(fields))


def _gate_first(formula: Formula, parts: tuple[Declared, ...]) -> tuple[Declared, ...]:
    """The order that the fused operator wants, where it fits."""
    gates = {gate for node in formula.nodes() if (gate := _swiglu_gate(node))}
    return tuple(sorted(parts, key=lambda part: part.name not in gates)) if len(parts) == 2 else parts


def _swiglu_gate(node: Node) -> str | None:
    """The gate's weight where `node` is silu(h @ gate.T) * (h @ up.T), in either order."""
    for left, right in (node.args, node.args[::-1]) if node.name == "*" else ():
        if left.name == "silu" and left.args[0].name == right.name == "@" and left.args[0].args[0] == right.args[0]:
            return left.args[0].args[1].weight
    return None


class Writer:
    """The statements of __call__ for `root`, with the fields that the formula's weights lie in."""

    def __init__(self, fields: tuple[Field, ...], root: Node) -> None:
        self.fields, self.root = fields, root
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}  # what is in a variable already, in fp32
        self.taken = {part.name for field in fields for part in field.parts} | RESERVED
        self.uses: dict[Node, int] = {}
        for node in dict.fromkeys(_parts(root)):
            for arg in node.args:
                self.uses[arg] = self.uses.get(arg, 0) + 1

    def write(self) -> list[str]:
        self.lines.append(f"return {self.narrow(self.root)}")
        return self.lines

    def fresh(self, name: str) -> str:
        names = [name, *(f"{name}_{number}" for number in range(2, 100))]
        found = next(each for each in names if each not in self.taken)
        self.taken.add(found)
        return found

    def assign(self, node: Node, name: str, text: str) -> str:
        self.lines.append(f"{name} = {text}")
        self.names[node] = name
        return name

    def narrow(self, node: Node) -> str:
        """In the dtype of x: what products take and the layer gives."""
        if node.name == "x":
            return "x"
        if node.name == "@" and node not in self.names and self.field(node).parts[1:] == () and self.uses_once(node):
            return self.product(node)
        if self.is_fused_swiglu(node):
            return f"swiglu({self.fused(node.args[0])})"
        text = self.wide(node)
        if node in self.names or node.name in METHODS:
            return f"{text}.to(x.dtype)"
        name = self.fresh("output" if node is self.root else "hidden")
        return f"{self.assign(node, name, text)}.to(x.dtype)"

    def uses_once(self, node: Node) -> bool:
        return self.uses.get(node, 0) <= 1

    def field(self, product: Node) -> Field:
        name = product.args[1].weight
        return next(field for field in self.fields if name in (part.name for part in field.parts))

    def product(self, node: Node) -> str:
        rows, field = self.narrow(node.args[0]), self.field(node)
        return f"grouped_linear({rows}, self.{field.name}, groups, compute)"

    def is_fused_swiglu(self, node: Node) -> bool:
        gate = _swiglu_gate(node)
        products = [arg for side in node.args for arg in (side, *side.args) if arg.name == "@"] if gate else []
        return bool(
            gate
            and all(self.uses_once(part) for part in (*products, *node.args))
            and [part.name for part in self.field(products[0]).parts] == self.in_order(gate, products)
        )

    @staticmethod
    def in_order(gate: str, products: list[Node]) -> list[str]:
        return sorted((part.args[1].weight for part in products), key=lambda name: name != gate)

    def fused(self, side: Node) -> str:
        return self.product(side if side.name == "@" else side.args[0])

    def wide(self, node: Node) -> str:
        """In fp32, as an expression or the name of a variable."""
        if node in self.names:
            return self.names[node]
        text = self.expression(node)
        if node in self.names or node.name == "number" or self.uses.get(node, 0) <= 1:
            return text
        return self.assign(node, self.fresh("wide_x" if node.name == "x" else "part"), text)

    def expression(self, node: Node) -> str:
        match node.name:
            case "x":
                return "wide(x)"
            case "number":
                return _number(node.value)
            case "weight":
                return self.assign(node, node.weight, f"grouped_vector(self.{node.weight}, groups, compute)")
            case "@":
                return self.wide_product(node)
            case "clamp":
                low, high = (_number(arg.value) for arg in node.args[1:])
                return f"torch.clamp({self.wide(node.args[0])}, {low}, {high})"
            case "minimum" | "maximum":
                return self.bounded(node)
        if self.is_fused_swiglu(node):
            return f"wide(swiglu({self.fused(node.args[0])}))"
        if node.name in BINDING:
            return self.operation(node)
        return METHODS[node.name].format(self.wide(node.args[0]))

    def wide_product(self, node: Node) -> str:
        """Assigned to a variable with the weight's name, together with what is fused with it."""
        field = self.field(node)
        text = f"wide({self.product(node)})"
        if len(field.parts) == 1:
            name = node.args[1].weight
            return self.assign(node, name if self.is_new(name) else self.fresh(name), text)
        for part in field.parts:
            other = replace(node, args=(node.args[0], replace(node.args[1], weight=part.name)))
            self.names[other] = part.name
        names = ", ".join(part.name for part in field.parts)
        self.lines.append(f"{names} = {text}.chunk({len(field.parts)}, dim=-1)")
        return self.names[node]

    def is_new(self, name: str) -> bool:
        return name not in self.names.values()

    def bounded(self, node: Node) -> str:
        side = "max" if node.name == "minimum" else "min"
        for row, number in (node.args, node.args[::-1]):
            if number.size is None:
                return f"torch.clamp({self.wide(row)}, {side}={_number(number.value)})"
        return f"torch.{node.name}({self.wide(node.args[0])}, {self.wide(node.args[1])})"

    def operation(self, node: Node) -> str:
        binding = BINDING[node.name]
        if node.name == "negate":
            return f"-{self.operand(node.args[0], binding)}"
        left = self.operand(node.args[0], binding + (node.name == "**"))
        right = self.operand(node.args[1], binding + (node.name != "**"))
        return f"{left} {node.name} {right}"

    def operand(self, node: Node, least: int) -> str:
        text = self.wide(node)
        binds = ATOM if node in self.names or self.is_fused_swiglu(node) else BINDING.get(node.name, ATOM)
        return text if binds >= least else f"({text})"


def _parts(node: Node) -> list[Node]:
    return [part for arg in node.args for part in _parts(arg)] + [node]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_")) + "Experts"


def _needs(code: str, names: dict[str, str]) -> list[str]:
    return [statement for use, statement in names.items() if use in code]


def module(name: str, formula: Formula, root: Node | None = None) -> str:
    """The text of the module, not formatted yet. root: another one than the formula's, for a bug.

    A bug leaves the imports as they are, and what it needs besides is imported where it is: it is a few lines, then.
    """
    fields = fields_of(formula)
    code, bug = ("\n".join(Writer(fields, node).write()) for node in (formula.root, root or formula.root))
    late = [line for line in _needs(bug, LIBRARIES | OURS) if line not in _needs(code, LIBRARIES | OURS)]
    linear = [word for word in ("grouped_linear", "grouped_vector") if word + "(" in code]
    return "\n".join(
        [
            f'"""{_docstring(formula)}"""',
            "",
            "from dataclasses import dataclass",
            "",
            *_needs(code, LIBRARIES),
            "from torch import Tensor",
            "",
            "from pithtrain.layers.experts.base import Experts, Shapes",
            f"from pithtrain.ops.linear import {', '.join(['Compute', 'Groups', *linear])}",
            "from pithtrain.ops.parameter import Weight",
            *_needs(code, OURS),
            "",
            "",
            "@dataclass(frozen=True, eq=False)",
            f"class {class_name(name)}(Experts):",
            *_indented(4, f'"""{_legend(fields)}"""', "", *(f"{field.name}: Weight" for field in fields)),
            "",
            *_indented(4, "@staticmethod", "def shapes(hidden: int, wide: int) -> Shapes:"),
            *_indented(8, "return {", *(_shapes(field) for field in fields), "}"),
            "",
            *_indented(4, "def __call__(self, x: Tensor, groups: Groups, compute: Compute) -> Tensor:"),
            *_indented(8, *late, *bug.split("\n")),
            "",
        ]
    )


def _indented(spaces: int, *lines: str) -> list[str]:
    return [" " * spaces + line if line else "" for line in lines]


def _docstring(formula: Formula) -> str:
    first = f"Experts {formula.text}."
    return (
        first if len(first) <= WIDTH - 6 else "\n".join(["Experts of a long formula:", "", *_wrapped(formula.text), ""])
    )


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False)


def _legend(fields: tuple[Field, ...]) -> str:
    said = [f"{field.name}: [L, {', '.join(field.sizes)}]{_order(field)}." for field in fields]
    lines = wrap(" ".join(said), WIDTH - 8, subsequent_indent="    ")
    return "\n".join(lines) + ("\n    " if len(lines) > 1 else "")


def _order(field: Field) -> str:
    return f", {', then '.join(part.name for part in field.parts)}" if len(field.parts) > 1 else ""


def _shapes(field: Field) -> str:
    parts = ", ".join(f'"{part.name}": ({_tuple(part.sizes)})' for part in field.parts)
    return f'    "{field.name}": {{{parts}}},'


def _tuple(sizes: tuple[Size, ...]) -> str:
    words = []
    for size in sizes:
        letter = {"D": "hidden", "F": "wide", "": ""}[size.letter]
        words.append(f"{size.count} * {letter}" if letter and size.count > 1 else letter or str(size.count))
    return ", ".join(words) + ("," if len(words) == 1 else "")
