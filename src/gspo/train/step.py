"""The training step: old log-probs, then M updates. The mathematics is the objective's; this file only sums.

For each mini-batch the denominator is counted once, before any cut; each micro-batch contributes a sum. So the
gradient is the same for every micro-batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gspo.diagnostics import log_ratio_quantiles, mismatch, sequence_log_ratio
from gspo.errors import RunError
from gspo.objectives.base import Objective
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.logprobs import sequence_logprobs
from gspo.train.optimizer import Optimizer
from gspo.train.schedule import micro_batches
from gspo.types import Metric, MiniBatch, RolloutBatch, TrainBatch, add_metrics, mean_metrics


@dataclass(frozen=True)
class MicroBatching:
    """How many rows or tokens go through one forward and backward."""

    micro_batch_size: int | None
    micro_batch_tokens: int


@dataclass(frozen=True, eq=False)
class UpdateResult:
    """What one optimizer update did. ``applied`` is False when no row entered the loss."""

    applied: bool
    metrics: dict[str, float]
    sums: dict[str, Metric]  # the objective's metrics before division, to add up over a step
    log_s: Tensor  # (n,) float32, log sequence ratio of the mini-batch's rows, nan for rows left out


@torch.no_grad()
def score(policy: CausalPolicy, batch: RolloutBatch, rows: Tensor, temperature: float, cut: MicroBatching) -> Tensor:
    """(n, T) float32 log-probs of the given rows under the policy as it is now, 0 in padding."""
    result = torch.zeros(len(rows), batch.response_mask.shape[1])
    done = 0
    for micro in _cut(batch, rows, cut):
        tokens = sequence_logprobs(policy, batch.sequences.rows(micro), temperature)
        result[done : done + len(micro), : tokens.logprobs.shape[1]] = tokens.logprobs.cpu()
        done += len(micro)
    return result


def old_logprobs(
    policy: CausalPolicy,
    batch: RolloutBatch,
    *,
    choice: Literal["auto", "engine", "recompute"],
    temperature: float,
    bound: float,
    num_probe_rows: int,
    first_step: bool,
    cut: MicroBatching,
) -> tuple[Tensor, dict[str, float]]:
    """The denominator of the ratio, (N, T) float32, and the measured mismatch of engine and trainer.

    ``engine`` and ``auto`` compare the engine's log-probs with the trainer's on a probe of rows spread over the
    batch. ``auto`` trusts the engine while the mean absolute difference is at most ``bound`` and recomputes
    otherwise; ``recompute`` compares all rows, since it has them.

    Raises:
        RunError: before the first step, ``engine`` was asked for and the mismatch is above the bound.
    """
    mask = batch.response_mask
    everything = torch.arange(len(mask))
    rows = everything
    if choice != "recompute":
        rows = torch.linspace(0, len(mask) - 1, min(num_probe_rows, len(mask))).round().long().unique()
    scored = score(policy, batch, rows, temperature, cut)
    found = mismatch(batch.rollout_logprobs[rows], scored, mask[rows])
    trusted = found["mismatch/mean_abs"] <= bound
    if choice == "engine" and first_step and not trusted:
        raise RunError(
            f"the engine's log-probs differ from the trainer's by {found['mismatch/mean_abs']:.2e} on average, above "
            f'train.mismatch_bound = {bound:.2e}; with train.old_logprobs = "engine" every ratio would start wrong. '
            'Use "auto" or "recompute", or find what differs (dtype, temperature, weights)'
        )
    if choice == "engine" or (choice == "auto" and trusted):
        return batch.rollout_logprobs, found
    if choice == "auto":
        scored = score(policy, batch, everything, temperature, cut)
    return scored, found


def update(
    policy: CausalPolicy,
    optimizer: Optimizer,
    objective: Objective,
    batch: TrainBatch,
    mini: MiniBatch,
    *,
    temperature: float,
    cut: MicroBatching,
    kl: KLPenalty | None = None,
) -> UpdateResult:
    """One optimizer update on one mini-batch.

    Raises:
        NumericalError: a log-prob, an advantage or the gradient is not finite; the weights are left unchanged.
    """
    optimizer.zero_grad()
    denominator = mini.counts[objective.unit]
    if denominator == 0:
        return UpdateResult(False, {"skipped_updates": 1.0}, {}, torch.full((len(mini.rows),), torch.nan))
    loss_sum = 0.0
    kl_sum = 0.0
    parts: list[dict[str, Metric]] = []
    log_s: list[Tensor] = []
    enters = batch.loss_mask[mini.rows].any(dim=1)
    for rows in _cut(batch.rollouts, mini.rows[enters], cut):
        tokens = sequence_logprobs(policy, batch.rollouts.sequences.rows(rows), temperature, with_entropy=True)
        width = tokens.logprobs.shape[1]
        old, mask, advantages = _on(tokens.logprobs.device, batch.old_logprobs, batch.loss_mask, batch.advantages)
        old, mask, advantages = old[rows, :width], mask[rows, :width], advantages[rows]
        output = objective(tokens.logprobs, old, advantages, mask)
        loss = output.loss_sum / denominator
        loss_sum += float(output.loss_sum.detach())
        metrics = dict(output.metrics)
        if kl is not None and batch.ref_logprobs is not None:
            reference = batch.ref_logprobs.to(mask.device)[rows, :width]
            penalty = kl(tokens.logprobs, reference, advantages, mask)
            loss = loss + penalty.loss_sum / denominator
            kl_sum += float(penalty.loss_sum.detach())
            metrics |= penalty.metrics
        loss.backward()
        assert tokens.entropy is not None
        metrics["entropy"] = (float(tokens.entropy[mask].sum()), int(mask.sum()))
        parts.append(metrics)
        log_s.append(sequence_log_ratio(tokens.logprobs.detach(), old, mask).cpu())
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.apply()
    sums = add_metrics(parts)
    ratios = torch.full((len(mini.rows),), torch.nan)
    ratios[enters] = torch.cat(log_s)
    return UpdateResult(
        applied=True,
        metrics={
            **mean_metrics(sums),
            **log_ratio_quantiles(ratios),
            "loss": (loss_sum + kl_sum) / denominator,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "num_sequences": float(mini.counts["sequence"]),
            "num_tokens": float(mini.counts["token"]),
        },
        sums=sums,
        log_s=ratios,
    )


def _cut(batch: RolloutBatch, rows: Tensor, cut: MicroBatching) -> list[Tensor]:
    return micro_batches(
        batch.sequences,
        rows,
        micro_batch_size=cut.micro_batch_size,
        micro_batch_tokens=cut.micro_batch_tokens,
    )


def _on(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(device) for t in tensors)
