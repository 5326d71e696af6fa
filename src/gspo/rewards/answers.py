"""Answers with a structure (tuples, sets, intervals, equations, matrices, ...) and when two are the same.

``read`` turns the text of an answer into a tree, ``equal`` compares a gold tree with a predicted one. Policies:

- a pair in parentheses is ordered, a set and a bare list are not, a list with an ellipsis is;
- ``(a, b)`` is a pair or an open interval, as the other side needs; an inequality is the interval it describes;
- ``x = 5`` and ``x \\in A`` answer the gold answers ``5`` and ``A``, and the other way round; two different
  variables contradict each other;
- a unit on one side only is not held against the answer, two different units are;
- percent is a fraction: 28 % = 0.28;
- a base such as ``1010_2`` must not be contradicted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo.rewards import evaluation
from gspo.rewards.expressions import Expr, UnreadableError, parse
from gspo.rewards.latex import normalise

_UNIT_ALIASES = {
    "degrees": "degree", "deg": "degree", "centimeters": "cm", "centimeter": "cm", "meters": "m", "meter": "m",
    "kilometers": "km", "kilometer": "km", "inches": "in", "inch": "in", "feet": "ft", "foot": "ft", "seconds": "s",
    "second": "s", "sec": "s", "minutes": "min", "minute": "min", "hours": "h", "hour": "h", "hr": "h", "hrs": "h",
    "grams": "g", "gram": "g", "kilograms": "kg", "kilogram": "kg", "dollars": "dollar", "liters": "l", "litres": "l",
    "millimeters": "mm", "cents": "cent", "miles": "mile", "yards": "yard", "pounds": "pound",
}  # fmt: skip
_UNIT = re.compile(r"^(.*[\d)\]}])\s*\\text\{([^{}]*)\}\s*(\^\s*\{?\d\}?)?$", re.DOTALL)
_PLAIN_UNIT = re.compile(
    r"^(-?\s*(?:\d[\d.,]*|\\frac\{\d+\}\{\d+\}|\d+\s*/\s*\d+))\s*([A-Za-z]{2,}(?:\s+[A-Za-z]+){0,3})(\^\d)?$"
)
_BASE = re.compile(r"^([0-9A-Fa-f]+)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))$")
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>=]")
_MATRIX = re.compile(r"^\\begin\{matrix\}(.*)\\end\{matrix\}$", re.DOTALL)
_WORD = re.compile(r"^\\text\{\s*\(?([A-Za-z][A-Za-z-]*)\)?\s*\}$")
_BOUND = re.compile(r",?\s*(?:\\text\{\s*(?:where|for)?\s*\}\s*)?([a-z])\s*\\in\s*\\mathbb\{?\s*(Z|N|R|Q)\s*\}?\s*$")
_OPEN_TO_CLOSE = {"(": ")", "[": "]", "\\{": "\\}"}
_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\{\w+\}|\w))?|[A-Za-z]\s*\(\s*[A-Za-z]\s*\)")
_LATEX_SET = re.compile(r"^\\mathbb\s*\{?\s*([A-Z])\s*\}?$")


@dataclass(frozen=True)
class Leaf:
    """One value."""

    expr: Expr | None  # None for a token that is compared as text
    text: str
    unit: str = ""
    base: int | None = None
    variable: str = ""


@dataclass(frozen=True)
class Group:
    """Several values: ``tuple`` (also what may be an interval), ``set``, ``list``, ``union``, ``matrix``, ``ratio``."""

    kind: str
    items: tuple[Answer, ...]
    open: str = ""
    close: str = ""
    variable: str = ""
    ordered: bool = False


@dataclass(frozen=True)
class Equation:
    """``left = right`` that is more than naming a value."""

    left: Expr
    right: Expr
    text: str
    variable: str = ""


Answer = Leaf | Group | Equation


def read(text: str) -> Answer:
    """The tree of an answer as a person wrote it.

    Raises:
        UnreadableError: the text is empty, prose, or mathematics that this reader does not know.
    """
    text = normalise(text)
    if not text:
        raise UnreadableError("empty")
    if re.fullmatch(r"n\s*/\s*a", text, re.IGNORECASE):
        raise UnreadableError(f"{text!r} is not an answer")
    return _read(text)


def _read(text: str) -> Answer:
    text = text.strip()
    bound = _BOUND.search(text)
    if bound and text[: bound.start()].strip():  # the name of a bound integer does not matter
        name = bound.group(1)
        return _read(re.sub(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])", "q_{any}", text[: bound.start()]))
    for reader in (
        _read_union,
        _read_list,
        _read_membership,
        _read_relation,
        _read_plus_minus,
        _read_bracketed,
        _read_matrix,
    ):
        answer = reader(text)
        if answer is not None:
            return answer
    return _read_leaf(text)


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """Cuts at separators outside all brackets; half-open intervals count as brackets."""
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        if text.startswith(("\\{", "\\}"), index):
            depth += 1 if text[index + 1] == "{" else -1
            index += 2
            continue
        if text.startswith("\\begin{", index) or text.startswith("\\end{", index):
            depth += 1 if text[index + 1] == "b" else -1
            index = text.find("}", index) + 1 or len(text)
            continue
        char = text[index]
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth == 0 and (match := separators.match(text, index)):
            parts.append(text[start:index])
            start = index = match.end()
            continue
        index += 1
    return [*parts, text[start:]]


def _read_union(text: str) -> Answer | None:
    parts = split_top(text, re.compile(r"\\cup(?![A-Za-z])|\\text\{\s*or\s*\}"))
    if len(parts) < 2:
        return None
    items = tuple(_read(part) for part in parts)
    names = {item.variable for item in items}
    variable = names.pop() if len(names) == 1 else next((name for name in names if name), "")
    intervals = all(isinstance(item, Group) for item in items)
    return Group("union" if intervals else "list", items, variable=variable)


def _read_list(text: str) -> Answer | None:
    parts = split_top(text, re.compile(r"[,;]|\\text\{\s*,?\s*and\s*\}"))
    parts = [part for part in parts if part.strip()]
    if len(parts) < 2:
        return None
    first = re.match(r"^\s*(\\?[A-Za-z]+(?:_\{?\w+\}?)?)\s*(?:=|\\in(?![A-Za-z]))\s*(.+)$", parts[0], re.DOTALL)
    variable = ""
    if first and not any(_RELATION.search(part) for part in parts[1:]) and not _RELATION.search(first.group(2)):
        variable, parts[0] = first.group(1), first.group(2)
    ordered = any("\\ldots" in part for part in parts)
    return Group("list", tuple(_read(part) for part in parts), variable=variable, ordered=ordered)


def _read_membership(text: str) -> Answer | None:
    match = re.match(r"^(\\?[A-Za-z]+(?:_\{?\w+\}?)?)\s*\\in(?![A-Za-z])\s*(.+)$", text, re.DOTALL)
    return replace(_read(match.group(2)), variable=match.group(1)) if match else None


def _read_relation(text: str) -> Answer | None:
    pieces = split_top(text, _RELATION)
    if len(pieces) < 2:
        return None
    relations = _top_relations(text, pieces)
    if any(not piece.strip() for piece in pieces):
        raise UnreadableError("a relation lacks a side")
    if set(relations) == {"="}:
        return _read_equation(pieces, text)
    if "\\ne" in relations or "=" in relations or len(pieces) > 3:
        return Leaf(None, _squeeze(text))
    return _read_inequality([piece.strip() for piece in pieces], relations, text)


def _top_relations(text: str, pieces: Sequence[str]) -> list[str]:
    relations, position = [], 0
    for piece in pieces[:-1]:
        position += len(piece)
        match = _RELATION.match(text, position)
        assert match is not None
        relations.append(match.group())
        position = match.end()
    return relations


def _read_equation(pieces: list[str], text: str) -> Answer:
    left, right = pieces[0].strip(), pieces[-1].strip()
    if _NAME.fullmatch(left):
        return replace(_read(right), variable=left)
    if len(pieces) > 2:
        return Leaf(None, _squeeze(text))
    return Equation(parse(left), parse(right), _squeeze(text))


def _read_inequality(pieces: list[str], relations: list[str], text: str) -> Answer:
    """An inequality in one variable as the interval it describes."""
    if len(pieces) == 3 and len({relation in ("<", "\\le") for relation in relations}) == 1:
        low, variable, high = pieces
        if relations[0] in (">", "\\ge"):
            low, high, relations = high, low, [relations[1], relations[0]]
        return _interval(low, high, "\\" in relations[0], "\\" in relations[1], variable)
    if len(pieces) != 2:
        return Leaf(None, _squeeze(text))
    left, right = pieces
    upward = relations[0] in (">", "\\ge")
    if not _is_variable(left):
        if not _is_variable(right):
            return Leaf(None, _squeeze(text))
        left, right, upward = right, left, not upward
    closed = "\\" in relations[0]
    if upward:
        return _interval(right, "\\infty", closed, False, left)
    return _interval("-\\infty", right, False, closed, left)


def _is_variable(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z]|\\[A-Za-z]+|[A-Za-z]_\{?\w+\}?", text)) and text not in (
        "e",
        "i",
        "\\pi",
        "\\infty",
    )


def _interval(low: str, high: str, low_closed: bool, high_closed: bool, variable: str) -> Group:
    items = (_read_leaf(low), _read_leaf(high))
    return Group("interval", items, "[" if low_closed else "(", "]" if high_closed else ")", variable, True)


def _read_plus_minus(text: str) -> Answer | None:
    if len(re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)) != 1:
        return None
    both = [_read(re.sub(r"\\(?:pm|mp)(?![A-Za-z])", sign, text, count=1)) for sign in ("+", "-")]
    return Group("list", tuple(both))


def _read_bracketed(text: str) -> Answer | None:
    opening = "\\{" if text.startswith("\\{") else text[:1]
    if opening not in _OPEN_TO_CLOSE:
        return None
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    inner = text[len(opening) : len(text) - len(closing)]
    if closing not in _OPEN_TO_CLOSE.values() or not _stays_inside(inner):
        return None
    parts = split_top(inner, re.compile(r"[,;]"))
    if opening == "\\{":
        if closing != "\\}" or "|" in inner or "\\colon" in inner:
            return Leaf(None, _squeeze(text))
        items = tuple(_read(part) for part in parts if part.strip())
        return Group("set", items, ordered=any("\\ldots" in p for p in parts)) if items else Leaf(None, "\\emptyset")
    if closing == "\\}" or len(parts) < 2:
        return None
    kind = "tuple" if opening + closing in ("()", "[]") else "interval"
    return Group(kind, tuple(_read(part) for part in parts), opening, closing, ordered=True)


def _stays_inside(inner: str) -> bool:
    """Whether the outer brackets belong together: the depth inside never falls below 0."""
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _read_matrix(text: str) -> Answer | None:
    match = _MATRIX.match(text)
    if not match:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match.group(1)) if row.strip()]
    items = tuple(
        Group("tuple", tuple(_read(cell) for cell in split_top(row, re.compile("&"))), "(", ")", ordered=True)
        for row in rows
    )
    return Group("matrix", items, ordered=True)


def _read_leaf(text: str) -> Answer:
    text = text.strip()
    if not text:
        raise UnreadableError("empty")
    if text == "\\emptyset" or text == "\\ldots":
        return Leaf(None, text)
    if match := _LATEX_SET.match(text):
        if match.group(1) == "R":
            return _interval("-\\infty", "\\infty", False, False, "")
        return Leaf(None, f"set {match.group(1)}")
    if word := word_of(text):
        return Leaf(None, f"word {word}")
    if match := _BASE.match(text):
        return _read_based(match, text)
    if re.fullmatch(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+", text):
        return Group("ratio", tuple(_read_leaf(part) for part in text.split(":")), ordered=True)
    value, unit = _split_unit(text)
    return Leaf(parse(value), _squeeze(value), unit=unit)


def word_of(text: str) -> str | None:
    """The word of an answer that is one word marked as text, such as ``\\text{East}``, in lower case."""
    match = _WORD.match(text.strip())
    return match.group(1).casefold() if match else None


def _read_based(match: re.Match[str], text: str) -> Leaf:
    base = int(match.group(2) or match.group(3))
    if not 2 <= base <= 36:
        raise UnreadableError(f"{base} is not a base")
    try:
        value = int(match.group(1), base)
    except ValueError:
        return Leaf(None, _squeeze(text))
    return Leaf(parse(str(value)), match.group(1).lower().lstrip("0"), base=base)


def _split_unit(text: str) -> tuple[str, str]:
    """Splits off a unit; percent becomes part of the value."""
    if text.endswith("^\\circ") and not re.search(r"\\?(?:sin|cos|tan|cot|sec|csc)", text):
        return text[: -len("^\\circ")], "degree"
    match = _UNIT.match(text) or _PLAIN_UNIT.match(text)
    if not match:
        return text, ""
    value, words = match.group(1), " ".join(match.group(2).lower().split()).strip(" .")
    if words in ("percent", "per cent", "pct"):
        return f"{value}%", ""
    if words in ("pi", "e", "sqrt"):
        return text, ""
    power = re.sub(r"\D", "", match.group(3) or "")
    words = _UNIT_ALIASES.get(words, words)
    return value, (words[:-1] if len(words) > 3 and words.endswith("s") else words) + power


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def equal(gold: Answer, prediction: Answer) -> bool:
    """Whether the prediction is the gold answer.

    Raises:
        TooLargeError: a value that would have to be compared is too large to be evaluated.
        UnreadableError: a value has a form that cannot be computed.
    """
    if gold.variable and prediction.variable and _squeeze(gold.variable) != _squeeze(prediction.variable):
        return _solved_for_another(gold) and _solved_for_another(prediction) and _equal_equations(gold, prediction)
    if isinstance(gold, Equation) or isinstance(prediction, Equation):
        return _equal_equations(gold, prediction)
    if isinstance(gold, Leaf) and isinstance(prediction, Leaf):
        return _equal_leaves(gold, prediction)
    if isinstance(gold, Group) and isinstance(prediction, Group):
        return _equal_groups(gold, prediction)
    return False


def _solved_for_another(answer: Answer) -> bool:
    """Whether it is an equation between variables, such as ``x = y + 1``, and not the value of one."""
    return isinstance(answer, Leaf) and answer.expr is not None and bool(evaluation.symbols(answer.expr))


def _equal_leaves(gold: Leaf, prediction: Leaf) -> bool:
    if gold.expr is None or prediction.expr is None:
        return gold.expr is None and prediction.expr is None and gold.text == prediction.text
    if gold.unit and prediction.unit and gold.unit != prediction.unit:
        return False
    if gold.base != prediction.base:
        if gold.base is not None and prediction.base is None:
            return gold.text == prediction.text.lstrip("0")
        if gold.base is not None:
            return False
    return evaluation.same(gold.expr, prediction.expr)


def _equal_groups(gold: Group, prediction: Group) -> bool:
    kinds = {gold.kind, prediction.kind}
    if len(kinds) == 2 and kinds not in ({"tuple", "interval"}, {"list", "set"}):
        return False
    if gold.kind == "tuple" == prediction.kind and len(gold.items) == 2 and gold.open != prediction.open:
        return False
    if "interval" in kinds and (gold.open, gold.close) != (prediction.open, prediction.close):
        return False
    if gold.ordered or prediction.ordered:
        same_length = len(gold.items) == len(prediction.items)
        return same_length and all(map(equal, gold.items, prediction.items))
    return _equal_unordered(gold.items, prediction.items)


def _equal_unordered(gold: Sequence[Answer], prediction: Sequence[Answer]) -> bool:
    """Each gold item is predicted and each predicted item is gold; equality is transitive, so this is exact."""
    if len(prediction) > 4 * len(gold) + 4:
        return False
    return all(any(equal(g, p) for p in prediction) for g in gold) and all(
        any(equal(g, p) for g in gold) for p in prediction
    )


def _equal_equations(gold: Answer, prediction: Answer) -> bool:
    left, right = _as_zero(gold), _as_zero(prediction)
    if left is None or right is None:
        return False
    if not evaluation.symbols(left):
        return isinstance(gold, Equation) and isinstance(prediction, Equation) and gold.text == prediction.text
    return evaluation.symbols(left) == evaluation.symbols(right) and evaluation.constant_ratio(left, right)


def _as_zero(answer: Answer) -> Expr | None:
    """``left - right`` of an equation or of a value with a name."""
    if isinstance(answer, Equation):
        return Expr("add", (answer.left, Expr("neg", (answer.right,))))
    if isinstance(answer, Leaf) and answer.expr is not None and answer.variable:
        try:
            return Expr("add", (parse(normalise(answer.variable)), Expr("neg", (answer.expr,))))
        except UnreadableError:
            return None
    return None
