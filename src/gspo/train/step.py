"""The training step: old log-probs, then M updates. The mathematics is the objective's; this file only sums.

For each mini-batch the denominator is counted once, before any cut; each micro-batch contributes a sum. So the
gradient is the same for every micro-batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gspo.diagnostics import log_ratio_quantiles, mismatch, sequence_log_ratio
from gspo.errors import RunError
from gspo.objectives.base import Objective
from gspo.objectives.correction import Correction, corrected_advantages
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.logprobs import sequence_logprobs
from gspo.policy.moe.drift import RoutingStats
from gspo.train.optimizer import Optimizer
from gspo.train.routing import StepRouting, token_log_ratio
from gspo.train.schedule import micro_batches
from gspo.train.skipping import Skipped, rows_to_differentiate, with_signal
from gspo.types import Metric, MiniBatch, RolloutBatch, Sequences, TrainBatch, add_metrics, mean_metrics


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
    routing: RoutingStats | None = None  # of a mixture of experts, where it is measured


@torch.no_grad()
def score(
    policy: CausalPolicy,
    batch: RolloutBatch,
    rows: Tensor,
    temperature: float,
    cut: MicroBatching,
    routing: StepRouting | None = None,
) -> Tensor:
    """(n, T) float32 log-probs of the given rows under the policy as it is now, 0 in padding.

    routing: of the step whose old log-probs these are; it forces and records what its settings say.
    """
    result = torch.zeros(len(rows), batch.response_mask.shape[1])
    done = 0
    for micro in _cut(batch, rows, cut):
        asked = {} if routing is None else routing.scoring(micro)
        tokens = sequence_logprobs(policy, batch.sequences.rows(micro), temperature, **asked)
        if routing is not None:
            routing.scored(micro, asked, batch.response_mask[micro])
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
    routing: StepRouting | None = None,
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
    scored = score(policy, batch, rows, temperature, cut, routing)
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
        scored = score(policy, batch, everything, temperature, cut, routing)
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
    routing: StepRouting | None = None,
    correction: Correction | None = None,
) -> UpdateResult:
    """One optimizer update on one mini-batch.

    Rows whose gradient is exactly zero are not differentiated (``train/skipping.py``): log ratios and entropy are those
    of the rows that were computed, ``log_s`` is nan for the others.

    Args:
        routing: of the step, for a mixture of experts whose routes are replayed or measured.
        correction: weighs the advantages for data of another engine.

    Raises:
        NumericalError: a log-prob, an advantage or the gradient is not finite; the weights are left unchanged.
    """
    optimizer.zero_grad()
    denominator = mini.counts[objective.unit]
    if denominator == 0:
        return UpdateResult(False, {"skipped_updates": 1.0}, {}, torch.full((len(mini.rows),), torch.nan))
    parts: list[_Summary] = []
    routed: RoutingStats | None = None
    skipped = Skipped()
    enters = batch.loss_mask[mini.rows].any(dim=1)
    penalised = (kl is not None and batch.ref_logprobs is not None) or (routing is not None and routing.balances)
    computed = enters & with_signal(batch.advantages[mini.rows], penalised)
    if routing is not None:
        routing.begin_update(mini.rows[enters], batch.rollouts.sequences.lengths, batch.loss_mask)
    left_out = mini.rows[enters & ~computed]
    skipped.rows, skipped.tokens = len(left_out), int(batch.loss_mask[left_out].sum())
    per_token = denominator / max(1, mini.counts["token"])  # of a sum over tokens among sums over the objective's unit
    setting = _Setting(policy, objective, batch, temperature, kl, routing, correction, penalised, per_token)
    for rows in _cut(batch.rollouts, mini.rows[computed], cut):
        part = _differentiate(setting, rows, denominator)
        parts.append(part)
        skipped.backward_tokens += part.skipped_tokens
        routed = part.routed if routed is None or part.routed is None else routed + part.routed
    _fill_gradients(policy)
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.apply()
    sums = skipped.counted(add_metrics([part.metrics for part in parts]))
    ratios = torch.full((len(mini.rows),), torch.nan)
    if parts:
        ratios[computed] = torch.cat([part.log_s for part in parts])
    return UpdateResult(
        applied=True,
        metrics={
            **mean_metrics(sums),
            **log_ratio_quantiles(ratios),
            **({} if routed is None else routed.metrics()),
            **skipped.metrics(),
            "loss": sum(part.loss_value for part in parts) / denominator,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "num_sequences": float(mini.counts["sequence"]),
            "num_tokens": float(mini.counts["token"]),
        },
        sums=sums,
        log_s=ratios,
        routing=routed,
    )


@dataclass(frozen=True, eq=False)
class _Setting:
    """What all micro-batches of an update share."""

    policy: CausalPolicy
    objective: Objective
    batch: TrainBatch
    temperature: float
    kl: KLPenalty | None
    routing: StepRouting | None
    correction: Correction | None
    penalised: bool  # every row has a gradient, whatever its advantage and its ratio
    per_token: float


@dataclass(frozen=True, eq=False)
class _Micro:
    """One micro-batch after its forward pass."""

    loss: Tensor  # (), a sum, with gradient
    metrics: dict[str, Metric]
    sequences: Sequences
    asked: dict[str, Any]
    logprobs: Tensor  # (n, T), as are the next three; advantages may be (n,)
    old_logprobs: Tensor
    mask: Tensor
    advantages: Tensor


@dataclass(frozen=True, eq=False)
class _Summary:
    """What is left of a micro-batch once its graph is gone."""

    loss_value: float
    metrics: dict[str, Metric]
    log_s: Tensor  # (n,)
    routed: RoutingStats | None
    skipped_tokens: int  # response tokens that needed no backward pass


def _forward(setting: _Setting, rows: Tensor) -> _Micro:
    """Log-probs and loss of rows of the batch, with gradient."""
    batch, routing = setting.batch, setting.routing
    asked = {} if routing is None else routing.training(rows)
    sequences = batch.rollouts.sequences.rows(rows)
    tokens = sequence_logprobs(setting.policy, sequences, setting.temperature, with_entropy=True, **asked)
    width = tokens.logprobs.shape[1]
    old, mask, advantages = _on(
        tokens.logprobs.device, batch.old_logprobs[rows, :width], batch.loss_mask[rows, :width], batch.advantages[rows]
    )
    weighed: dict[str, Metric] = {}
    if setting.correction is not None:
        (engine,) = _on(mask.device, batch.rollouts.rollout_logprobs[rows, :width])
        weights, weighed = setting.correction.weights(tokens.logprobs, old, engine, advantages, mask)
        advantages = corrected_advantages(advantages, weights)
    output = setting.objective(tokens.logprobs, old, advantages, mask)
    metrics = {**output.metrics, **weighed}
    loss = output.loss_sum
    if setting.kl is not None and batch.ref_logprobs is not None:
        (reference,) = _on(mask.device, batch.ref_logprobs[rows, :width])
        penalty = setting.kl(tokens.logprobs, reference, advantages, mask)
        loss = loss + penalty.loss_sum
        metrics |= penalty.metrics
    if routing is not None and (balance := routing.balance_loss(asked, mask)) is not None:
        loss = loss + setting.per_token * balance[0]
        metrics["moe/balance_loss"] = balance[1]
    assert tokens.entropy is not None
    metrics["entropy"] = (float(tokens.entropy[mask].sum()), int(mask.sum()))
    return _Micro(loss, metrics, sequences, asked, tokens.logprobs, old, mask, advantages)


def _differentiate(setting: _Setting, rows: Tensor, denominator: int) -> _Summary:
    """Adds the gradient of these rows' loss / denominator."""
    micro = _forward(setting, rows)
    log_s = sequence_log_ratio(micro.logprobs.detach(), micro.old_logprobs, micro.mask).cpu()
    routed = None
    if setting.routing is not None:
        ratio = token_log_ratio(micro.logprobs, micro.old_logprobs, micro.mask)
        routed = setting.routing.trained(rows, micro.asked, micro.sequences, micro.mask, ratio)
    kept = None
    if not setting.penalised:
        kept = rows_to_differentiate(
            setting.objective, micro.logprobs, micro.old_logprobs, micro.advantages, micro.mask
        )
    loss_value, metrics = float(micro.loss.detach()), micro.metrics
    if kept is None:
        (micro.loss / denominator).backward()
        return _Summary(loss_value, metrics, log_s, routed, 0)
    skipped = int(micro.mask.sum()) - int(micro.mask.cpu()[kept].sum())
    del micro  # its graph is not needed, and the next one takes as much memory
    if len(kept):
        (_forward(setting, rows[kept]).loss / denominator).backward()
    return _Summary(loss_value, metrics, log_s, routed, skipped)


def _fill_gradients(policy: CausalPolicy) -> None:
    """A gradient of zero where nothing was differentiated: AdamW moves by its moments all the same."""
    for parameter in policy.model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _cut(batch: RolloutBatch, rows: Tensor, cut: MicroBatching) -> list[Tensor]:
    return micro_batches(
        batch.sequences,
        rows,
        micro_batch_size=cut.micro_batch_size,
        micro_batch_tokens=cut.micro_batch_tokens,
    )


def _on(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(device) for t in tensors)
