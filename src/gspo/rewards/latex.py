"""One spelling for the many ways to write the same answer; text in, text out."""

from __future__ import annotations

import re

from gspo.rewards.extraction import brace_pairs

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ", "∪": r"\cup ", "∅": r"\emptyset ", "±": r"\pm ",
        "°": r"^\circ ", "√": r"\sqrt ", "∣": "|", "′": "'", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "％": "%",
        "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "θ": r"\theta ", "…": r"\ldots ", "²": "^2 ", "³": "^3 ",
        "½": r"\frac{1}{2}",
    }
)  # fmt: skip
_RENAMED = (
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset"),
    (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le"),
    (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge"),
    (r"\\neq(?![A-Za-z])", r"\\ne"),
    (r"\\(?:dots|cdots|dotsc)(?![A-Za-z])", r"\\ldots"),
    (r"(?<=[,\s])\.\.\.+", r"\\ldots"),
    (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\*\*", "^"),
    (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
    (r"\\degree(?![A-Za-z])", r"^\\circ "),
    (r"\\(?:infin|infinity)(?![A-Za-z])", r"\\infty"),
    (r"\+\s*\\infty", r"\\infty"),
)
_RENAMED_COMPILED = tuple((re.compile(pattern), new) for pattern, new in _RENAMED)
_DROPPED = re.compile(
    r"\\(?:left|right|middle|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|displaystyle|textstyle|limits|quad|qquad)"
    r"(?![A-Za-z])|\\(?:hspace|phantom)\{[^}]*\}|\\[;:>]|\\\$|\$"
)
_THIN = re.compile(r"(?<=\d)(?:\\[,!]|\{,\}|,\\!|~|\\ )(?=\d{3}(?!\d))")
_WRAPPED = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|operatorname\*?|textbf|textit|textrm|text|mbox|boldsymbol|bf|rm)\s*\{"
)
_PLAIN_JUNCTION = re.compile(r"(?<=[\w)}\],])\s+(or|and)\s+(?=[\w({\[\\-])")
_SINGLE = re.compile(r"\(?[A-Za-z]\)?|\d[\d.,]*|[A-Za-z]_\d")
_OPENS, _CLOSES = re.compile(r"[(\[]|\\\{"), re.compile(r"[)\]]|\\\}")
_UNIT_LETTER = re.compile(r"[msghlLAVNJWKTF]")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d])")


def normalise(text: str) -> str:
    """The one spelling. ``\\text{...}`` with words stays, around a number or letter it goes.

    >>> normalise(r"\\left( 1\\,000, \\dfrac{1}{2} \\right)")
    '( 1000, \\\\frac{1}{2} )'
    """
    text = text.translate(_CHARACTERS)
    text = re.sub(r"\\begin\{([bpvBV]?)matrix\}", r"\\begin{matrix}", text)
    text = re.sub(r"\\end\{([bpvBV]?)matrix\}", r"\\end{matrix}", text)
    text = _THIN.sub("", text)
    text = _DROPPED.sub(" ", text)
    text = re.sub(r"\\[,!]|~|\\ (?=.)", " ", text)
    for pattern, new in _RENAMED_COMPILED:
        text = pattern.sub(new, text)
    text = _PLAIN_JUNCTION.sub(r" \\text{\1} ", text)
    text = re.sub(r"\s+", " ", _unwrap(text)).strip()
    text = re.sub(r"(?<=[\w}\)\]])\s*[.。]$", "", text)
    return _join_groups(text)


def _unwrap(text: str) -> str:
    """Font commands around one letter, a number or a known name go; around words they become ``\\text``."""
    pairs = brace_pairs(text)
    out, position = [], 0
    while match := _WRAPPED.search(text, position):
        end = pairs.get(match.end() - 1, -1)
        if end < 0:
            break
        inner = text[match.end() : end].strip()
        out.append(text[position : match.start()])
        if _is_unit(match.group(), inner, text[: match.start()]):
            out.append(rf"\text{{{inner}}}")
        elif _SINGLE.fullmatch(inner) or "\\" in inner or not re.search(r"[A-Za-z]", inner):
            out.append(f" {_unwrap(inner)} " if not inner.startswith("^") else inner)
        else:
            out.append(rf"\text{{{inner}}}")
        position = end + 1
    out.append(text[position:])
    return "".join(out)


def _is_unit(command: str, inner: str, before: str) -> bool:
    """One upright letter behind a value, such as the metre of ``5\\text{ m}``, is a unit and no symbol."""
    upright = command.startswith(("\\text{", "\\text ", "\\mathrm", "\\textrm"))
    return upright and bool(_UNIT_LETTER.fullmatch(inner)) and bool(re.search(r"[\d)\]}]\s*$", before))


def _join_groups(text: str) -> str:
    """``1,000`` is one number, except between brackets, where the comma separates."""
    if not _GROUPED.search(text):
        return text
    out, depth, position = [], 0, 0
    for match in _GROUPED.finditer(text):
        before = text[position : match.start()]
        depth += len(_OPENS.findall(before)) - len(_CLOSES.findall(before))
        out += [before, match.group() if depth > 0 else match.group().replace(",", "")]
        position = match.end()
    return "".join((*out, text[position:]))
