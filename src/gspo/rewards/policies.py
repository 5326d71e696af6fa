"""What counts as the same answer, where mathematics alone does not say: explicit, and recorded with the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from gspo.errors import InputError
from gspo.rewards.answers import Answer, Equation, Group, Leaf
from gspo.rewards.expressions import Expr

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "units": ("compatible", "required", "ignored"),
    "percent": ("fraction", "number"),
    "named_value": (True, False),
    "unordered_lists": (True, False),
    "mixed_numbers": (True, False),
}


@dataclass(frozen=True)
class MathPolicy:
    """Options of the verifier ``math``.

    Args:
        units: "compatible": a unit on one side only is not held against the answer, two different ones are; "required":
            the answer must name the units of the gold answer; "ignored": units are not looked at.
        percent: "fraction": 28 % is 0.28; "number": 28 % is 28.
        named_value: ``x = 5`` answers ``5``, and ``0 < x < 1`` answers ``(0, 1)``.
        unordered_lists: ``1, 2`` is ``2, 1`` (a list in parentheses, or with an ellipsis, always has an order).
        mixed_numbers: ``2 1/4`` is 9/4; else it is the product.

    Raises:
        InputError: a value that is none of these.
    """

    units: str = "compatible"
    percent: str = "fraction"
    named_value: bool = True
    unordered_lists: bool = True
    mixed_numbers: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise InputError(f"the option {name} of 'math' is {value!r}; it must be one of {_listed(choices)}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MathPolicy:
        """The policy with these options; InputError names one that there is not."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"
                raise InputError(f"'math' has no option {name!r}{hint}")
        return cls(**options)


def _listed(choices: tuple[Any, ...]) -> str:
    return ", ".join(repr(choice) if isinstance(choice, str) else str(choice).lower() for choice in choices)


def adapt(answer: Answer, policy: MathPolicy) -> Answer:
    """The tree of an answer as the policy reads it."""
    if policy == MathPolicy():
        return answer
    if isinstance(answer, Equation):
        return replace(answer, left=_adapt(answer.left, policy), right=_adapt(answer.right, policy))
    if isinstance(answer, Group):
        items = tuple(adapt(item, policy) for item in answer.items)
        ordered = answer.ordered or (answer.kind == "list" and not policy.unordered_lists)
        return replace(answer, items=items, ordered=ordered)
    unit = "" if policy.units == "ignored" else answer.unit
    return replace(answer, unit=unit, expr=None if answer.expr is None else _adapt(answer.expr, policy))


def _adapt(expr: Expr, policy: MathPolicy) -> Expr:
    args = tuple(_adapt(arg, policy) for arg in expr.args)
    if expr.op == "percent" and policy.percent == "number":
        return args[0]
    if expr.op == "add" and expr.name == "mixed" and not policy.mixed_numbers:
        return Expr("mul", args)
    return replace(expr, args=args)


def forbidden(gold: Answer, prediction: Answer, policy: MathPolicy) -> str:
    """Why the policy refuses the prediction, whatever its value; empty if it does not."""
    if not policy.named_value and bool(gold.variable) != bool(prediction.variable):
        return "one of the two names a variable"
    if policy.units == "required" and _units(gold) != _units(prediction):
        return "the units are not those of the gold answer"
    return ""


def _units(answer: Answer) -> list[str]:
    if isinstance(answer, Group):
        return sorted(unit for item in answer.items for unit in _units(item))
    return [answer.unit] if isinstance(answer, Leaf) and answer.unit else []
