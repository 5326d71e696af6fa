"""From the groups of a step to its M updates: batch, bounds, one optimizer update for each mini-batch.

What a number that is not finite does to them is decided here; where it came from is told by ``nonfinite.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.errors import NumericalError
from gspo.train.batch import included_rows, train_batch
from gspo.train.bounds import scaled_paper_bounds
from gspo.train.nonfinite import bad_old_logprobs, first_bad_logprob
from gspo.train.parts import LoopSettings, Parts
from gspo.train.routing import StepRouting
from gspo.train.schedule import mini_batches
from gspo.train.step import UpdateResult, old_logprobs, score, update
from gspo.types import MiniBatch, RolloutBatch, RolloutGroup, TrainBatch


def prepare_batch(
    parts: Parts,
    settings: LoopSettings,
    groups: Sequence[RolloutGroup],
    rollouts: RolloutBatch,
    step: int,
    routing: StepRouting | None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Adds old and reference log-probs and advantages; and what was measured of engine and trainer.

    Raises:
        NumericalError: an old log-prob is not finite and ``non_finite`` is ``"stop"``.
        RunError: the engine's log-probs were to be used and are not the trainer's.
    """
    old, measured = old_logprobs(
        parts.policy,
        rollouts,
        choice=settings.old_logprobs,
        temperature=settings.temperature,
        bound=settings.mismatch_bound,
        num_probe_rows=settings.num_probe_rows,
        first_step=step == 1,
        cut=settings.cut,
        routing=routing,
    )
    batch = _with_advantages(parts, settings, groups, rollouts, old)
    batch, num_dropped = _without_non_finite(parts, settings, groups, batch, step)
    return batch, {**measured, "rows/non_finite": float(num_dropped)}


def _with_advantages(
    parts: Parts, settings: LoopSettings, groups: Sequence[RolloutGroup], rollouts: RolloutBatch, old: Tensor
) -> TrainBatch:
    signal = torch.tensor([group.has_signal for group in groups])[rollouts.group_ids]
    reference = None
    if parts.reference is not None:
        everything = torch.arange(len(rollouts.rewards))
        reference = score(parts.reference, rollouts, everything, settings.temperature, settings.cut)
    return train_batch(
        rollouts,
        old,
        advantage_scale=settings.advantage_scale,
        std_floor=settings.std_floor,
        included=included_rows(
            rollouts,
            signal,
            truncated=settings.truncated,
            groups_without_signal=settings.groups_without_signal,
        ),
        ref_logprobs=reference,
    )


def _without_non_finite(
    parts: Parts, settings: LoopSettings, groups: Sequence[RolloutGroup], batch: TrainBatch, step: int
) -> tuple[TrainBatch, int]:
    """Leaves out, counts and names the rows whose old log-probs are not finite.

    Raises:
        NumericalError: there is one and ``non_finite`` is ``"stop"``.
    """
    bad, sentences = bad_old_logprobs(groups, batch)
    for sentence in sentences:
        if settings.non_finite == "stop":
            raise NumericalError(f'step {step}: {sentence}; guard.non_finite = "skip" leaves such responses out')
        parts.emit("warning", message=f"step {step}: {sentence}; the response is left out", step=step)
    return (replace(batch, included=batch.included & ~bad), len(sentences)) if sentences else (batch, 0)


@dataclass(frozen=True, eq=False)
class Updated:
    """The M updates of a step."""

    results: list[UpdateResult]
    log_s: Tensor  # (N,) log s of every row at the update that it took part in
    num_skipped: int  # because of a non-finite number
    num_in_row: int  # the last so many of the run


def make_updates(
    parts: Parts,
    settings: LoopSettings,
    batch: TrainBatch,
    groups: Sequence[RolloutGroup],
    step: int,
    num_in_row: int,
    routing: StepRouting | None,
) -> Updated:
    """One update for each mini-batch; ``num_in_row`` of the run before were not made.

    Raises:
        NumericalError: a value was not finite and is not to be skipped, or too many in a row were.
    """
    objective = parts.make_objective(parts.bounds)
    log_s = torch.full((len(batch.advantages),), torch.nan)
    results: list[UpdateResult] = []
    num_skipped = 0
    for mini in mini_batches(
        batch, settings.num_mini_batches, seed=settings.seed, step=step, random_drop=settings.random_drop
    ):
        try:
            result = update(
                parts.policy,
                parts.optimizer,
                objective,
                batch,
                mini,
                temperature=settings.temperature,
                cut=settings.cut,
                kl=parts.kl,
                routing=routing,
                correction=parts.correction,
            )
        except NumericalError as error:
            num_in_row += 1
            num_skipped += 1
            result = _skipped(parts, settings, batch, groups, mini, step, error, num_in_row)
        else:
            num_in_row = 0 if result.applied else num_in_row
        log_s[mini.rows] = result.log_s
        results.append(result)
        parts.emit("update", step=step, update=parts.optimizer.update, mini_batch=mini.index, metrics=result.metrics)
    return Updated(results, log_s, num_skipped, num_in_row)


def _skipped(
    parts: Parts,
    settings: LoopSettings,
    batch: TrainBatch,
    groups: Sequence[RolloutGroup],
    mini: MiniBatch,
    step: int,
    error: NumericalError,
    num_in_row: int,
) -> UpdateResult:
    """An update that is not made: named and counted, or the end of the run."""
    where = f"step {step}, mini-batch {mini.index}"
    rows = mini.rows[batch.loss_mask[mini.rows].any(dim=1)]
    logprobs = score(parts.policy, batch.rollouts, rows, settings.temperature, settings.cut)
    message = f"{where}: {error}{first_bad_logprob(groups, batch, rows, logprobs)}"
    if settings.non_finite == "stop":
        raise NumericalError(message) from error
    if num_in_row >= settings.max_non_finite:
        raise NumericalError(f"{message}. It is number {num_in_row} in a row, guard.max_non_finite") from error
    parts.emit("warning", message=f"{message}; the update is skipped", step=step)
    parts.optimizer.zero_grad()
    metrics = {"skipped_updates": 1.0, "skipped_updates/non_finite": 1.0}
    return UpdateResult(False, metrics, {}, torch.full((len(mini.rows),), torch.nan))


def with_first_bounds(parts: Parts, rollouts: RolloutBatch) -> Parts:
    """Before anything was measured, calibration starts from the paper's bounds at this response length."""
    waiting = parts.calibration is not None and not parts.calibration.seen and parts.bounds.clip_low is None
    if not waiting or parts.paper_bounds is None:
        return parts
    return replace(
        parts, bounds=scaled_paper_bounds(parts.paper_bounds, float(rollouts.sequences.lengths.float().mean()))
    )


def calibrated(parts: Parts, batch: TrainBatch, log_s: Tensor, step: int, num_updates: int) -> Parts:
    """Adds this step to the measuring window; bounds follow the window and freeze when it is full.

    ``num_updates`` were made before the step: one that began during the warm-up of the learning rate is not measured.
    Rows with advantage 0 cannot be clipped and say nothing about the width, so they are left out. A step in which
    nothing moved outward does not count.
    """
    if parts.calibration is None or not parts.calibration.measures(num_updates):
        return parts
    told = ~torch.isnan(log_s) & (batch.advantages != 0)
    if not bool((log_s[told] * batch.advantages[told] > 0).any()):
        return parts
    calibration = parts.calibration.observe(log_s[told], batch.advantages[told])
    bounds = calibration.bounds()
    if calibration.frozen:
        parts.emit("calibration", step=step, clip_low=bounds.clip_low, clip_high=bounds.clip_high)
    return replace(parts, calibration=calibration, bounds=bounds)
