"""Ratio, bounds and unit are one bundle: what the papers set, and which combinations are something else.

No torch here: the checks run before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

Severity = Literal["error", "warning"]
#: (severity, message)
Finding = tuple[Severity, str]

#: Bounds (clip_low, clip_high) as published; None where the objective does not clip.
#: gspo: arXiv 2507.18071 section 5.1; grpo: the baseline of the same section; ppo: arXiv 1707.06347; dapo: 2503.14476;
#: dr_grpo: 2503.20783; cispo: no lower bound (2506.13585), upper one of 2510.13786; gmpo: log ratios, 2507.20673;
#: luspo: 2602.05261; minirl: 2512.01374; fspo: GSPO's carried over to one token (its paper is 2509.09177).
PAPER_BOUNDS: Final[Mapping[str, tuple[float, float] | None]] = MappingProxyType(
    {
        "gspo": (3e-4, 4e-4),
        "gspo_token": (3e-4, 4e-4),
        "grpo": (0.2, 0.27),
        "ppo": (0.2, 0.2),
        "dapo": (0.2, 0.28),
        "dr_grpo": (0.2, 0.2),
        "cispo": (1.0, 4.0),
        "gmpo": (0.4, 0.4),
        "luspo": (2e-3, 2.5e-3),
        "fspo": (0.024, 0.032),
        "minirl": (0.2, 0.27),
        "sapo": None,
        "pg": None,
    }
)

#: Units that an objective has, its default first.
UNITS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gspo": ("sequence",),
        "gspo_token": ("sequence",),
        "grpo": ("sequence", "token"),
        "ppo": ("token",),
        "dapo": ("token",),
        "dr_grpo": ("sequence",),
        "cispo": ("token",),
        "gmpo": ("sequence",),
        "luspo": ("sequence",),
        "fspo": ("sequence",),
        "minirl": ("sequence",),
        "sapo": ("sequence",),
        "pg": ("sequence",),
    }
)

#: One fixed band on the length-normalised sequence ratio.
SEQUENCE_RATIO: Final = frozenset({"gspo", "gspo_token", "luspo"})
TOKEN_RATIO: Final = frozenset({"grpo", "ppo", "dapo", "dr_grpo", "cispo", "gmpo", "minirl"})
#: Objectives whose tokens must share their advantage.
ONE_ADVANTAGE: Final = frozenset({"gmpo"})

#: The paper of cispo has no lower bound, which is 1; gmpo's bounds are log ratios.
_ANY_LOW: Final = frozenset({"cispo", "gmpo"})

#: Default (low, high) of each correction; low is None where the kind has no lower bound. See objectives/correction.py.
CORRECTION_BOUNDS: Final[Mapping[str, tuple[float | None, float]]] = MappingProxyType(
    {
        "tis": (None, 2.0),
        "icepop": (0.5, 5.0),
        "seq_geo": (0.999, 1.001),
        "seq_prod": (0.5, 2.0),
        "negative_mask": (None, 0.03),
    }
)
#: Corrections that weigh the tokens of one response differently.
TOKEN_CORRECTIONS: Final = frozenset({"tis", "icepop"})

#: From here on a bound on the length-normalised ratio does not bind: log s spreads by about
#: (spread of one token) / sqrt(length), so even answers of 20 tokens stay inside 0.05.
LOOSE_SEQUENCE_BOUND: Final = 0.05
#: Below this a bound on the ratio of single tokens cuts almost every token that moved at all.
NARROW_TOKEN_BOUND: Final = 0.01


def bundle_findings(
    name: str,
    clip_low: float | None,
    clip_high: float | None,
    unit: str | None,
    num_mini_batches: int,
    old_logprobs: str,
) -> list[Finding]:
    """What is wrong, or suspicious, about an objective with these bounds, unit and schedule.

    Args:
        name: a key of ``PAPER_BOUNDS``.
        clip_low, clip_high: explicit bounds, or None where the paper's (or calibrated ones) are used.
        unit: "sequence", "token", or None for the objective's own.
        num_mini_batches: M, updates per rollout batch.
        old_logprobs: "auto", "engine" or "recompute".

    Returns:
        (severity, message) pairs, errors first; empty if the bundle is what its name says.
    """
    if name not in PAPER_BOUNDS:
        known = ", ".join(PAPER_BOUNDS)
        return [("error", f"there is no objective {name!r}; the objectives are {known}")]
    findings = [
        *_unit_findings(name, unit),
        *_bound_findings(name, clip_low, clip_high),
        *_schedule_findings(name, num_mini_batches, old_logprobs),
    ]
    return sorted(findings, key=lambda finding: finding[0] != "error")


def _unit_findings(name: str, unit: str | None) -> list[Finding]:
    if unit is None or unit in UNITS[name]:
        return []
    own = " or ".join(repr(u) for u in UNITS[name])
    if name in ("gspo", "gspo_token") and unit == "token":
        return [
            (
                "error",
                f"{name} with unit = 'token' weighs each response by its length and is no longer GSPO; "
                f"leave unit out, or take name = 'grpo' for a mean over tokens",
            )
        ]
    return [("error", f"{name} has no unit {unit!r}; leave unit out (it is {own})")]


def _bound_findings(name: str, clip_low: float | None, clip_high: float | None) -> list[Finding]:
    bounds = {key: value for key, value in (("clip_low", clip_low), ("clip_high", clip_high)) if value is not None}
    if PAPER_BOUNDS[name] is None:
        return [
            ("error", f"{key} = {value:g} has no effect: {name} does not clip; remove it")
            for key, value in bounds.items()
        ]
    findings: list[Finding] = []
    for key, value in bounds.items():
        if not 0 < value < float("inf"):
            findings.append(("error", f"{key} = {value:g} is not a bound; it must be greater than 0 and finite"))
        elif key == "clip_low" and value >= 1 and name not in _ANY_LOW:
            findings.append(
                ("error", f"clip_low = {value:g} has no effect: the lower bound 1 - clip_low is not above 0, "
                          "and a ratio never is below 0; take a value under 1")
            )  # fmt: skip
        elif name in SEQUENCE_RATIO and value >= LOOSE_SEQUENCE_BOUND:
            findings.append(("warning", _loose_message(name, key, value)))
        elif name in TOKEN_RATIO and value < NARROW_TOKEN_BOUND:
            findings.append(("warning", _narrow_message(name, key, value)))
    return findings


def _loose_message(name: str, key: str, value: float) -> str:
    low, high = PAPER_BOUNDS["gspo"] or (0.0, 0.0)
    return (
        f"{key} = {value:g} never binds at sequence level: the ratio of {name} is a mean over the response's tokens "
        f"and stays within a few thousandths of 1, so nothing is clipped, there is no trust region; take the paper's "
        f"clip_low = {low:g}, clip_high = {high:g} (clip = 'paper'), or clip = 'calibrated' for short responses"
    )


def _narrow_message(name: str, key: str, value: float) -> str:
    low, high = PAPER_BOUNDS[name] or (0.0, 0.0)
    return (
        f"{key} = {value:g} is a sequence-level bound on the token ratio of {name}: almost every token that moved is "
        f"clipped; take clip_low = {low:g}, clip_high = {high:g} (clip = 'paper'), or name = 'gspo'"
    )


def correction_findings(
    name: str, kind: str, low: float | None, high: float | None, old_logprobs: str
) -> list[Finding]:
    """What is wrong with a correction (a key of ``CORRECTION_BOUNDS``, or "none") beside this objective.

    Args:
        low, high: explicit bounds, or None where the defaults are used.
        old_logprobs: "auto", "engine" or "recompute".
    """
    if kind == "none":
        return []
    findings: list[Finding] = []
    default_low, default_high = CORRECTION_BOUNDS[kind]
    smallest, largest = default_low if low is None else low, default_high if high is None else high
    if smallest is not None and not smallest < largest:
        findings.append(("error", f"a {kind} correction between {smallest:g} and {largest:g} keeps nothing"))
    if old_logprobs == "engine" and kind != "negative_mask":
        findings.append(
            (
                "error",
                f'\'{kind}\' weighs by old / engine, which is 1 with train.old_logprobs = "engine"; take "recompute", '
                "or leave the correction out",
            )
        )
    if kind in TOKEN_CORRECTIONS and name in ONE_ADVANTAGE:
        findings.append(
            (
                "error",
                f"'{kind}' weighs token by token, and {name} has one weight per response; take seq_geo or seq_prod",
            )
        )
    return findings


def _schedule_findings(name: str, num_mini_batches: int, old_logprobs: str) -> list[Finding]:
    if name == "pg":
        if num_mini_batches > 1:
            return [
                (
                    "warning",
                    f"pg has no ratio: mini-batches 2 to {num_mini_batches} are off-policy and nothing corrects or "
                    "bounds it (a control, not a method); take num_mini_batches = 1 for on-policy policy gradient",
                )
            ]
        return []
    if num_mini_batches > 1:
        return []
    source = {
        "recompute": "old log-probs come from the weights that are updated",
        "engine": "only the engine's rounding moves it",
        "auto": "old log-probs come from the weights that are updated, or differ by the engine's rounding only",
    }.get(old_logprobs, "old log-probs come from the weights that are updated")
    return [
        (
            "warning",
            f"with num_mini_batches = 1 the ratio of {name} is always 1 ({source}), so nothing is ever clipped and "
            "every objective is the same policy gradient; take num_mini_batches = 4 as the paper does",
        )
    ]
