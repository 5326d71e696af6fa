"""The ``math`` verifier: is the answer of a response mathematically the gold answer?

A ladder; the first rung that decides wins and is named in the judgement:

1. ``extraction``: a response without an answer is wrong (policy in ``extraction``);
2. ``identical``: the same text after normalisation; ``word``: the same word;
3. ``integer``, ``rational``: numbers, exactly, as fractions; ``expression``: other values, by many digits;
   ``structure``: tuples, sets, intervals, matrices, ... element by element (``answers``, ``evaluation``);
4. ``symbolic``: what that reader does not know goes to math-verify's LaTeX parser and sympy (``symbolic``), after a
   size check.

Besides, ``size``: the answer is too large to be evaluated (wrong); ``gold``: so is the gold answer, or no rung can read
it (nothing is judged); ``policy``: refused by an option (``policies``). There is no absolute tolerance. Nothing is
evaluated as Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.rewards import symbolic
from gspo.rewards.answers import Answer, Leaf, equal, read, word_of
from gspo.rewards.evaluation import TooLargeError, exact
from gspo.rewards.expressions import UnreadableError
from gspo.rewards.extraction import final_answer, last_boxed
from gspo.rewards.latex import normalise
from gspo.rewards.policies import MathPolicy, adapt, forbidden
from gspo.rewards.verdict import Judgement

MAX_ANSWER_CHARACTERS = 2000
_DEFAULT = MathPolicy()


def verify(gold: str, response: str, policy: Mapping[str, Any] | None = None) -> Judgement:
    """Judges a whole response; ``policy`` holds options of ``MathPolicy``.

    >>> verify(r"\\frac{1}{2}", r"So it is \\boxed{0.5}.").correct
    True
    """
    gold = gold_text(gold)
    readable, why = read_gold(gold)
    if not readable:
        return Judgement(None, "gold", why)
    answer = final_answer(response)
    if not answer:
        return Judgement(False, "extraction", "the response states no answer")
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return Judgement(False, "extraction", f"the answer has {len(answer)} characters")
    return compare(gold, answer, MathPolicy.from_options(policy or {}))


def gold_text(gold: str) -> str:
    """A gold answer may be a worked solution with a box or a ``####`` line; else it is taken as it is."""
    boxed = last_boxed(gold)
    if boxed is not None:
        return boxed.strip()
    return gold.rsplit("####", 1)[-1].strip()


def read_gold(gold: str) -> tuple[bool, str]:
    """Whether a gold answer can be read, and if not, why."""
    gold = gold_text(str(gold))
    try:
        read(gold)
    except UnreadableError as error:
        if symbolic.readable(gold):
            return True, ""
        return False, f"the gold answer {gold[:80]!r} cannot be read: {error}"
    return True, ""


def compare(gold: str, answer: str, policy: MathPolicy = _DEFAULT) -> Judgement:
    """Judges an extracted answer against a readable gold answer."""
    if "".join(normalise(gold).split()) == "".join(normalise(answer).split()):
        return Judgement(True, "identical", answer[:80])
    if _same_word(gold, answer):
        return Judgement(True, "word", answer[:80])
    trees = _read_both(gold, answer, policy)
    if trees is None:
        correct, reason = symbolic.compare(gold, answer)
        return Judgement(correct, "symbolic", reason)
    refusal = forbidden(*trees, policy)
    if refusal:
        return Judgement(False, "policy", refusal)
    try:
        return Judgement(equal(*trees), _rung(*trees), f"{answer[:80]!r} against {gold[:80]!r}")
    except UnreadableError as error:
        return Judgement(False, "structure", str(error))
    except TooLargeError as error:
        return _too_large(trees[0], str(error))


def _same_word(gold: str, answer: str) -> bool:
    """A gold word such as ``\\text{east}`` may be answered without the LaTeX command."""
    word = word_of(gold)
    return word is not None and answer.strip(" .*").casefold() == word


def _rung(gold: Answer, answer: Answer) -> str:
    """What is compared: integers, rational numbers, other values, or something with parts."""
    if not isinstance(gold, Leaf) or not isinstance(answer, Leaf):
        return "structure"
    values = [None if leaf.expr is None else exact(leaf.expr) for leaf in (gold, answer)]
    if any(value is None for value in values):
        return "expression"
    return "integer" if all(value is not None and value.denominator == 1 for value in values) else "rational"


def _read_both(gold: str, answer: str, policy: MathPolicy) -> tuple[Answer, Answer] | None:
    try:
        return adapt(read(gold), policy), adapt(read(answer), policy)
    except UnreadableError:
        return None


def _too_large(gold: Answer, reason: str) -> Judgement:
    """A prediction that is too large cannot be shown to be the gold answer; a gold that is too large judges nothing."""
    try:
        equal(gold, read("0"))
    except TooLargeError:
        return Judgement(None, "gold", f"the gold answer is too large: {reason}")
    except UnreadableError:
        pass
    return Judgement(False, "size", reason)


def preload() -> None:
    """Imports what the first verdict needs, so that the time limit does not pay for it."""
    import mpmath

    mpmath.mpf(1)
    symbolic.preload()
