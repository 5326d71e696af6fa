"""Gold answers before a run: where they are in a row, and whether the verifier that will read them accepts them.

No torch here: this is part of what ``gspo check`` does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, Final

from gspo.errors import InputError, RewardError
from gspo.rewards.overlong import overlong_from_options
from gspo.rewards.policies import MathPolicy
from gspo.rewards.pool import VerifierPool
from gspo.rewards.problems import PROBLEM_DEFAULTS, read_problem
from gspo.rewards.verdict import Verdict

VERIFIERS: Final = {
    "exact_match": "gspo.rewards.exact_match",
    "number": "gspo.rewards.number",
    "math": "gspo.rewards.math",
}
#: How a gold answer is written as a response; one of them must be accepted.
GOLD_FORMS: Final = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "Answer: {}")
#: Of the reward ``code``; see docs/verifiers.md.
CODE_OPTIONS: Final = ("credit", "isolation", "num_boxes", "solution_column", *PROBLEM_DEFAULTS)


def gold_of(columns: Mapping[str, Any], answer_column: str) -> Any:
    """The gold answer of one row, in the column or in verl's ``reward_model``; None if it has none."""
    value = columns.get(answer_column)
    model = columns.get("reward_model")
    return model.get("ground_truth") if value is None and isinstance(model, Mapping) else value


def rejected_golds(
    name: str, golds: Sequence[str], options: Mapping[str, Any], timeout_s: float, num_workers: int
) -> list[str | None]:
    """Why the verifier ``name`` cannot use a gold answer, for each; None where it accepts one of its forms."""
    module = VERIFIERS[name]
    settings = {"policy": asdict(MathPolicy.from_options(options))} if name == "math" else {}
    items = [(gold, form.format(gold)) for gold in golds for form in GOLD_FORMS]
    with VerifierPool(num_workers, timeout_s, preload=[module]) as pool:
        verdicts = pool.run(f"{module}:verify", items, settings)
    width = len(GOLD_FORMS)
    return [_rejection(name, verdicts[i * width : (i + 1) * width]) for i in range(len(golds))]


def _rejection(name: str, verdicts: Sequence[Verdict]) -> str | None:
    if any(verdict.value for verdict in verdicts):
        return None
    if all(verdict.value is None for verdict in verdicts):
        return (verdicts[0].failure or verdicts[0].reason).removeprefix("gold: ") or f"{name} cannot judge by it"
    return f"{name} does not accept the gold answer as an answer, in none of its forms ({verdicts[0].reason})"


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Options of a built-in reward.

    Raises:
        RewardError: an unknown option, or a value that it cannot have.
        InputError: an extra is not installed.
    """
    if name == "math":
        if not all(map(importlib.util.find_spec, ("math_verify", "mpmath", "sympy"))):
            raise InputError("the reward 'math' needs an extra: pip install 'gspo[math]'")
        MathPolicy.from_options(options)
    elif name == "code":
        _check_code_options(options)
    elif name == "overlong":
        overlong_from_options(options)
    elif options:
        raise RewardError(f"the built-in reward {name!r} has no options; it was given {', '.join(options)}")


def _check_code_options(options: Mapping[str, Any]) -> None:
    for option in options:
        if option not in CODE_OPTIONS:
            close = get_close_matches(option, CODE_OPTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(CODE_OPTIONS)}"
            raise RewardError(f"the reward 'code' has no option {option!r}{hint}")
    credit = options.get("credit", "all")
    if credit not in ("all", "partial"):
        raise RewardError(f'the option credit of the reward \'code\' is {credit!r}; it must be "all" or "partial"')
    num_boxes = options.get("num_boxes")
    if num_boxes is not None and (isinstance(num_boxes, bool) or not isinstance(num_boxes, int) or num_boxes < 1):
        raise RewardError(
            f"the option num_boxes of the reward 'code' is {num_boxes!r}; it must be a whole number from 1 on"
        )
    read_problem({"tests": [["", ""]]}, problem_defaults(options))  # refuses a default that no problem could have


def problem_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``code`` that hold for problems which say nothing of them."""
    return {name: options[name] for name in PROBLEM_DEFAULTS if name in options}
