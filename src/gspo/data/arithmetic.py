"""The built-in task ``arithmetic:addition``: additions with worked solutions, made by seed.

``47+38=`` is solved as ``7+8=15,4+3+1=8;85``: digits from the right, the carry written as the last summand, then the
sum after a semicolon. Training and held-out problems are disjoint by construction: a hash of the operands decides
which of the two a problem belongs to.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from gspo.errors import DataError
from gspo.seeding import derive_seed

Split = Literal["train", "eval"]
NAMES = ("addition",)
SCORER = "gspo.data.arithmetic:score_answer"
EVAL_SHARE = 5  # one problem of so many is held out
_OPTIONS = {"digits": 2, "terms": 2}


def generate(
    name: str, options: Mapping[str, Any] | None = None, *, seed: int = 0, split: Split = "train", num: int = 1000
) -> list[dict[str, Any]]:
    """Rows with ``id``, ``task``, ``prompt``, ``response`` (the worked solution), ``answer`` and ``task_args``.

    No problem occurs twice, unless fewer than ``num`` different ones exist; then there are fewer rows.

    Args:
        name: ``"addition"``.
        options: ``digits`` of each operand (2), ``terms`` per problem (2).
        seed: of the choice of problems.
        split: ``"train"`` or ``"eval"``.

    Raises:
        DataError: an unknown name, option or value.
    """
    if name not in NAMES:
        raise DataError(f"there is no task 'arithmetic:{name}'; there is {', '.join(f'arithmetic:{n}' for n in NAMES)}")
    digits, terms = _settings(options or {})
    task = f"arithmetic:{name}"
    rng = random.Random(derive_seed(seed, "arithmetic", name, digits, terms, split))
    operands = _distinct_operands(rng, digits, terms, split, num)
    return [_row(task, split, seed, index, numbers) for index, numbers in enumerate(operands)]


def _settings(options: Mapping[str, Any]) -> tuple[int, int]:
    for option in options:
        if option not in _OPTIONS:
            close = get_close_matches(option, _OPTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise DataError(f"arithmetic has no option {option!r} (it has {', '.join(_OPTIONS)}){hint}")
    digits, terms = (options.get(option, default) for option, default in _OPTIONS.items())
    for option, value, low, high in (("digits", digits, 1, 9), ("terms", terms, 2, 9)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise DataError(
                f"the option {option} of arithmetic is {value!r}; it must be a whole number {low} to {high}"
            )
    return digits, terms


def split_of(operands: Sequence[int]) -> Split:
    """Where a problem belongs, decided by its operands in any order, so that 47+38 and 38+47 stay together."""
    text = "+".join(map(str, sorted(operands)))
    return "eval" if hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % EVAL_SHARE == 0 else "train"


def _distinct_operands(rng: random.Random, digits: int, terms: int, split: Split, num: int) -> list[tuple[int, ...]]:
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    space = (high - low + 1) ** terms
    if space <= 20 * num or space <= 100_000:  # small enough to list
        return _listed(rng, low, high, terms, split)[:num]
    found: dict[tuple[int, ...], None] = {}
    while len(found) < num:
        operands = tuple(rng.randint(low, high) for _ in range(terms))
        if split_of(operands) == split:
            found.setdefault(operands)
    return list(found)


def _listed(rng: random.Random, low: int, high: int, terms: int, split: Split) -> list[tuple[int, ...]]:
    every: list[tuple[int, ...]] = [()]
    for _ in range(terms):
        every = [(*rest, number) for rest in every for number in range(low, high + 1)]
    chosen = [operands for operands in every if split_of(operands) == split]
    rng.shuffle(chosen)
    return chosen


def _row(task: str, split: Split, seed: int, index: int, operands: tuple[int, ...]) -> dict[str, Any]:
    answer = str(sum(operands))
    solution = worked_solution(operands)
    return {
        "id": f"{task}/{split}/{seed}/{index}",
        "task": task,
        "prompt": "+".join(map(str, operands)) + "=",
        "response": solution,
        "solution": solution,
        "answer": answer,
        "task_args": [answer],
    }


def worked_solution(operands: Sequence[int]) -> str:
    """Column by column from the right.

    >>> worked_solution((47, 38))
    '7+8=15,4+3+1=8;85'
    """
    width = max(len(str(number)) for number in operands)
    carry, steps = 0, []
    for place in range(width):
        column = [number // 10**place % 10 for number in operands]
        summands = [*column, carry] if carry else column
        total = sum(summands)
        carry = total // 10
        steps.append(f"{'+'.join(map(str, summands))}={total}")
    return f"{','.join(steps)};{sum(operands)}"


def score_answer(text: str, gold: str) -> float:
    """1.0 if what follows the last semicolon is exactly the gold number, else 0.0.

    Listing several numbers earns nothing: the text after the last semicolon must be the number and nothing else.

    >>> score_answer("7+8=15,4+3+1=8;85", "85"), score_answer("84 85 86", "85"), score_answer(";84;85 86", "85")
    (1.0, 0.0, 0.0)
    """
    _, semicolon, answer = text.rpartition(";")
    return 1.0 if semicolon and answer.strip() == gold else 0.0
