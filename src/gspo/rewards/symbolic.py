"""The last rung of the ``math`` verifier: math-verify's LaTeX parser and sympy, behind a size check.

Text reaches the parser only if it is LaTeX of bounded size without towers of powers or large factorials. It is
never given to ``sympify`` or ``eval``. Values are compared by sympy's exact simplification or by many digits.
"""

from __future__ import annotations

import re
from typing import Any

MAX_CHARACTERS = 300
MAX_LITERAL = 1_000_000  # largest integer that may stand near a power or factorial
_LITERAL = re.compile(r"\d+")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_KNOWN = re.compile(r"\\(?:int|sum|prod|lim|log|partial|infty|pi|binom|frac|sqrt|begin|mathbb)(?![a-z])")


def size_problem(text: str) -> str:
    """Why a text may not be given to the parser; empty if it may."""
    if len(text) > MAX_CHARACTERS:
        return f"{len(text)} characters, more than {MAX_CHARACTERS}"
    grows = "^" in text or "!" in text or "binom" in text or "prod" in text
    if grows and any(len(digits) > 4 for digits in _LITERAL.findall(text)):
        return "a large literal next to a power, factorial, product or binomial coefficient"
    if re.search(r"\^[^+\-*=,]*\^[^+\-*=,]*\^", text):
        return "a tower of powers"
    if "!" in text and any(int(digits) > 500 for digits in _LITERAL.findall(text)):
        return "a large factorial"
    return ""


def readable(text: str) -> bool:
    """Whether the text is LaTeX that the parser turns into an expression."""
    return _parse(text) is not None


def compare(gold: str, answer: str) -> tuple[bool, str]:
    """(equal, reason); what cannot be parsed or shown equal is not equal."""
    problem = size_problem(answer)
    if problem:
        return False, f"the answer was not evaluated: {problem}"
    left, right = _parse(gold), _parse(answer, plain=True)
    if left is None or right is None:
        return False, "the answer cannot be read"
    return _same(left, right), f"{answer[:80]!r} against {gold[:80]!r} by sympy"


def _parse(text: str, plain: bool = False) -> Any | None:
    """A sympy object; None for prose, for what is too large and, unless ``plain``, for text without a LaTeX command."""
    if not (plain or _KNOWN.search(text)) or _WORDS.search(re.sub(r"\\(?:begin|end|mathbb|text)\{[^}]*\}", "", text)):
        return None
    if size_problem(text):
        return None
    try:
        from latex2sympy2_extended import latex2sympy
    except ImportError:
        return None
    try:
        return latex2sympy(text.strip().strip("$"))
    except MemoryError:
        raise
    except Exception:  # the generated parser raises bare Exceptions; all mean: not readable
        return None


def _same(left: Any, right: Any) -> bool:
    import sympy

    if left == right:
        return True
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    try:
        difference = sympy.simplify((left - right).doit())
        return bool(difference == 0 or difference.is_zero)
    except (TypeError, ValueError, NotImplementedError, AttributeError, RecursionError, ArithmeticError):
        return False


def preload() -> None:
    """Imports sympy and the parser, and parses once (the parser builds its tables on first use)."""
    _parse(r"\frac{1}{2}")
