"""Every metric name that may be logged, and what it means. The formulas are in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class MetricInfo(NamedTuple):
    """What a logged name means. Formulas are in docs/metrics.md."""

    meaning: str
    unit: str
    levels: tuple[str, ...]  # the event types that may carry it


_RATIO_SLICES = "one slice of the responses (by mini-batch index, by quartile of length)"


def _registry() -> Mapping[str, MetricInfo]:
    rows = [
        ("reward/mean", "mean reward of the scored responses", "reward", "step evaluation"),
        ("reward/std", "standard deviation of the reward over the scored responses", "reward", "step"),
        ("reward/unscored", "responses that could not be scored", "count", "step"),
        ("reward/timeouts", "verdicts that ran into the time limit", "count", "step"),
        ("reward/*", "mean of one reward function, unweighted", "reward", "step"),
        ("engine/failures", "calls of the sampling engine that failed", "count", "step"),
        ("engine/retries", "calls of the sampling engine that were made again", "count", "step"),
        ("engine/aborted", "responses that the engine did not bring to their end; not scored", "count", "step"),
        ("groups/total", "groups of the rollout batch", "count", "step"),
        ("groups/constant", "groups whose rewards are all equal: no signal", "count", "step"),
        ("groups/dropped", "groups left out of the updates", "count", "step"),
        ("groups/refilled", "groups sampled in place of constant ones", "count", "step"),
        ("length/mean", "mean length of the responses", "tokens", "step evaluation"),
        ("length/min", "shortest response", "tokens", "step"),
        ("length/max", "longest response", "tokens", "step"),
        ("length/q50", "median length of the responses", "tokens", "step"),
        ("truncated_fraction", "share of responses that ran into max_new_tokens", "fraction", "step evaluation"),
        ("tokens/generated", "tokens that the engine sampled", "tokens", "step"),
        ("tokens/trained", "response tokens that entered a loss", "tokens", "step"),
        ("tokens/skipped_forward", "response tokens of advantage 0, which were not computed", "tokens", "update"),
        ("tokens/skipped_backward", "response tokens not differentiated: those and clipped ones", "tokens", "update"),
        ("advantage/abs_mean", "mean absolute advantage", "1", "step update"),
        ("clip_fraction/sequence", "share of responses that the clip cut", "fraction", "step update"),
        ("clip_fraction/sequence_low", "share of responses cut at the lower bound", "fraction", "step update"),
        ("clip_fraction/sequence_high", "share of responses cut at the upper bound", "fraction", "step update"),
        ("clip_fraction/token", "share of response tokens that the clip cut", "fraction", "step update"),
        ("clip_fraction/token_low", "share of response tokens cut at the lower bound", "fraction", "step update"),
        ("clip_fraction/token_high", "share of response tokens cut at the upper bound", "fraction", "step update"),
        ("clip_fraction/*", f"clip fraction over {_RATIO_SLICES}", "fraction", "step update"),
        ("clip_low", "lower clip bound in force: the ratio is cut at 1 - clip_low", "1", "step update"),
        ("clip_high", "upper clip bound in force: the ratio is cut at 1 + clip_high", "1", "step update"),
        ("log_ratio/mean", "mean of log s over the responses", "nats/token", "step update"),
        ("log_ratio/abs_mean", "mean of |log s| over the responses", "nats/token", "step update"),
        ("log_ratio/std", "standard deviation of log s over the responses", "nats/token", "step update"),
        *(
            (f"log_ratio/q{q:02d}", f"{q} % quantile of log s over the responses", "nats/token", "step update")
            for q in (1, 5, 25, 50, 75, 95, 99)
        ),
        ("log_ratio/*", f"statistic of log s over {_RATIO_SLICES}", "nats/token", "step update"),
        ("ratio/mean", "mean of s over the responses", "1", "step update"),
        ("effective_sample_size", "share of the responses that the ratios leave in effect", "fraction", "step update"),
        ("entropy", "mean entropy of the policy at response tokens", "nats/token", "step update"),
        ("kl/k3_old", "k3 estimate of KL(old || policy)", "nats/token", "step update"),
        ("kl/reference", "estimate of KL(policy || reference) that is in the loss", "nats/token", "step update"),
        ("mismatch/mean_abs", "mean |engine - trainer| log-prob at equal weights", "nats/token", "step"),
        ("mismatch/max_abs", "largest |engine - trainer| log-prob at equal weights", "nats", "step"),
        ("mismatch/k3", "k3 estimate of KL(engine || trainer) at equal weights", "nats/token", "step"),
        ("correction/weight", "mean weight that the correction gives to the advantage of a token", "1", "step update"),
        ("correction/masked", "share of response tokens whose weight is 0", "fraction", "step update"),
        ("correction/outside", "share of response tokens outside the correction's bounds", "fraction", "step update"),
        (
            "moe/drift",
            "share of chosen experts that are not in the recorded set, mean of layers",
            "fraction",
            "step update",
        ),
        ("moe/drift/*", "drift of one layer with a router", "fraction", "step update"),
        (
            "moe/changed_tokens",
            "share of tokens whose experts changed in at least one layer",
            "fraction",
            "step update",
        ),
        ("moe/changed_layers", "share of layers in which a token's experts changed", "fraction", "step update"),
        ("moe/margin", "selection score of the last chosen expert minus that of the next", "1", "step update"),
        ("moe/router_shift", "mean |change of the log score| of the recorded experts", "nats", "step update"),
        ("moe/load_max", "load of the busiest expert in even shares, mean of layers", "1", "step update"),
        ("moe/load_entropy", "entropy of the load in units of the even one, mean of layers", "1", "step update"),
        ("moe/load_idle", "share of experts that no token chose", "fraction", "step update"),
        ("moe/balance_loss", "auxiliary load-balancing loss without its coefficient", "1", "step update"),
        ("moe/log_ratio_correlation", "correlation of |log ratio| and changed layers over tokens", "1", "step update"),
        ("moe/engine_drift", "drift from the engine to the trainer at equal weights", "fraction", "step"),
        ("moe/engine_drift/*", "the same, of one layer with a router", "fraction", "step"),
        ("staleness/mean", "mean age of the sampling weights", "updates", "step update"),
        ("staleness/max", "largest age of the sampling weights", "updates", "step update"),
        ("loss", "the loss of one update (of a step: mean over its updates)", "1", "step update sft"),
        ("grad_norm", "norm of the gradient before it is clipped", "1", "step update sft"),
        ("learning_rate", "learning rate of the update", "1", "step update sft"),
        ("skipped_updates", "updates not made: no response entered the loss, or see below", "count", "step update"),
        ("skipped_updates/non_finite", "updates not made, since a number was not finite", "count", "step update"),
        ("rows/non_finite", "responses left out, since an old log-prob was not finite", "count", "step"),
        ("num_sequences", "responses that entered the loss", "count", "update"),
        ("num_tokens", "response tokens that entered the loss", "tokens", "update sft"),
        ("pass@1", "chance that one response passes, mean over prompts", "fraction", "evaluation"),
        ("pass@1/low", "lower end of the confidence interval of pass@1", "fraction", "evaluation"),
        ("pass@1/high", "upper end of the confidence interval of pass@1", "fraction", "evaluation"),
        ("pass@1/if_unscored_wrong", "pass@1 if every unscored response had failed", "fraction", "evaluation"),
        ("pass@1/if_unscored_right", "pass@1 if every unscored response had passed", "fraction", "evaluation"),
        ("pass@*", "chance that at least one of k responses passes, mean over prompts", "fraction", "evaluation"),
        ("unscored_fraction", "share of the responses that could not be scored", "fraction", "evaluation"),
        ("difference", "pass@1 minus that of the run's first evaluation, paired by prompt", "fraction", "evaluation"),
        ("difference/low", "lower end of the confidence interval of the difference", "fraction", "evaluation"),
        ("difference/high", "upper end of the confidence interval of the difference", "fraction", "evaluation"),
        ("difference/p_value", "sign-flip permutation p-value of the difference", "fraction", "evaluation"),
    ]
    return MappingProxyType(
        {name: MetricInfo(meaning, unit, tuple(levels.split())) for name, meaning, unit, levels in rows}
    )


#: Every name that may be logged. ``prefix*`` stands for any ending; a name listed in full comes first.
METRICS: Mapping[str, MetricInfo] = _registry()


def find_metric(name: str) -> MetricInfo | None:
    """The entry of a logged name: the name itself, or the longest ``prefix*`` that fits."""
    if "*" in name:
        return None
    if name in METRICS:
        return METRICS[name]
    prefixes = [p for p in METRICS if p.endswith("*") and name.startswith(p[:-1]) and len(name) >= len(p)]
    return METRICS[max(prefixes, key=len)] if prefixes else None
