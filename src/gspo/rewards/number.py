"""The ``number`` verifier: the number that a final answer states last is exactly the gold number."""

from __future__ import annotations

from fractions import Fraction

from gspo.rewards.extraction import final_answer, last_number
from gspo.rewards.verdict import Judgement


def verify(gold: str, response: str) -> Judgement:
    """``1,000`` = ``1000`` = ``1000.0``; there is no tolerance.

    >>> verify("1000", "That makes 1,000.").correct
    True
    """
    wanted = last_number(gold)
    if wanted is None:
        return Judgement(None, "gold", f"the gold answer {gold[:80]!r} holds no number")
    answer = final_answer(response)
    found = last_number(answer) if answer else None
    if found is None:
        return Judgement(False, "extraction", "the response states no number")
    return Judgement(_value(wanted) == _value(found), "number", f"{found} against {wanted}")


def _value(text: str) -> Fraction:
    text = text.replace(",", "")
    return -Fraction(text[1:]) if text[0] in "-−–" else Fraction(text)


def read_gold(gold: str) -> tuple[bool, str]:
    """Whether a gold answer can be read, and if not, why."""
    return (True, "") if last_number(gold) else (False, f"the gold answer {gold[:80]!r} holds no number")
