"""Cases about rewards: advantages inside groups, groups by id."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.cli.conformance.implementation import Implementation
from gspo.cli.conformance.model import NOT_OFFERED, AnyShape, Case, Check, Shape, same_answer, unchecked
from gspo.errors import InputError


def _reward_groups(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Named groups of rewards, each one group; or lists of constant groups written ``8 x 0.95``."""
    checks: list[Check] = []
    for name, rewards in case.input.items():
        wanted_name = next((e for e in case.expected if name == e or name.startswith(f"{e}_")), name)
        if any(isinstance(r, str) and " x " in r for r in rewards):
            checks += _constant(wanted_name, rewards, tested, dtype)
            continue
        values = [_number(r) for r in rewards]
        if any(r is not None and math.isinf(r) for r in values):
            checks.append(_infinite(wanted_name, values, tested, dtype))
        elif wanted_name in case.expected:
            wanted = case.expected[wanted_name]
            if not isinstance(wanted, dict):  # zeros are due whatever the scale; else the default one is meant
                wanted = dict.fromkeys(tested.scales if wanted == [0.0] * len(values) else ["ddof1"], wanted)
            for variant, expected in wanted.items():
                checks.append(_variant(case, f"{wanted_name}/{variant}", variant, values, expected, tested, dtype))
    return checks


def _variant(
    case: Case,
    label: str,
    variant: str,
    rewards: list[float | None],
    values: Any,
    tested: Implementation,
    dtype: torch.dtype,
) -> Check:
    if variant not in tested.scales:
        return unchecked(label, NOT_OFFERED)
    got = tested.group_advantages(_rewards(rewards, dtype), [0] * len(rewards), tested.scales[variant]).tolist()
    if isinstance(values, list) and len(values) != len(rewards):  # one value for each distinct reward
        got = [got[rewards.index(r)] for r in dict.fromkeys(rewards)]
    return Check(label, same_answer(got, values, case.tolerance_in(dtype), exact_zero=True), got, values, dtype)


def _rewards(rewards: Sequence[float | None], dtype: torch.dtype) -> Tensor | list[float | None]:
    """A tensor of the dtype; in float32 with None kept, as reward functions return it."""
    if dtype == torch.float32 and None in rewards:
        return list(rewards)
    return torch.tensor([math.nan if r is None else r for r in rewards], dtype=dtype)


def _repeated(text: str) -> tuple[str, int]:
    """``8 x 0.95`` or ``p0 x8``: the value and how often."""
    if found := re.fullmatch(r"\s*(\d+) x (\S+)\s*", text):
        return found[2], int(found[1])
    if found := re.fullmatch(r"\s*(\S+) x\s?(\d+)\s*", text):
        return found[1], int(found[2])
    return text.strip(), 1


def _constant(label: str, groups: Sequence[str], tested: Implementation, dtype: torch.dtype) -> list[Check]:
    repeated = [_repeated(text) for text in groups]
    rewards = torch.tensor([float(value) for value, number in repeated for _ in range(number)], dtype=dtype)
    ids = [name for name, (_, number) in enumerate(repeated) for _ in range(number)]
    zeros = [0.0] * len(ids)
    checks = []
    for scale in ("group_std", "none", "batch_std", "leave_one_out"):
        got = tested.group_advantages(rewards, ids, scale).tolist()
        checks.append(Check(f"{label}/{scale}", got == zeros, got, "exactly 0", dtype))
    count = tested.constant_groups(rewards, ids)
    return [*checks, Check(f"{label}/constant groups", count == len(groups), count, len(groups), dtype)]


def _infinite(label: str, rewards: list[float | None], tested: Implementation, dtype: torch.dtype) -> Check:
    """Refused with the row named, or taken as unscored."""
    row = next(n for n, r in enumerate(rewards) if r is not None and math.isinf(r))
    due = f"refused with row {row} named, or finite advantages with 0 there"
    try:
        got = tested.group_advantages(_rewards(rewards, dtype), [0] * len(rewards), "group_std").tolist()
    except InputError as error:
        return Check(label, re.search(rf"\brow {row}\b", str(error)) is not None, str(error), due, dtype)
    return Check(label, all(map(math.isfinite, got)) and got[row] == 0, got, due, dtype)


def _group_ids(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Rows that name their group: any sizes, any order."""
    checks = _one_group_case(case, "first", case.input, tested, dtype)
    for name, given in case.input.items():
        if isinstance(given, dict) and {"ids", "rewards"} <= given.keys():
            checks += _one_group_case(case, name, given, tested, dtype)
    return checks


def _one_group_case(
    case: Case, name: str, given: Mapping[str, Any], tested: Implementation, dtype: torch.dtype
) -> list[Check]:
    ids, rewards = _expanded(given["ids"]), [_number(r) for r in _expanded(given["rewards"])]
    got = tested.group_advantages(_rewards(rewards, dtype), ids, "group_std")
    checks = []
    wanted = case.expected.get(name)
    if wanted is None and given is case.input:
        wanted = next((w for w in case.expected.values() if isinstance(w, list) and len(w) == len(ids)), None)
    if isinstance(wanted, list):
        right = same_answer(got.tolist(), wanted, case.tolerance_in(dtype), exact_zero=True)
        checks.append(Check(name, right, got.tolist(), wanted, dtype))
    elif isinstance(wanted, str) and "exactly 0" in wanted:
        checks.append(Check(name, not got.any() and not got.isnan().any(), got.tolist(), wanted, dtype))
    if "shuffled" in case.expected:
        for seed in range(4):
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
            shuffled = [rewards[n] for n in order]
            moved = tested.group_advantages(_rewards(shuffled, dtype), [ids[n] for n in order], "group_std")
            right = same_answer(moved.tolist(), got[order].tolist(), case.tolerance_in(dtype))
            checks.append(Check(f"shuffled/{name}", right, moved.tolist(), got[order].tolist(), dtype))
    return checks


def _expanded(values: Any) -> list[Any]:
    """A list as it is; ``"p0 x8, p1 x8"`` written out."""
    if isinstance(values, str):
        pairs = [_repeated(part) for part in values.split(",")]
        return [value for value, number in pairs for _ in range(number)]
    return list(values)


def _number(value: Any) -> float | None:
    """A reward; None and nan, as text too, mean that it could not be scored."""
    return None if value is None or math.isnan(float(value)) else float(value)


class _NamedRewardGroups(Shape):
    """Every value is a flat list of rewards, None or text, under a free name."""

    def fits(self, given: Any) -> bool:
        return (
            bool(given)
            and isinstance(given, Mapping)
            and all(
                isinstance(rewards, list)
                and rewards
                and all(r is None or isinstance(r, int | float) or _is_reward_text(r) for r in rewards)
                for rewards in given.values()
            )
        )


def _is_reward_text(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(\d+ x )?[+-]?(inf|nan|\d[\d.e+-]*)", value) is not None


#: Tried in order.
REWARD_SHAPES: tuple[AnyShape, ...] = (
    Shape(frozenset({"ids", "rewards"}), _group_ids),
    _NamedRewardGroups(frozenset(), _reward_groups),
)
