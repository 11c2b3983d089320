"""What can be said of a formula's text before it is a tree: nothing there, signs that are none here, brackets."""

import re

from spec.formula import FormulaError
from spec.hints import in_ascii

LONGEST = 1000  # characters
EXAMPLE = "silu(x @ up.T) @ down.T"
AROUND = re.compile(r"(return |lambda \w+ ?: ?|\w+ ?=(?!=) ?)+")  # Python around a formula
NO_SIGN = re.compile(r"(?<=[\w)] )(?=\w)")


def refuse_signs(text: str) -> None:
    """What can be seen before reading: no text, too long a one, and signs that are none here."""
    if not text:
        raise FormulaError("formula", f"empty; write what an expert makes of x, as {EXAMPLE}", text, (0, 1))
    if len(text) > LONGEST or not text.isascii():
        at = next((i for i, letter in enumerate(text) if not letter.isascii()), LONGEST)
        problem = f"expected at most {LONGEST} ASCII characters; write the formula with x, names, numbers, + - * / @"
        raise FormulaError("formula", problem, text, (at, at + 1), in_ascii(text) if in_ascii(text).isascii() else "")
    if (at := text.find("^")) >= 0:
        problem = "got ^, expected ** for a power; write h ** 2"
        raise FormulaError("formula", problem, text, (at, at + 1), re.sub(r" ?\^ ?", " ** ", text))
    if around := AROUND.match(text):
        problem = f"got {around[0].strip()!r}, expected the formula alone; leave it out"
        raise FormulaError("formula", problem, text, around.span(), text[around.end() :])


def unreadable(text: str, error: SyntaxError) -> FormulaError:
    """What Python's parser did not understand, in words of formulas."""
    at = min(max((error.offset or 1) - 1, 0), len(text))
    expected = "expected x, names, numbers and brackets, and one of + - * / ** @ between two of them"
    if "never closed" in error.msg:
        problem = "this bracket is never closed, expected a ) for each (; close it where its part ends"
    elif "unmatched" in error.msg:
        problem = "no bracket is open that this one could close, expected a ( for each ); open one or leave this out"
    elif gap := NO_SIGN.search(text, at):
        at, problem = gap.start(), f"no sign stands before this, {expected}; write one, as * or @"
    else:
        problem = f"cannot be read ({error.msg}), {expected}; mend it here"
    return FormulaError("formula", problem, text, (at, at + 1))
