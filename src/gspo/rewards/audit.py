"""Does the reward reward the right thing? Asked before the first step, on answers whose worth is known.

For some prompts the gold answer is scored as a response, alone and in the forms that verifiers read, beside an empty
answer and junk. The gold answer, in the form that scores best, must score higher than every answer that is not one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.rewards.base import RewardSet
from gspo.rewards.builtin import BUILTIN
from gspo.rewards.gold import GOLD_FORMS, gold_of
from gspo.types import Prompt, Score

JUNK = ("I don't know.", ".", "0 1 2 3 4 5 6 7 8 9 10", "\\boxed{}", "The answer is the answer.")
#: Of a program.
PROGRAM_FORMS = ("```python\n{}\n```", "{}")
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
    junk_scores: list[tuple[str, Score]] = field(default_factory=list)
    swapped_scores: list[tuple[str, Score]] = field(default_factory=list)  # the gold answer of another prompt

    @property
    def scores(self) -> list[Score]:
        return [*self.gold_scores, *(score for _, score in (*self.junk_scores, *self.swapped_scores))]

    @property
    def best_gold(self) -> float | None:
        return max((s.value for s in self.gold_scores if s.value is not None), default=None)

    def beaten_by(self, others: Sequence[tuple[str, Score]]) -> tuple[str, float] | None:
        """An answer among ``others`` that scores at least as much as the gold answer, the best one."""
        gold = self.best_gold
        scored = [(text, s.value) for text, s in others if s.value is not None and gold is not None and s.value >= gold]
        return max(scored, key=lambda pair: pair[1], default=None)


def audit(
    prompts: Sequence[Prompt], reward_set: RewardSet, answer_column: str = "answer", num_prompts: int = 16
) -> AuditReport:
    """Scores gold, empty and junk answers of the first ``num_prompts`` prompts.

    Raises:
        RewardError: a reward function raised or returned something that is not one value per completion.
    """
    program_column = _program_column(reward_set)
    column, forms = (answer_column, GOLD_FORMS) if program_column is None else (program_column, PROGRAM_FORMS)
    cases = [_Case(p, _gold(p, column, program_column is not None)) for p in prompts[:num_prompts]]
    _score(cases, reward_set, forms)
    with_gold = [case for case in cases if case.gold is not None]
    findings = [*_unscored(cases), *_below_top(with_gold)]
    findings += _constant(cases) or [*_junk_findings(with_gold), *_swapped_findings(with_gold)]
    notes = []
    if len(with_gold) < len(cases):
        notes.append(
            f"{len(cases) - len(with_gold)} of {len(cases)} prompts have no gold answer in column {column!r}: "
            "whether gold answers are rewarded was not checked there"
        )
    num_scored = sum(len(case.scores) for case in cases)
    return AuditReport(len(cases), num_scored, tuple(findings), tuple(notes))


def _program_column(reward_set: RewardSet) -> str | None:
    """The column with a right program, where a reward runs programs: there the answer column holds tests."""
    columns = [getattr(reward.function, "audit_column", None) for reward in reward_set.functions]
    return next((str(column) for column in columns if column is not None), None)


def _gold(prompt: Prompt, answer_column: str, program: bool = False) -> str | None:
    """What would be a perfect response: the task's worked solution, the answer column, or verl's ground truth."""
    if program:
        source = prompt.columns.get(answer_column)
        return None if source is None else str(source)
    value: Any = prompt.columns.get("solution")
    if value is None or not prompt.task:
        value = gold_of(prompt.columns, answer_column)
    if value is None:
        return None
    return str(value)


def _score(cases: Sequence[_Case], reward_set: RewardSet, forms: Sequence[str]) -> None:
    """One call of the reward for all answers of all prompts."""
    golds = list(dict.fromkeys(case.gold for case in cases if case.gold is not None))
    rows: list[tuple[_Case, str, str]] = []
    for case in cases:
        if case.gold is not None:
            rows += [(case, form.format(case.gold), "gold") for form in forms]
        rows += [(case, text, "junk") for text in ("", *JUNK) if not _holds_gold(text, case.gold)]
        rows += [(case, gold, "swapped") for gold in [g for g in golds if g != case.gold][:1]]
    scores = reward_set.score(
        [row[0].prompt for row in rows], [row[1] for row in rows], [[]] * len(rows), shaping=False
    )
    for (case, text, kind), score in zip(rows, scores, strict=True):
        if kind == "gold":
            case.gold_scores.append(score)
        else:
            (case.junk_scores if kind == "junk" else case.swapped_scores).append((text, score))


def _holds_gold(text: str, gold: str | None) -> bool:
    """Whether a junk answer happens to state the gold answer."""
    return gold is not None and (gold.strip() in text.split() if gold.strip() else not text)


def _names(cases: Sequence[_Case]) -> str:
    shown = ", ".join(case.prompt.id for case in cases[:MAX_NAMED])
    return shown if len(cases) <= MAX_NAMED else f"{shown}, ..."


def _unscored(cases: Sequence[_Case]) -> list[str]:
    """Prompts whose gold answer (or, without one, every answer) gets no score."""
    failing = [case for case in cases if all(s.value is None for s in case.gold_scores or case.scores)]
    if not failing:
        return []
    reasons = [score.failure for score in failing[0].scores if score.failure]
    reason = f" ({reasons[0]})" if reasons else ""
    return [f"{len(failing)} of {len(cases)} prompts cannot be scored: {_names(failing)}{reason}"]


def _below_top(cases: Sequence[_Case]) -> list[str]:
    """Gold answers that a built-in verifier, whose top reward is 1, does not accept in any form."""
    findings = []
    for name in BUILTIN:
        low = []
        for case in cases:
            values = [v for v in (s.components.get(name) for s in case.gold_scores) if v is not None]
            if values and max(values) < 1.0:
                low.append((case, max(values)))
        if low:
            findings.append(
                f"the reward {name!r} gives the gold answer less than 1 for {len(low)} of {len(cases)} prompts: "
                f"{_names([case for case, _ in low])}, e.g. {low[0][0].gold!r:.80} gets {low[0][1]:g}"
            )
    return findings


def _junk_findings(cases: Sequence[_Case]) -> list[str]:
    """Empty or junk answers that score as much as the gold answer."""
    wrong = [(case, beaten) for case in cases if (beaten := case.beaten_by(case.junk_scores))]
    if not wrong:
        return []
    case, (text, value) = wrong[0]
    kind = "an empty answer" if not text else f"the answer {text!r:.60}"
    return [
        f"{kind} gets {value:g} where the gold answer {case.gold!r:.60} gets {case.best_gold:g} "
        f"({len(wrong)} of {len(cases)} prompts: {_names([w[0] for w in wrong])}); "
        "such a reward teaches nothing, or the wrong thing"
    ]


def _swapped_findings(cases: Sequence[_Case]) -> list[str]:
    """Other prompts' gold answers that score as much; a few may be right by chance, most may not."""
    tried = [case for case in cases if case.swapped_scores and case.best_gold is not None]
    wrong = [(case, beaten) for case in tried if (beaten := case.beaten_by(case.swapped_scores))]
    if 2 * len(wrong) <= len(tried):
        return []
    case, (text, value) = wrong[0]
    return [
        f"the gold answer of another prompt, {text!r:.60}, gets {value:g} where the right one, {case.gold!r:.60}, gets "
        f"{case.best_gold:g} ({len(wrong)} of {len(tried)} prompts); the reward does not look at the answer"
    ]


def _constant(cases: Sequence[_Case]) -> list[str]:
    values = {score.value for case in cases for score in case.scores if score.value is not None}
    if len(values) == 1 and any(case.gold is not None for case in cases):
        return [f"the reward is constant: gold, empty and junk answers all get {values.pop():g}"]
    return []
