"""Rollout groups become the tensors of one step: stages 4 to 6 of the data of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo.advantages import Scale, group_advantages
from gspo.train.routing import stack_routes
from gspo.types import Metric, RolloutBatch, RolloutGroup, Sequences, TrainBatch


def rollout_batch(groups: Sequence[RolloutGroup]) -> RolloutBatch:
    """N rollouts as tensors, prompt-major. Two draws of one prompt are two groups."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = torch.tensor([len(group.rollouts) for group in groups])
    group_ids = torch.repeat_interleave(torch.arange(len(groups)), sizes)

    def padded(values: list[Tensor], fill: float) -> Tensor:
        return pad_sequence(values, batch_first=True, padding_value=fill)

    sequences = Sequences(
        prompts=tuple(torch.tensor(group.prompt.token_ids, dtype=torch.long) for group in groups),
        prompt_index=group_ids,
        token_ids=padded([r.token_ids for r in rollouts], 0),
        lengths=torch.tensor([len(r.token_ids) for r in rollouts]),
    )
    return RolloutBatch(
        sequences=sequences,
        response_mask=padded([r.response_mask for r in rollouts], False),
        rollout_logprobs=padded([r.rollout_logprobs for r in rollouts], 0.0),
        rewards=torch.tensor(
            [float("nan") if r.score.value is None else r.score.value for r in rollouts], dtype=torch.float64
        ),
        group_ids=group_ids,
        truncated=torch.tensor([r.stop_reason.truncated for r in rollouts]),
        policy_versions=torch.tensor([r.policy_version for r in rollouts]),
        routing=stack_routes([r.routing for r in rollouts]),
    )


def included_rows(
    rollouts: RolloutBatch,
    has_signal: Tensor,
    *,
    truncated: Literal["keep", "exclude"],
    groups_without_signal: Literal["keep", "drop", "refill"],
) -> Tensor:
    """(N,) bool: the rows that enter the loss, in numerator and denominator alike.

    ``has_signal`` is (N,) bool, whether the row's group has two different rewards. Unscored rows and rows
    without tokens never enter.
    """
    included = ~torch.isnan(rollouts.rewards) & rollouts.response_mask.any(dim=1)
    if truncated == "exclude":
        included &= ~rollouts.truncated
    if groups_without_signal != "keep":
        included &= has_signal
    return included


def train_batch(
    rollouts: RolloutBatch,
    old_logprobs: Tensor,
    *,
    advantage_scale: Scale,
    std_floor: float,
    included: Tensor,
    ref_logprobs: Tensor | None = None,
) -> TrainBatch:
    """Adds advantages; the statistics of a group are those of all its scored rows, before any cut."""
    advantages = group_advantages(rollouts.rewards, rollouts.group_ids, scale=advantage_scale, std_floor=std_floor)
    return TrainBatch(
        rollouts=rollouts,
        old_logprobs=old_logprobs,
        advantages=advantages.float(),
        included=included,
        ref_logprobs=ref_logprobs,
    )


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What a step's rollouts looked like, over ALL rows: what is left out of the loss still counts here."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([len(r.token_ids) for r in rollouts], dtype=torch.float64)
    values = torch.tensor([r.score.value for r in rollouts if r.score.value is not None], dtype=torch.float64)
    metrics = {
        "reward/unscored": float(len(rollouts) - len(values)),
        "groups/total": float(len(groups)),
        "groups/constant": float(sum(not group.has_signal for group in groups)),
        "length/mean": float(lengths.mean()),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
        "length/q50": float(lengths.quantile(0.5)),
        "truncated_fraction": sum(r.stop_reason.truncated for r in rollouts) / len(rollouts),
        "tokens/generated": float(lengths.sum()),
    }
    if len(values):
        metrics["reward/mean"] = float(values.mean())
        metrics["reward/std"] = float(values.std(correction=0))
    return metrics | _component_means([dict(r.score.components) for r in rollouts])


def _component_means(components: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """Mean of each reward function over the rows it applied to; only where there is more than one."""
    sums: dict[str, Metric] = {}
    for row in components:
        for name, value in row.items():
            if value is not None:
                total, count = sums.get(name, (0.0, 0.0))
                sums[name] = (total + value, count + 1)
    if len(sums) < 2:
        return {}
    return {f"reward/{name}": total / count for name, (total, count) in sums.items()}
