"""Reading one mathematical expression, written in LaTeX or plainly, into a small tree.

Nothing is evaluated here, and nothing is ever handed to Python's own evaluator. What the grammar does not know
raises ``UnreadableError``: prose is not an expression.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 2000
MAX_DEPTH = 60


class UnreadableError(ValueError):
    """The text is not an expression that this reader knows."""


@dataclass(frozen=True)
class Expr:
    """A node: ``num`` (value), ``sym``/``const`` (name), ``call`` (name, args), or an operator with args."""

    op: str
    args: tuple[Expr, ...] = ()
    value: Fraction | None = None
    name: str = ""
    text: str = ""  # a number as it was written


FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "exp",
     "sqrt", "abs", "floor", "ceil", "min", "max", "gcd", "lcm")
)  # fmt: skip
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
GREEK = frozenset(
    ("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
     "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
     "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega", "ell")
)  # fmt: skip
CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "infty": "infinity", "infinity": "infinity", "inf": "infinity"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_OPENING_ATOM = frozenset(("(", "[", "{", "\\{", "\\lfloor", "\\lceil"))
_TIMES = frozenset(("*", "\\cdot", "\\times", "\\ast"))
_OVER = frozenset(("/", "\\div", ":"))
_TOKEN = re.compile(r"\s+|(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|[A-Za-z]+|.)", re.DOTALL)


def parse(text: str) -> Expr:
    """The tree of a normalised expression (see ``latex.normalise``).

    Raises:
        UnreadableError: prose, an unknown command, unbalanced brackets, or more than the size limits.
    """
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError(f"{len(text)} characters, more than {MAX_CHARACTERS}")
    parser = _Parser(_tokens(text))
    expr = parser.sum()
    if parser.peek():
        raise UnreadableError(f"unexpected {parser.peek()!r}")
    return expr


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match.group(1)
        if token is None:
            continue
        if token.isascii() and token.isalpha():
            tokens.extend(_split_word(token))
        else:
            tokens.append(token)
    return tokens


def _split_word(word: str) -> list[str]:
    """A run of letters: a known name, or a product of at most three one-letter symbols."""
    lower = _ALIASES.get(word.lower(), word.lower())
    if lower in FUNCTIONS or lower in CONSTANTS or word in GREEK:
        return [f"\\{lower if word not in GREEK else word}"] if len(word) > 1 else [word]
    for name in ("sqrt", "sin", "cos", "tan", "log", "ln", "pi"):
        if word.endswith(name) and len(word) - len(name) == 1:  # "xsin", "kpi"
            return [word[0], f"\\{name}"]
        if name != "pi" and word.startswith(name) and len(word) - len(name) == 1:  # "sinx"
            return [f"\\{name}", word[-1]]
    if len(word) > 3:
        raise UnreadableError(f"{word!r} is a word")
    return list(word)


class _Parser:
    """Recursive descent; ``1/2x`` is read from left to right, as (1/2)x."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise UnreadableError(f"{token!r} is missing")

    def sum(self) -> Expr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError(f"nested deeper than {MAX_DEPTH}")
        terms = [self.product()]
        while self.peek() in ("+", "-"):
            sign = self.take()
            term = self.product()
            terms.append(term if sign == "+" else Expr("neg", (term,)))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Expr("add", tuple(terms))

    def product(self) -> Expr:
        left = self.signed()
        while True:
            token = self.peek()
            if token in _TIMES:
                self.take()
                left = Expr("mul", (left, self.signed()))
            elif token in _OVER:
                self.take()
                left = Expr("div", (left, self.signed()))
            elif self.starts_atom(token):
                left = self.implicit(left)
            else:
                return left

    def implicit(self, left: Expr) -> Expr:
        """A product without a sign, or a mixed number such as ``2 1/4`` or ``2\\frac{1}{4}``."""
        mixed = left.op == "num" and left.value is not None and left.value.denominator == 1
        if self.peek()[0].isdigit():
            if not (mixed and self.peek(1) == "/" and self.peek(2).isdigit()):
                raise UnreadableError("two numbers side by side")
            top = self.signed()
            self.take()
            return Expr("add", (left, Expr("div", (top, self.signed()))), name="mixed")
        right = self.power()
        if mixed and right.op == "div" and all(a.op == "num" for a in right.args):
            return Expr("add", (left, right), name="mixed")
        return Expr("mul", (left, right))

    def signed(self) -> Expr:
        if self.peek() in ("+", "-"):
            sign = self.take()
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise UnreadableError(f"nested deeper than {MAX_DEPTH}")
            inner = self.signed()
            self.depth -= 1
            return inner if sign == "+" else Expr("neg", (inner,))
        return self.power()

    def power(self) -> Expr:
        base = self.postfix(self.atom())
        if self.peek() != "^":
            return base
        self.take()
        if self._degree():
            return self.postfix(Expr("degrees", (base,)))
        return self.postfix(Expr("pow", (base, self.argument(signed=True))))

    def _degree(self) -> bool:
        if self.peek() == "\\circ":
            self.position += 1
            return True
        if [self.peek(k) for k in range(3)] == ["{", "\\circ", "}"]:
            self.position += 3
            return True
        return False

    def postfix(self, expr: Expr) -> Expr:
        while self.peek() in ("!", "%", "\\%"):
            expr = Expr("factorial" if self.take() == "!" else "percent", (expr,))
        return expr

    def argument(self, signed: bool = False) -> Expr:
        """A braced group, or the single next atom (TeX reads one digit: ``\\frac12``, ``x^23`` is x^2 3)."""
        token = self.peek()
        if token == "{":
            self.take()
            inner = self.sum()
            self.expect("}")
            return inner
        if signed and token == "-":
            self.take()
            return Expr("neg", (self.argument(),))
        if token.isdigit() and len(token) > 1 and not signed:
            self.tokens[self.position] = token[1:]
            return _number(token[0])
        return self.atom()

    def starts_atom(self, token: str) -> bool:
        if not token or token in (")", "]", "}", "\\}", "\\rfloor", "\\rceil"):
            return False
        if token == "|":
            return self.bars == 0
        if token.startswith("\\"):
            return token in _OPENING_ATOM or _known_command(token[1:])
        return token[0].isalnum() or token[0] == "." or token in _OPENING_ATOM

    def atom(self) -> Expr:
        token = self.take()
        if not token:
            raise UnreadableError("the expression ends too early")
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return _number(token)
        if token in _CLOSING and token not in ("\\{",):
            return self.bracket(token)
        if token.startswith("\\"):
            return self.command(token[1:])
        if len(token) == 1 and token.isalpha():
            return self.symbol(token)
        raise UnreadableError(f"unexpected {token!r}")

    def bracket(self, token: str) -> Expr:
        self.bars += token == "|"
        outer = self.bars
        if token != "|":
            self.bars = 0
        inner = self.sum()
        self.expect(_CLOSING[token])
        self.bars = outer - (token == "|")
        name = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}.get(token)
        return Expr("call", (inner,), name=name) if name else inner

    def symbol(self, name: str) -> Expr:
        if name in CONSTANTS:
            return Expr("const", name=CONSTANTS[name])
        if self.peek() == "_":
            self.take()
            return Expr("sym", name=f"{name}_{self.subscript()}")
        return Expr("sym", name=name)

    def subscript(self) -> str:
        if self.peek() != "{":
            return self.take().lstrip("\\")
        self.take()
        parts: list[str] = []
        while (token := self.take()) != "}":
            if not token:
                raise UnreadableError("a subscript does not end")
            parts.append(token.lstrip("\\"))
        return "".join(parts)

    def command(self, name: str) -> Expr:
        if name in ("frac", "binom"):
            args = (self.argument(), self.argument())
            return Expr("div", args) if name == "frac" else Expr("call", args, name="binom")
        if name == "sqrt":
            return self.root()
        if name in FUNCTIONS:
            return self.call(name)
        if name in CONSTANTS or name in GREEK:
            return self.symbol(name) if name in GREEK else Expr("const", name=CONSTANTS[name])
        raise UnreadableError(f"unknown command \\{name}")

    def root(self) -> Expr:
        index = _number("2")
        if self.peek() == "[":
            self.take()
            index = self.sum()
            self.expect("]")
        return Expr("call", (self.argument(), index), name="root")

    def call(self, name: str) -> Expr:
        """``\\sin^2 x``, ``\\log_{2} 8``, ``sin(x)``, ``\\sin 2x``; an argument without brackets is one product."""
        base: Expr | None = None
        exponent: Expr | None = None
        while self.peek() in ("^", "_"):
            if self.take() == "^":
                exponent = self.argument(signed=True)
            else:
                base = self.argument(signed=True)
        bracketed = self.peek() in ("(", "[", "{", "|")
        args = self.arguments() if bracketed else (self._bare_argument(),)
        if base is not None:
            if name != "log":
                raise UnreadableError(f"\\{name} with a subscript")
            args = (*args, base)
        result = Expr("call", args, name=name)
        if exponent is None:
            return result
        if exponent == Expr("neg", (_number("1"),)) and name in ("sin", "cos", "tan"):
            return Expr("call", args, name=f"arc{name}")
        return Expr("pow", (result, exponent))

    def arguments(self) -> tuple[Expr, ...]:
        if self.peek() == "|":
            return (self.atom(),)
        close = _CLOSING[self.take()]
        args = [self.sum()]
        while self.peek() == ",":
            self.take()
            args.append(self.sum())
        self.expect(close)
        return tuple(args)

    def _bare_argument(self) -> Expr:
        left = self.power()
        while self.starts_atom(self.peek()) and self.peek()[1:] not in FUNCTIONS and not self.peek()[0].isdigit():
            left = Expr("mul", (left, self.power()))
        return left


def _known_command(name: str) -> bool:
    return name in ("frac", "binom") or name in FUNCTIONS or name in CONSTANTS or name in GREEK


def _number(token: str) -> Expr:
    return Expr("num", value=Fraction(token), text=token)
