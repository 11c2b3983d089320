"""What a wrong word in a formula was probably meant to be: other libraries' names and signs, near spellings."""

import ast
import re
from collections.abc import Iterable
from difflib import get_close_matches

NAMES = {  # elsewhere -> here
    "swish": "silu",
    "logistic": "sigmoid",
    "max": "maximum",
    "min": "minimum",
    "clip": "clamp",
    "gelu_new": "gelu_tanh",
    "gelu_approx": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "fabs": "abs",
}
RECIPES = {  # a function that is none here -> how to write it; h is its argument, where it has one
    "leaky_relu": "maximum(h, 0.01 * h)",
    "relu6": "clamp(h, 0, 6)",
    "hardtanh": "clamp(h, -1, 1)",
    "relu2": "square(relu(h))",
    "quick_gelu": "h * sigmoid(1.702 * h)",
    "selu": "1.0507 * (relu(h) + 1.67326 * (exp(minimum(h, 0)) - 1))",
    "logsigmoid": "-softplus(-h)",
    "log1p": "log(1 + h)",
    "expm1": "exp(h) - 1",
    "rsqrt": "h ** -0.5",
    "pow": "h ** 2",
    "cube": "h ** 3",
    "tan": "sin(h) / cos(h)",
    "sign": "clamp(1e6 * h, -1, 1)",
    "softsign": "h / (1 + abs(h))",
    "sinh": "(exp(h) - exp(-h)) / 2",
    "cosh": "(exp(h) + exp(-h)) / 2",
    "var": "mean(square(h - mean(h)))",
    "rmsnorm": "h * (1e-6 + mean(square(h))) ** -0.5",
    "layernorm": "(h - mean(h)) * (1e-6 + mean(square(h - mean(h)))) ** -0.5",
    "glu": "sigmoid(x @ gate.T) * (x @ up.T)",
    "swiglu": "silu(x @ gate.T) * (x @ up.T)",
    "geglu": "gelu(x @ gate.T) * (x @ up.T)",
    "linear": "x @ w.T",
    "matmul": "x @ w.T",
}
SIGNS = {
    **dict.fromkeys("·×⊙∘∗", "*"),
    **dict.fromkeys("−–—", "-"),
    **dict.fromkeys("ᵀ⊤", ".T"),
    "÷": "/",
    "²": "**2",
    "³": "**3",
    "σ": "sigmoid",
    "√": "sqrt",
    "φ": "gelu",
    "\N{NO-BREAK SPACE}": " ",
}
WEIGHT = re.compile(r"[a-z]\w*:(\d*[DF]|\d+)(,(\d*[DF]|\d+))?")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is probably meant; None if none is near."""
    small, names = name.lower(), list(known)
    same = [each for each in (NAMES.get(small, small), small.replace("_", "")) if each in names]
    return next(iter(same or get_close_matches(small, names, 1, 0.6)), None)


def recipe(name: str) -> str | None:
    """How to write a function that is none here."""
    return RECIPES.get(name.lower()) or RECIPES.get(name.lower().replace("_", ""))


def filled(text: str, argument: str) -> str:
    """A recipe with its argument, in brackets where it needs them."""
    atom = re.fullmatch(r"\w+", argument) or re.fullmatch(r"\w+\(h(, -?[\d.]+)*\)", text)
    text = re.sub(r"\bh\b", argument if atom else f"({argument})", text)
    return text if isinstance(ast.parse(text, mode="eval").body, ast.Call) else f"({text})"


def in_ascii(text: str) -> str:
    """With the signs that stand for others spelt out."""
    return "".join(SIGNS.get(letter, letter) for letter in text)


def mended_weights(text: str) -> str:
    """Declarations written with other signs, spaces or letters, as name:sizes; "" where it is not clear how."""
    text = re.sub(r"[\[\](){}\"']", "", in_ascii(text)).replace("=", ":")
    text = re.sub(r"\s*:\s*", ":", re.sub(r"[,;]\s*(?=[A-Za-z_]\w*\s*:)", " ", text))
    text = re.sub(r"(?<=[DFdf0-9])\s*[,x*]\s*(?=[DFdf0-9])", ",", text)
    words = [name.lower() + ":" + sizes.upper() for name, _, sizes in (word.partition(":") for word in text.split())]
    return " ".join(words) if all(WEIGHT.fullmatch(word) for word in words) else ""
