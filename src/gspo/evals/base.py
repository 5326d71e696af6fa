"""Evaluation: several responses to each held-out prompt, and what they say about the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gspo.errors import ConfigError, DataError
from gspo.evals.passk import pass_at_k_mean
from gspo.evals.statistics import Interval, PairedDifference, mean_interval, paired_difference
from gspo.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from gspo.rewards.base import RewardSet
    from gspo.rollout.base import Engine, SamplingParams

#: A weighted sum of rewards that should be exactly the threshold may miss it by rounding.
ROUNDING = 1e-9


class Collect(Protocol):
    """Samples and scores ``group_size`` responses to each prompt (:func:`gspo.envs.runner.collect`)."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        engine: Any,
        params: Any,
        reward_set: Any,
        *,
        step: int,
        seed: int,
        group_size: int,
        decode: Callable[[Sequence[int]], str],
        purpose: str = "sample",
    ) -> tuple[list[RolloutGroup], dict[str, float]]: ...


@dataclass(frozen=True)
class Outcome:
    """What became of the responses to one prompt."""

    prompt_id: str
    num_scored: int
    num_passed: int
    num_unscored: int = 0

    @property
    def rate(self) -> float:
        """Share of the scored responses that passed; nan if none could be scored."""
        return self.num_passed / self.num_scored if self.num_scored else math.nan


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation.

    A response that could not be scored counts neither as passed nor as failed: it is left out of its prompt's
    rate, a prompt without any scored response is left out of the mean, and the share of such responses is
    reported together with what pass@1 would be had all of them failed or passed.
    """

    name: str
    step: int
    outcomes: tuple[Outcome, ...]  # in the order of the prompts
    num_samples: int  # responses per prompt
    confidence: float
    metrics: dict[str, float]  # names as in gspo.events.METRICS
    seconds: dict[str, float] = field(default_factory=dict)
    groups: tuple[RolloutGroup, ...] = field(default=(), repr=False)

    def event_fields(self) -> dict[str, Any]:
        """The fields of an evaluation event, except ``step``."""
        return {
            "name": self.name,
            "metrics": self.metrics,
            "num_prompts": len(self.outcomes),
            "num_samples": self.num_samples,
            "confidence": self.confidence,
            "outcomes": [(outcome.num_scored, outcome.num_passed) for outcome in self.outcomes],
        }

    def difference_from(self, earlier: EvaluationResult, *, seed: int = 0) -> PairedDifference:
        """This minus ``earlier``, paired by prompt over the prompts that both could score; nan if there are none.

        Raises:
            ConfigError: other prompts.
        """
        mine, others = self.outcomes, earlier.outcomes
        if [o.prompt_id for o in mine] != [o.prompt_id for o in others]:
            raise ConfigError(
                f"evaluations {earlier.name!r} and {self.name!r} are of different prompts; cannot pair them"
            )
        pairs = [(b.rate, a.rate) for a, b in zip(mine, others, strict=True) if a.num_scored and b.num_scored]
        if not pairs:  # verifiers that could judge nothing do not end the run
            return PairedDifference(math.nan, math.nan, math.nan, math.nan, 0, self.confidence)
        return paired_difference(
            [before for before, _ in pairs], [after for _, after in pairs], confidence=self.confidence, seed=seed
        )

    def difference_metrics(self, earlier: EvaluationResult, *, seed: int = 0) -> dict[str, float]:
        """:meth:`difference_from` under the names that events and reports use."""
        found = self.difference_from(earlier, seed=seed)
        return {
            "difference": found.difference,
            "difference/low": found.low,
            "difference/high": found.high,
            "difference/p_value": found.p_value,
        }


def evaluate(
    prompts: Sequence[Prompt],
    engine: Engine,
    params: SamplingParams,
    reward_set: RewardSet,
    *,
    num_samples: int,
    decode: Callable[[Sequence[int]], str],
    k: Sequence[int] = (1,),
    threshold: float = 1.0,
    confidence: float = 0.95,
    seed: int = 0,
    step: int = 0,
    name: str = "held_out",
    collect: Collect | None = None,
) -> EvaluationResult:
    """Samples ``num_samples`` responses to each prompt; a response passes when its reward is at least ``threshold``.

    Args:
        k: pass@k to report beside pass@1; each at most ``num_samples``.
        seed: of the samples; they depend on it, on ``step`` and on the prompt only.
        collect: who samples and scores; :func:`gspo.envs.runner.collect` if left out.

    Raises:
        ConfigError: k above ``num_samples``, found before anything is sampled.
        DataError: no prompts.
    """
    if not prompts:
        raise DataError("there are no prompts to evaluate on")
    for wanted in k:
        if not 1 <= wanted <= num_samples:
            raise ConfigError(
                f"pass@{wanted} needs at least {wanted} samples per prompt and eval.num_samples is {num_samples}; "
                "raise eval.num_samples or lower eval.k"
            )
    if collect is None:
        from gspo.envs.runner import collect as collect_groups

        collect = collect_groups
    groups, seconds = collect(
        prompts,
        engine,
        params,
        reward_set,
        step=step,
        seed=seed,
        group_size=num_samples,
        decode=decode,
        purpose="evaluation",
    )
    outcomes = tuple(outcome_of(group, threshold) for group in groups)
    metrics = pass_metrics(outcomes, num_samples, k, confidence) | _response_metrics(groups)
    return EvaluationResult(name, step, outcomes, num_samples, confidence, metrics, dict(seconds), tuple(groups))


def outcome_of(group: RolloutGroup, threshold: float) -> Outcome:
    """Counts the responses of a group: scored, passed, unscored."""
    values = [rollout.score.value for rollout in group.rollouts]
    scored = [value for value in values if value is not None]
    passed = sum(value >= threshold - ROUNDING * max(1.0, abs(threshold)) for value in scored)
    return Outcome(group.prompt.id, len(scored), passed, len(values) - len(scored))


def pass_metrics(
    outcomes: Sequence[Outcome], num_samples: int, k: Sequence[int] = (1,), confidence: float = 0.95
) -> dict[str, float]:
    """pass@1 with its interval, pass@k, and what unscored responses could change.

    pass@k is the mean over the prompts with at least k scored responses; where there is none it is left out.
    With no scored response at all pass@1 and its interval are nan.
    """
    scored = [outcome for outcome in outcomes if outcome.num_scored]
    per_prompt = sum(o.num_scored for o in scored) / len(scored) if scored else 0.0
    interval = (
        mean_interval([o.rate for o in scored], per_prompt, confidence)
        if scored
        else Interval(math.nan, math.nan, math.nan, confidence)
    )
    metrics = {"pass@1": interval.value, "pass@1/low": interval.low, "pass@1/high": interval.high}
    for wanted in sorted(set(k) - {1}):
        counts = [(o.num_scored, o.num_passed) for o in outcomes if o.num_scored >= wanted]
        if counts:
            metrics[f"pass@{wanted}"] = pass_at_k_mean(counts, wanted)
    unscored = sum(o.num_unscored for o in outcomes)
    metrics["unscored_fraction"] = unscored / (num_samples * len(outcomes))
    if unscored:
        totals = [o.num_scored + o.num_unscored for o in outcomes]
        worst = [o.num_passed / n for o, n in zip(outcomes, totals, strict=True)]
        best = [(o.num_passed + o.num_unscored) / n for o, n in zip(outcomes, totals, strict=True)]
        metrics["pass@1/if_unscored_wrong"] = sum(worst) / len(worst)
        metrics["pass@1/if_unscored_right"] = sum(best) / len(best)
    return metrics


def _response_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.score.value for rollout in rollouts if rollout.score.value is not None]
    metrics = {
        "truncated_fraction": sum(rollout.stop_reason.truncated for rollout in rollouts) / len(rollouts),
        "length/mean": sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts),
    }
    if rewards:
        metrics["reward/mean"] = sum(rewards) / len(rewards)
    return metrics
