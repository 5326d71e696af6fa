"""Detectors of runs that go wrong: each is a stated rule over the metrics of the steps so far.

An alarm is raised at the step at which a rule begins to hold, not again while it goes on holding. The rules look at
nothing but what is in the events, so that the same alarms come out of a finished run's file (``gspo doctor``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, pstdev
from types import MappingProxyType
from typing import Any

from gspo.errors import RunError

#: Steps that "now" and "at the start" are averaged over.
SHORT = 5
#: Steps that a spike is compared with, and that a trend needs.
LONG = 20

Row = Mapping[str, float]


class CollapseError(RunError):
    """A detector fired and guard.reaction is "stop"."""


@dataclass(frozen=True)
class Alarm:
    """One rule that began to hold."""

    detector: str
    step: int
    message: str  # the evidence, in numbers
    since: int = 0  # the first step that the evidence is about: a checkpoint from before it is good


@dataclass(frozen=True)
class Detector:
    """A rule. ``check`` takes the rows of all steps so far and gives the evidence, or None while all is well."""

    name: str
    rule: str
    remedy: str
    check: Callable[[Sequence[Row]], str | None]
    reach: int = SHORT  # steps, the last included, that the evidence is about


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _start_and_now(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """Means over the first and the last SHORT steps; None before these are different steps."""
    values = _values(rows, name)
    if len(values) < 2 * SHORT:
        return None
    return fmean(values[:SHORT]), fmean(values[-SHORT:])


def _reward_gains(rows: Sequence[Row]) -> bool:
    """Whether the reward of the last SHORT steps is above that of the LONG steps before them."""
    values = _values(rows, "reward/mean")
    before = values[-LONG - SHORT : -SHORT]
    return bool(before) and fmean(values[-SHORT:]) > fmean(before)


def _spike(name: str, factor: float, floor: float) -> Callable[[Sequence[Row]], str | None]:
    def check(rows: Sequence[Row]) -> str | None:
        values = _values(rows[-LONG - 1 :], name)
        if len(values) < SHORT + 1 or name not in rows[-1]:
            return None
        usual = median(values[:-1])
        if values[-1] > factor * usual and values[-1] > floor:
            return f"{name} is {values[-1]:.3g}, usual before was {usual:.3g}"
        return None

    return check


def _gradient_decay(rows: Sequence[Row]) -> str | None:
    found = _start_and_now(rows, "grad_norm")
    if found is None or found[1] >= 0.01 * found[0] or _is_solved(rows):
        return None
    return f"grad_norm went from {found[0]:.3g} to {found[1]:.3g}"


def _is_solved(rows: Sequence[Row]) -> bool:
    """Constant groups because the reward stands at the best it has ever been: success, not collapse."""
    values = _values(rows, "reward/mean")
    return len(values) >= SHORT and fmean(values[-SHORT:]) >= max(values) - 0.05 * (max(values) - min(values))


def _kl_trend(rows: Sequence[Row]) -> str | None:
    for name in ("kl/reference", "kl/k3_old"):
        values = _values(rows, name)
        if len(values) < LONG + SHORT:
            continue
        before, now = fmean(values[-LONG - SHORT : -SHORT]), fmean(values[-SHORT:])
        if now > 5 * before and now > 0.05 and not _reward_gains(rows):
            return f"{name} rose from {before:.3g} to {now:.3g} nats per token, and the reward did not"
    return None


def _entropy_collapse(rows: Sequence[Row]) -> str | None:
    found = _start_and_now(rows, "entropy")
    if found is None or found[1] >= 0.05 * found[0] or _reward_gains(rows) or _is_solved(rows):
        return None
    return f"entropy went from {found[0]:.3g} to {found[1]:.3g} nats per token, and the reward does not rise"


def _entropy_explosion(rows: Sequence[Row]) -> str | None:
    found = _start_and_now(rows, "entropy")
    if found is None or found[1] <= 3 * found[0] or found[1] < 0.5 or _reward_gains(rows):
        return None
    return f"entropy went from {found[0]:.3g} to {found[1]:.3g} nats per token, and the reward does not rise"


def _length_collapse(rows: Sequence[Row]) -> str | None:
    found = _start_and_now(rows, "length/mean")
    if found is None or found[1] >= 0.25 * found[0] or _reward_gains(rows) or _is_solved(rows):
        return None
    return f"mean length went from {found[0]:.1f} to {found[1]:.1f} tokens, and the reward does not rise"


def _length_explosion(rows: Sequence[Row]) -> str | None:
    found, reward = _start_and_now(rows, "length/mean"), _start_and_now(rows, "reward/mean")
    if found is None or found[1] <= 3 * found[0] or reward is None or reward[1] > reward[0]:
        return None
    return (
        f"mean length went from {found[0]:.1f} to {found[1]:.1f} tokens, and the reward is no higher than at the start"
    )


def _truncation(rows: Sequence[Row]) -> str | None:
    found = _start_and_now(rows, "truncated_fraction")
    if found is None or found[1] < 0.5 or found[1] < found[0] + 0.3:
        return None
    return f"{found[1]:.0%} of the responses run into max_new_tokens; at the start it was {found[0]:.0%}"


def _reward_drop(rows: Sequence[Row]) -> str | None:
    values = _values(rows, "reward/mean")
    if len(values) < 2 * SHORT:
        return None
    now = values[-SHORT:]
    best = max(range(len(values) - 2 * SHORT + 1), key=lambda i: fmean(values[i : i + SHORT]))
    top = values[best : best + SHORT]
    drop, error = fmean(top) - fmean(now), math.hypot(pstdev(top), pstdev(now)) / math.sqrt(SHORT)
    spread = max(max(values) - min(values), abs(fmean(top)))
    if drop > 0.3 * spread and drop > 4 * error:
        return f"reward fell from {fmean(top):.3g} (steps {best + 1} to {best + SHORT}) to {fmean(now):.3g}"
    return None


def _clip_range(rows: Sequence[Row]) -> str | None:
    values = _values(rows, "clip_fraction/sequence")
    if len(values) < LONG:
        return None
    # Under a token ratio a response counts as clipped with its first clipped token; the share of tokens says more.
    tokens = _values(rows, "clip_fraction/token") or values
    now = fmean(tokens[-SHORT:])
    if now > 0.6:
        return f"{now:.0%} of the response tokens are clipped; little is learned from them"
    moves = all("clip_low" in row and row.get("log_ratio/abs_mean", 0.0) > 1e-6 for row in rows[-LONG:])
    if max(values[-LONG:]) == 0 and moves:
        return f"nothing was clipped for {LONG} steps; the bounds never bind"
    return None


def _constant_groups(rows: Sequence[Row]) -> str | None:
    shares = [
        row["groups/constant"] / row["groups/total"]
        for row in rows
        if row.get("groups/total") and "groups/constant" in row
    ]
    if len(shares) < SHORT or fmean(shares[-SHORT:]) <= 0.9:
        return None
    values = _values(rows, "reward/mean")
    reward = f"; their mean reward is {fmean(values[-SHORT:]):.3g}" if values else ""
    return f"{fmean(shares[-SHORT:]):.0%} of the groups have no two different rewards{reward}"


def _evaluation_drop(rows: Sequence[Row]) -> str | None:
    """Rows of evaluations, oldest first."""
    usable = [row for row in rows if {"pass@1", "pass@1/low", "pass@1/high"} <= row.keys()]
    if len(usable) < 2 or usable[-1] is not rows[-1]:
        return None
    best = max(usable[:-1], key=lambda row: row["pass@1"])
    now = usable[-1]
    if now["pass@1/high"] < best["pass@1/low"]:
        return (
            f"held-out pass@1 is {now['pass@1']:.3f} (at most {now['pass@1/high']:.3f}); "
            f"it was {best['pass@1']:.3f} (at least {best['pass@1/low']:.3f})"
        )
    return None


DETECTORS: tuple[Detector, ...] = (
    Detector(
        "grad_norm_spike",
        f"grad_norm above 10 times its median over the {LONG} steps before, and above 1",
        "lower train.learning_rate or train.max_grad_norm; look at the samples of that step",
        _spike("grad_norm", 10.0, 1.0),
        reach=1,
    ),
    Detector(
        "grad_norm_decay",
        f"mean grad_norm of the last {SHORT} steps below 1 % of that of the first {SHORT}, reward not at its best",
        "groups without signal, or bounds that clip everything: look at groups/constant and clip_fraction",
        _gradient_decay,
    ),
    Detector(
        "kl_spike",
        f"kl/k3_old above 10 times its median over the {LONG} steps before, and above 0.05 nats per token",
        "lower train.learning_rate or train.num_mini_batches; narrow the bounds",
        _spike("kl/k3_old", 10.0, 0.05),
        reach=1,
    ),
    Detector(
        "kl_trend",
        f"kl/reference (else kl/k3_old) of the last {SHORT} steps above 5 times that of the {LONG} before and above "
        "0.05, reward not rising",
        "raise objective.kl_coefficient, lower train.learning_rate; look whether the reward is being gamed",
        _kl_trend,
    ),
    Detector(
        "entropy_collapse",
        f"mean entropy of the last {SHORT} steps below 5 % of that of the first {SHORT}, reward neither rising nor at "
        "its best",
        "widen clip_high, lower train.learning_rate, sample at a higher rollout.temperature",
        _entropy_collapse,
    ),
    Detector(
        "entropy_explosion",
        f"mean entropy of the last {SHORT} steps above 3 times that of the first {SHORT} and above 0.5, reward not "
        "rising",
        "lower train.learning_rate, narrow the bounds; look whether the engine and the trainer agree (mismatch/*)",
        _entropy_explosion,
    ),
    Detector(
        "length_collapse",
        f"mean length of the last {SHORT} steps below 25 % of that of the first {SHORT}, reward neither rising nor at "
        "its best",
        "look at the samples: the reward probably pays for short or empty answers",
        _length_collapse,
    ),
    Detector(
        "length_explosion",
        f"mean length of the last {SHORT} steps above 3 times that of the first {SHORT}, reward no higher than then",
        "look at the samples for repetition; lower train.learning_rate; a reward that pays for being short",
        _length_explosion,
    ),
    Detector(
        "truncation",
        f"more than half of the responses of the last {SHORT} steps truncated, 30 points above the first {SHORT}",
        'raise rollout.max_new_tokens, or train.truncated = "exclude"; look whether the end of a turn is still sampled',
        _truncation,
    ),
    Detector(
        "reward_drop",
        f"mean reward of the last {SHORT} steps below the best {SHORT} by 30 % of its range and by 4 standard errors",
        "go back to a checkpoint before the drop; lower train.learning_rate or train.num_mini_batches",
        _reward_drop,
    ),
    Detector(
        "clip_range",
        f"more than 60 % of the response tokens clipped over {SHORT} steps, or none over {LONG} while the ratios move",
        'objective.clip = "calibrated", or bounds that fit the length of the responses',
        _clip_range,
    ),
    Detector(
        "constant_groups",
        f"more than 90 % of the groups of the last {SHORT} steps without two different rewards",
        'problems that are neither solved nor hopeless; a larger rollout.group_size; groups_without_signal = "refill"',
        _constant_groups,
    ),
)

#: The detector of evaluations, which are fewer than steps and have intervals of their own.
EVALUATION_DROP = Detector(
    "evaluation_drop",
    "the confidence interval of held-out pass@1 lies wholly below that of the best evaluation before",
    "go back to the checkpoint of the best evaluation; look whether the training reward still rises (gaming)",
    _evaluation_drop,
)


#: Every detector by its name.
BY_NAME: Mapping[str, Detector] = MappingProxyType({d.name: d for d in (*DETECTORS, EVALUATION_DROP)})


@dataclass(eq=False)
class Guard:
    """The rows of a run so far; says which rules begin to hold with each new one."""

    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)

    def observe_step(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Takes the metrics of a step event."""
        self.steps.append(_finite(metrics))
        return _begun(DETECTORS, self.steps, step)

    def observe_evaluation(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Takes the metrics of an evaluation event of held-out prompts."""
        self.evaluations.append({**_finite(metrics), "step": step})
        rated = [row for row in self.evaluations[:-1] if "pass@1" in row]
        since = int(max(rated, key=lambda row: row["pass@1"])["step"]) + 1 if rated else step
        return [replace(alarm, since=since) for alarm in _begun((EVALUATION_DROP,), self.evaluations, step)]


def alarms(events: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """Every alarm of a run, from its events."""
    return replay(events)[1]


def replay(events: Sequence[Mapping[str, Any]]) -> tuple[Guard, list[Alarm]]:
    """A guard that has seen these events, and what it said."""
    guard = Guard()
    found: list[Alarm] = []
    for event in events:
        if event["type"] == "step":
            found += guard.observe_step(event["step"], event["metrics"])
        elif event["type"] == "evaluation" and event.get("name") != "sft":
            found += guard.observe_evaluation(event["step"], event["metrics"])
    return guard, found


def _finite(metrics: Mapping[str, float | None]) -> Row:
    """What can be compared: in events a number that is not finite stands as null."""
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _begun(detectors: Sequence[Detector], rows: Sequence[Row], step: int) -> list[Alarm]:
    found = []
    for detector in detectors:
        evidence = detector.check(rows)
        if evidence is not None and (len(rows) == 1 or detector.check(rows[:-1]) is None):
            found.append(Alarm(detector.name, step, evidence, max(1, step - detector.reach + 1)))
    return found
