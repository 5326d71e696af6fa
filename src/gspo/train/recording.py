"""What a step leaves in the events: its updates in one row of metrics, and a few responses to read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.diagnostics import effective_sample_size, log_ratio_by_length, log_ratio_quantiles
from gspo.rewards.gold import gold_of
from gspo.train.step import UpdateResult
from gspo.types import RolloutGroup, TrainBatch, add_metrics, mean_metrics


def step_metrics(results: Sequence[UpdateResult], batch: TrainBatch, log_s: Tensor) -> dict[str, float]:
    """The updates of a step in one row: ratio metrics over all rows, norms as the mean over updates."""
    applied = [r for r in results if r.applied]
    metrics = {
        **mean_metrics(add_metrics([r.sums for r in applied])),
        **log_ratio_quantiles(log_s),
        **log_ratio_by_length(log_s, batch.rollouts.sequences.lengths),
        "effective_sample_size": effective_sample_size(log_s),
        **_routing_metrics(applied),
        "groups/dropped": float(_num_dropped_groups(batch)),
        "tokens/trained": float(batch.loss_mask.sum()),
        "advantage/abs_mean": float(batch.advantages.abs().mean()),
        "skipped_updates": float(len(results) - len(applied)),
    }
    for name in ("loss", "grad_norm", "learning_rate"):
        if applied:
            metrics[name] = sum(r.metrics[name] for r in applied) / len(applied)
    return metrics


def _routing_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Of all updates together; empty for a dense model."""
    stats = [r.routing for r in results if r.routing is not None]
    return functools.reduce(operator.add, stats).metrics() if stats else {}


def _num_dropped_groups(batch: TrainBatch) -> int:
    """Groups of which no row entered the loss."""
    groups = batch.rollouts.group_ids
    return len(torch.unique(groups)) - len(torch.unique(groups[batch.included]))


def logged_samples(
    groups: Sequence[RolloutGroup], batch: TrainBatch, log_s: Tensor, number: int, answer_column: str
) -> list[dict[str, Any]]:
    """A few responses of the first group that has signal, largest advantages first; empty for ``number`` 0."""
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    order = sorted(range(len(rows)), key=lambda n: (not rows[n][0].has_signal, int(batch.rollouts.group_ids[n])))
    group = [n for n in order if rows[n][0] is rows[order[0]][0]]
    group.sort(key=lambda n: -abs(float(batch.advantages[n])))
    samples = []
    for n in group[:number]:
        prompt, rollout = rows[n][0].prompt, rows[n][1]
        samples.append(
            {
                "prompt_id": prompt.id,
                "prompt": prompt.content if isinstance(prompt.content, str) else [dict(m) for m in prompt.content],
                "answer": rollout.text,
                "gold": gold_of(prompt.columns, answer_column),
                "reward": rollout.score.value,
                "components": dict(rollout.score.components),
                "ratio": float(log_s[n].exp()),
                "advantage": float(batch.advantages[n]),
                "stop_reason": str(rollout.stop_reason),
                "num_tokens": len(rollout.token_ids),
                **({} if rollout.score.failure is None else {"failure": rollout.score.failure}),
            }
        )
    return samples
