"""The ``exact_match`` verifier: the answer is the gold text, character by character."""

from __future__ import annotations

from gspo.rewards.extraction import last_boxed, visible_text
from gspo.rewards.verdict import Judgement


def verify(gold: str, response: str) -> Judgement:
    """Compares the last box, or without a box all text after a closed think block, blanks at the ends left out.

    >>> verify("Paris", " Paris\\n").correct
    True
    """
    wanted = gold.strip()
    if not wanted:
        return Judgement(None, "gold", "the gold answer is empty")
    text = visible_text(response)
    if text is None:
        return Judgement(False, "extraction", "a think block is still open")
    boxed = last_boxed(text)
    answer = (text if boxed is None else boxed).strip()
    return Judgement(answer == wanted, "exact", f"{answer[:80]!r} against {wanted[:80]!r}")


def read_gold(gold: str) -> tuple[bool, str]:
    """Whether a gold answer can be read, and if not, why."""
    return (True, "") if gold.strip() else (False, "the gold answer is empty")
