"""What is reported of a benchmark: the common statistics and everything that says what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gspo.errors import ConfigError
from gspo.evals.base import ROUNDING, Outcome, pass_metrics
from gspo.evals.benchmark import Answer, Benchmark, Findings, Grade, Grader, Imported, ProblemResult, digest
from gspo.evals.bootstrap import bootstrap_interval
from gspo.evals.sampling import Sampler
from gspo.evals.statistics import measurement_error, standard_error
from gspo.types import StopReason

#: Of evaluation.json; readers refuse others.
FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What is computed from the grades."""

    k: tuple[int, ...] = (1,)
    confidence: float = 0.95
    seed: int = 0  # of the bootstrap

    def check(self, num_samples: int) -> None:
        """Raises ConfigError where pass@k asks for more samples than there are, or the confidence is none."""
        for wanted in self.k:
            if not 1 <= wanted <= num_samples:
                raise ConfigError(
                    f"pass@{wanted} needs at least {wanted} samples per problem and there are {num_samples}; raise "
                    "--num-samples or lower --k"
                )
        if not 0 < self.confidence < 1:
            raise ConfigError(f"--confidence is {self.confidence}; it lies strictly between 0 and 1, e.g. 0.95")


def make_result(
    benchmark: Benchmark,
    imported: Imported,
    results: Sequence[ProblemResult],
    findings: Findings,
    sampler: Sampler,
    grader: Grader,
    settings: Settings,
    identity: Mapping[str, str],
) -> dict[str, Any]:
    """The content of evaluation.json, in JSON's types."""
    metrics = grade_metrics(results, sampler.num_samples, settings)
    return {
        "format": FORMAT,
        "kind": "benchmark",
        "name": benchmark.name,
        "title": benchmark.title,
        "confidence": settings.confidence,
        "num_prompts": len(results),
        "num_samples": sampler.num_samples,
        "metrics": {**metrics, **answer_metrics(results), **findings.metrics},
        "figures": [asdict(figure) for figure in findings.figures],
        "tables": [asdict(table) for table in findings.tables],
        "notes": [*imported.notes, *findings.notes],
        "problems": [_problem(result, sampler.num_samples) for result in results],
        "data": {"layout": imported.layout, "digest": imported.digest, **imported.facts},
        "judge": {"policy": dict(grader.policy), "digest": digest(grader.policy)},
        **sampler.facts,
        "identity": dict(identity),
    }


def grade_metrics(results: Sequence[ProblemResult], num_samples: int, settings: Settings) -> dict[str, float]:
    """The statistics of the grade, and of each component under ``name/``."""
    metrics = cell_metrics([[g.value for g in r.grades] for r in results], num_samples, settings)
    names = dict.fromkeys(name for r in results for g in r.grades for name in g.components)
    for name in names:
        cells = [[g.components.get(name) for g in r.grades] for r in results]
        metrics |= {f"{name}/{key}": value for key, value in cell_metrics(cells, num_samples, settings).items()}
    return metrics


def cell_metrics(
    cells: Sequence[Sequence[float | None]], num_samples: int, settings: Settings | None = None
) -> dict[str, float]:
    """pass@1 with its errors and intervals, pass@k, and what unscored and missing responses could change.

    Args:
        cells: per problem, one value per response: 1 or more is a pass, None could not be graded; fewer than
            ``num_samples`` are missing.
    """
    settings = settings or Settings()
    outcomes = [_outcome(str(index), values, num_samples) for index, values in enumerate(cells)]
    metrics = pass_metrics(outcomes, num_samples, settings.k, settings.confidence)
    missing = sum(num_samples - len(values) for values in cells)
    total = num_samples * len(cells)
    metrics["missing_fraction"] = missing / total
    metrics["unscored_fraction"] = sum(value is None for values in cells for value in values) / total
    scored = [outcome for outcome in outcomes if outcome.num_scored]
    rates = [outcome.rate for outcome in scored]
    if rates:
        drawn = bootstrap_interval(rates, settings.confidence, seed=settings.seed) if len(rates) > 1 else None
        metrics["pass@1/standard_error"] = standard_error(rates)
        metrics["pass@1/measurement_error"] = measurement_error([(o.num_scored, o.num_passed) for o in scored])
        metrics["pass@1/bootstrap_low"] = drawn.low if drawn else math.nan
        metrics["pass@1/bootstrap_high"] = drawn.high if drawn else math.nan
    return metrics


def _outcome(name: str, values: Sequence[float | None], num_samples: int) -> Outcome:
    """A missing response counts as one that could not be graded: the bounds hold for both."""
    known = [value for value in values if value is not None]
    passed = sum(value >= 1 - ROUNDING for value in known)
    return Outcome(name, len(known), passed, num_samples - len(known))


def answer_metrics(results: Sequence[ProblemResult]) -> dict[str, float]:
    """Shares of responses that state no answer or were cut off, and lengths; cut-off and length only where known."""
    grades = [grade for result in results for grade in result.grades]
    answers = [answer for result in results for answer in result.answers]
    metrics: dict[str, float] = {}
    if grades:
        metrics["unanswered_fraction"] = sum(not grade.answered for grade in grades) / len(grades)
    reasons = [answer.stop_reason for answer in answers if answer.stop_reason is not None]
    if reasons:
        metrics["truncated_fraction"] = sum(reason == StopReason.LENGTH for reason in reasons) / len(reasons)
    lengths = [answer.num_tokens for answer in answers if answer.num_tokens is not None]
    if lengths:
        metrics["length/mean"] = sum(lengths) / len(lengths)
    return metrics


def _problem(result: ProblemResult, num_samples: int) -> dict[str, Any]:
    outcome = _outcome(result.problem.id, [grade.value for grade in result.grades], num_samples)
    fields: dict[str, Any] = {
        "id": result.problem.id,
        "place": result.problem.place,
        "date": result.problem.date,
        "num_scored": outcome.num_scored,
        "num_passed": outcome.num_passed,
        "num_unscored": sum(grade.value is None for grade in result.grades),
        "num_missing": num_samples - len(result.grades),
        "num_truncated": sum(_truncated(answer) for answer in result.answers),
        "verdicts": dict(Counter(grade.verdict for grade in result.grades).most_common()),
    }
    components = _components(result.grades)
    return {**fields, "components": components} if components else fields


def _truncated(answer: Answer) -> bool:
    return answer.stop_reason == StopReason.LENGTH


def _components(grades: Sequence[Grade]) -> dict[str, list[int]]:
    """(scored, passed) by component."""
    found: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for grade in grades for name in grade.components):
        values = [grade.components.get(name) for grade in grades]
        known = [value for value in values if value is not None]
        found[name] = [len(known), sum(value >= 1 - ROUNDING for value in known)]
    return found
