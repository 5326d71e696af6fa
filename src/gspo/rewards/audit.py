"""Does the reward reward the right thing? Asked before the first step, on answers whose worth is known.

For some prompts the gold answer is scored as a response, alone and in the forms that verifiers read, beside an empty
answer and junk. The gold answer, in the form that scores best, must score higher than every answer that is not one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.rewards.base import RewardSet
from gspo.types import Prompt, Score

JUNK = ("I don't know.", ".", "0 1 2 3 4 5 6 7 8 9 10", "\\boxed{}", "The answer is the answer.")
GOLD_FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "Answer: {}")
MAX_NAMED = 3


@dataclass(frozen=True)
class AuditReport:
    """What the audit found. ``findings`` are reasons to stop, ``notes`` are not."""

    num_prompts: int
    num_scored: int
    findings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass
class _Case:
    """The scores of one prompt."""

    prompt: Prompt
    gold: str | None
    gold_scores: list[Score] = field(default_factory=list)
    other_scores: list[tuple[str, Score]] = field(default_factory=list)

    @property
    def best_gold(self) -> float | None:
        return max((s.value for s in self.gold_scores if s.value is not None), default=None)

    @property
    def best_other(self) -> tuple[float, str] | None:
        return max(((s.value, text) for text, s in self.other_scores if s.value is not None), default=None)


def audit(
    prompts: Sequence[Prompt], reward_set: RewardSet, answer_column: str = "answer", num_prompts: int = 16
) -> AuditReport:
    """Scores gold, empty and junk answers of the first ``num_prompts`` prompts.

    Raises:
        RewardError: a reward function raised or returned something that is not one value per completion.
    """
    cases = [_Case(prompt, _gold(prompt, answer_column)) for prompt in prompts[:num_prompts]]
    _score(cases, reward_set)
    with_gold = [case for case in cases if case.gold is not None]
    findings = [*_unscored(cases), *_gold_findings(with_gold), *_junk_findings(cases), *_constant(cases)]
    notes = []
    if len(with_gold) < len(cases):
        notes.append(
            f"{len(cases) - len(with_gold)} of {len(cases)} prompts have no gold answer in column {answer_column!r}: "
            "whether gold answers are rewarded was not checked there"
        )
    num_scored = sum(len(case.gold_scores) + len(case.other_scores) for case in cases)
    return AuditReport(len(cases), num_scored, tuple(findings), tuple(notes))


def _gold(prompt: Prompt, answer_column: str) -> str | None:
    """What would be a perfect response: the task's worked solution, the answer column, or verl's ground truth."""
    value: Any = prompt.columns.get("solution")
    if value is None or not prompt.task:
        value = prompt.columns.get(answer_column)
    model = prompt.columns.get("reward_model")
    if value is None and isinstance(model, Mapping):
        value = model.get("ground_truth")
    if value is None:
        return None
    return str(value)


def _score(cases: Sequence[_Case], reward_set: RewardSet) -> None:
    """One call of the reward for all answers of all prompts."""
    golds = list(dict.fromkeys(case.gold for case in cases if case.gold is not None))
    rows: list[tuple[_Case, str, bool]] = []
    for case in cases:
        if case.gold is not None:
            rows += [(case, form.format(case.gold), True) for form in GOLD_FORMS]
        others = [gold for gold in golds if gold != case.gold][:1]
        rows += [(case, text, False) for text in ("", *JUNK, *others) if text != case.gold]
    scores = reward_set.score([row[0].prompt for row in rows], [row[1] for row in rows], [[]] * len(rows))
    for (case, text, is_gold), score in zip(rows, scores, strict=True):
        if is_gold:
            case.gold_scores.append(score)
        else:
            case.other_scores.append((text, score))


def _names(cases: Sequence[_Case]) -> str:
    shown = ", ".join(case.prompt.id for case in cases[:MAX_NAMED])
    return shown if len(cases) <= MAX_NAMED else f"{shown}, ..."


def _unscored(cases: Sequence[_Case]) -> list[str]:
    failing = [
        case
        for case in cases
        if all(score.value is None for score in (*case.gold_scores, *(score for _, score in case.other_scores)))
    ]
    if not failing:
        return []
    reasons = [s.failure for _, s in failing[0].other_scores if s.failure]
    reason = f" ({reasons[0]})" if reasons else ""
    return [f"{len(failing)} of {len(cases)} prompts cannot be scored at all: {_names(failing)}{reason}"]


def _gold_findings(cases: Sequence[_Case]) -> list[str]:
    """Gold answers below the best reward that a gold answer gets."""
    values = [case.best_gold for case in cases]
    top = max((value for value in values if value is not None), default=None)
    if top is None:
        return []
    low = [case for case, value in zip(cases, values, strict=True) if value is not None and value < top]
    lost = [case for case, value in zip(cases, values, strict=True) if value is None and case.best_other is not None]
    findings = []
    if low:
        findings.append(
            f"the gold answer gets less than the top reward {top:g} for {len(low)} of {len(cases)} prompts: "
            f"{_names(low)}, e.g. {low[0].gold!r:.80} gets {low[0].best_gold:g}"
        )
    if lost:
        findings.append(f"the gold answer cannot be scored for {len(lost)} of {len(cases)} prompts: {_names(lost)}")
    return findings


def _junk_findings(cases: Sequence[_Case]) -> list[str]:
    """Empty or junk answers that score as much as the gold answer."""
    wrong = []
    for case in cases:
        gold, other = case.best_gold, case.best_other
        if gold is not None and other is not None and other[0] >= gold:
            wrong.append((case, other))
    if not wrong:
        return []
    case, (value, text) = wrong[0]
    kind = "an empty answer" if not text else f"the answer {text!r:.60}"
    return [
        f"{kind} gets {value:g} where the gold answer {case.gold!r:.60} gets {case.best_gold:g} "
        f"({len(wrong)} of {len(cases)} prompts: {_names([w[0] for w in wrong])}); "
        "such a reward teaches nothing, or the wrong thing"
    ]


def _constant(cases: Sequence[_Case]) -> list[str]:
    values = {
        score.value
        for case in cases
        for score in (*case.gold_scores, *(score for _, score in case.other_scores))
        if score.value is not None
    }
    if len(values) == 1 and any(case.gold is not None for case in cases):
        return [f"the reward is constant: gold, empty and junk answers all get {values.pop():g}"]
    return []
