"""Which part of a response is its answer.

Policy, in this order:

1. Only what follows the last closed think block counts; a block that is still open at the end leaves nothing.
   A closing tag without an opening one closes the block that the chat template opened in the prompt.
2. The last balanced ``\\boxed{...}`` is the answer, also when it is empty.
3. Else the last line marked ``#### answer``.
4. Else what follows the last "answer is" or "answer:".
5. Else the formula or number that is stated last.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKED = re.compile(r"####")
_STATED = re.compile(r"\banswers?\b[*_]*(?:\s+(?:is|are|equals)\b\s*:?|\s*[:=])[*_]*", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$(.{1,2000}?)\$\$|\$([^$\n]{1,2000}?)\$|\\\((.{1,2000}?)\\\)|\\\[(.{1,2000}?)\\\]", re.DOTALL
)
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(rf"(?<![\w.)\]}}])[-+−–]?\$?{_UNSIGNED}(?:\s*/\s*\d+(?!\d|\.\d))?(?:\s*\\?%)?")
_LAST_NUMBER = re.compile(rf"(?:(?<![\w.)\]}}])[-+−–])?(?<![\d.]){_UNSIGNED}")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")


def visible_text(response: str) -> str | None:
    """The text after the last closed think block; None while a block is open."""
    close = response.rfind("</think>")
    if response.rfind("<think>") > close:
        return None
    return response if close < 0 else response[close + len("</think>") :]


def brace_pairs(text: str) -> dict[int, int]:
    """Index of each opening brace that closes -> index of its closing brace; escaped braces do not count."""
    pairs: dict[int, int] = {}
    stack: list[int] = []
    index = 0
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 1
        elif char == "{":
            stack.append(index)
        elif char == "}" and stack:
            pairs[stack.pop()] = index
        index += 1
    return pairs


def last_boxed(text: str) -> str | None:
    """Content of the balanced box that starts last (of nested boxes the innermost); None without a box."""
    starts = [match.end() - 1 for match in _BOX.finditer(text)]
    if not starts:
        return None
    pairs = brace_pairs(text)
    closed = [start for start in starts if start in pairs]
    return text[closed[-1] + 1 : pairs[closed[-1]]] if closed else None


def final_answer(response: str) -> str | None:
    """The answer that a response states, by the policy above; None if it states none."""
    text = visible_text(response)
    if text is None:
        return None
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for pattern in (_MARKED, _STATED):
        ends = [match.end() for match in pattern.finditer(text) if text[match.end() :].strip()]
        if ends:
            return _first_statement(text[ends[-1] :].lstrip().split("\n", 1)[0])
    return _last_statement(text)


def _first_statement(line: str) -> str:
    """One marked line, cut to what it states: its formula, or its text up to the end of the sentence."""
    line = line.strip().strip("*_ ")
    formula = _FORMULA.search(line)
    if formula:
        return _content(formula)
    end = _SENTENCE_END.search(line)
    line = line[: end.start()] if end else line
    words = line.split()
    if sum(word.isalpha() and len(word) > 1 for word in words) > 1:  # prose around a number
        numbers = list(_NUMBER.finditer(line))
        if numbers:
            return numbers[0].group().strip()
    return line.strip()


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _last_statement(text: str) -> str | None:
    formulas = list(_FORMULA.finditer(text))
    rest_from = formulas[-1].end() if formulas else 0
    numbers = list(_NUMBER.finditer(text, rest_from))
    if numbers:
        return numbers[-1].group().strip()
    if formulas:
        return _content(formulas[-1])
    return _bare_formula(text)


def _bare_formula(text: str) -> str | None:
    """A last line that is nothing but a formula without dollar signs, such as ``\\frac{1}{2}`` or ``x``."""
    lines = [line.strip().rstrip(".") for line in text.splitlines() if line.strip()]
    if lines and (re.search(r"\\[a-zA-Z]+", lines[-1]) or len(lines[-1]) == 1):
        return lines[-1]
    return None


def last_number(text: str) -> str | None:
    """The number that a text states last, sign included, thousands separators left in.

    >>> last_number("from 3 to 1,000.50 EUR")
    '1,000.50'
    """
    found = _LAST_NUMBER.findall(text)
    return found[-1] if found else None
