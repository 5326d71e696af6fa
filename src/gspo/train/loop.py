"""The loop: prompts -> groups -> batch -> M updates -> evaluation. Everything measured goes to the events.

The loop knows no file and no screen: it calls ``emit(kind, **fields)`` and ``phase(name, step)``; what it evaluates
and where it saves are callables too. What one step hands to the next, beside the weights, is a ``Progress``: a run that
is continued starts from the one of its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gspo.advantages import Scale
from gspo.errors import NumericalError, RunError
from gspo.objectives.base import Objective
from gspo.objectives.correction import Correction
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy
from gspo.train.batch import included_rows, rollout_batch, rollout_metrics, train_batch
from gspo.train.bounds import Bounds, Calibration, scaled_paper_bounds
from gspo.train.checkpoint import CheckpointError
from gspo.train.guard import Alarm, CollapseError, Guard
from gspo.train.nonfinite import bad_old_logprobs, first_bad_logprob
from gspo.train.optimizer import Optimizer
from gspo.train.progress import Evaluation, Progress
from gspo.train.recording import logged_samples, step_metrics
from gspo.train.routing import RoutingSettings, StepRouting
from gspo.train.schedule import mini_batches
from gspo.train.step import MicroBatching, UpdateResult, old_logprobs, score, update
from gspo.types import MiniBatch, Prompt, RolloutBatch, RolloutGroup, TrainBatch


class StoppedError(RunError):
    """Somebody asked the run to end (SIGINT, SIGTERM); it can be continued."""

    exit_status = 3


class Collect(Protocol):
    """Samples and scores one group per prompt; ``first_draw`` tells later rounds of a step apart."""

    def __call__(
        self, prompts: Sequence[Prompt], step: int, first_draw: int = 0
    ) -> tuple[list[RolloutGroup], dict[str, float]]: ...


@dataclass(frozen=True)
class LoopSettings:
    """The schedule of a run; the names are the recipe's."""

    seed: int
    num_steps: int
    prompts_per_step: int
    num_mini_batches: int
    cut: MicroBatching
    temperature: float
    old_logprobs: Literal["auto", "engine", "recompute"]
    mismatch_bound: float
    groups_without_signal: Literal["keep", "drop", "refill"]
    max_refills: int
    truncated: Literal["keep", "exclude"]
    advantage_scale: Scale
    std_floor: float
    eval_every: int
    checkpoint_every: int
    num_logged_samples: int
    answer_column: str = "answer"  # shown as gold beside the logged samples
    num_probe_rows: int = 8
    non_finite: Literal["stop", "skip"] = "stop"
    max_non_finite: int = 3
    reaction: Literal["warn", "stop"] = "warn"


@dataclass(frozen=True, eq=False)
class Parts:
    """Everything that a run consists of, made by ``launch``."""

    policy: CausalPolicy
    optimizer: Optimizer
    next_prompts: Callable[[int], list[Prompt]]
    cursor: Callable[[], Mapping[str, Any]]  # position in the prompts, as JSON
    collect: Collect
    make_objective: Callable[[Bounds], Objective]
    bounds: Bounds
    paper_bounds: tuple[float, float] | None  # of the objective; None if it does not clip
    set_policy_version: Callable[[int], None]  # the engine samples with these weights from now on
    evaluate: Callable[[int], Evaluation] | None  # step -> its evaluation; None without held-out prompts
    save: Callable[[Progress], str]  # a checkpoint to continue from -> its path; writes none that is there already
    save_partial: Callable[[int], str]  # the weights of a step that broke off between its updates
    events_size: Callable[[], int]  # bytes of the events so far
    check_stop: Callable[[], None]  # raises StoppedError
    num_timeouts: Callable[[], int]  # verdicts that ran into their limit so far
    emit: Callable[..., None]
    phase: Callable[[str, int], None]
    guard: Guard | None = None  # detectors of collapse
    calibration: Calibration | None = None
    kl: KLPenalty | None = None
    reference: CausalPolicy | None = None  # frozen copy of the policy at the start, for the KL term
    correction: Correction | None = None  # for data of another engine
    routing: RoutingSettings | None = None  # of a mixture of experts


@dataclass
class Clock:
    """Wall-clock seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Any:
        start = time.perf_counter()
        yield
        self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value


@dataclass(frozen=True, eq=False)
class Collected:
    """The groups of one step and what filling it took."""

    groups: list[RolloutGroup]
    num_refilled: int


def run(parts: Parts, settings: LoopSettings, progress: Progress | None = None) -> Progress:
    """Trains up to ``num_steps`` rollout batches; returns where it ended, the first and last evaluation included.

    Args:
        progress: of the checkpoint whose weights, optimizer state and prompt position ``parts`` already have.

    Raises:
        StoppedError: at a safe point after somebody asked for it; whatever ends the run early, a checkpoint of the
            last finished step is left, and where updates of another step were made, its weights to look at.
        CollapseError: a detector of the guard fired and ``reaction`` is ``"stop"``.
        NumericalError: a value was not finite and is not to be skipped, or too many in a row were.
    """
    if progress is None:
        progress = Progress(0, 0, parts.cursor(), parts.bounds, parts.calibration, parts.events_size())
    parts = replace(parts, bounds=progress.bounds, calibration=progress.calibration)
    try:
        progress = _finish_step(parts, settings, progress)
        while progress.step < settings.num_steps:
            parts.check_stop()
            parts, progress = _one_step(parts, settings, progress)
            progress = _finish_step(parts, settings, progress)
    except BaseException:
        _save_what_there_is(parts, progress)
        raise
    return progress


def _finish_step(parts: Parts, settings: LoopSettings, progress: Progress) -> Progress:
    """The evaluation and the checkpoint that are due after a step, as far as they are not done."""
    step, ends = progress.step, progress.step == settings.num_steps
    if (step == 0 or ends or _is_due(step, settings.eval_every)) and not progress.evaluated:
        progress = _evaluate(parts, progress)
    if step and (ends or _is_due(step, settings.checkpoint_every)):
        parts.phase("checkpoint", step)
        parts.emit("checkpoint", step=step, path=parts.save(progress))
        progress = replace(progress, saved=True)
    if progress.alarms and settings.reaction == "stop" and not ends:
        raise CollapseError(
            f'stopped after step {step}, since guard.reaction is "stop": {"; ".join(progress.alarms)}. '
            "gspo doctor shows the evidence and the usual remedies"
        )
    return progress


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _save_what_there_is(parts: Parts, progress: Progress) -> None:
    """A run that ends early leaves the last finished step; a disk that is full leaves the checkpoints before it."""
    try:
        if parts.optimizer.update > progress.num_updates:
            parts.emit("checkpoint", step=progress.step + 1, path=parts.save_partial(progress.step + 1))
        elif progress.step and not progress.saved:
            parts.emit("checkpoint", step=progress.step, path=parts.save(progress))
    except CheckpointError as error:
        parts.emit("warning", message=str(error))


def _evaluate(parts: Parts, progress: Progress) -> Progress:
    """Evaluates; from the second time on the event also has the paired difference from the first."""
    if parts.evaluate is None:
        return progress
    parts.phase("evaluation", progress.step)
    result = parts.evaluate(progress.step)
    fields = result.event_fields()
    if progress.first is not None:
        fields["metrics"] = {**fields["metrics"], **result.difference_metrics(progress.first)}
    parts.emit("evaluation", step=progress.step, **fields)
    alarms: list[Alarm] = []
    if parts.guard is not None:
        alarms = parts.guard.observe_evaluation(progress.step, fields["metrics"])
        _report(parts, alarms)
    return replace(
        progress,
        first=progress.first or result,
        last=result,
        evaluated=True,
        saved=False,
        alarms=(*progress.alarms, *(alarm.message for alarm in alarms)),
        events_size=parts.events_size(),
    )


def _report(parts: Parts, alarms: Sequence[Alarm]) -> None:
    for alarm in alarms:
        parts.emit("warning", message=f"{alarm.detector}: {alarm.message}", step=alarm.step, detector=alarm.detector)


def _one_step(parts: Parts, settings: LoopSettings, progress: Progress) -> tuple[Parts, Progress]:
    """One rollout batch and its M updates; returns the parts with bounds as the next step needs them."""
    step = progress.step + 1
    clock = Clock()
    start = time.perf_counter()
    timeouts = parts.num_timeouts()
    collected = _collect(parts, settings, step, clock)
    parts.check_stop()  # nothing is lost: what was sampled and judged is in the journal
    rollouts = rollout_batch(collected.groups)
    routing = StepRouting.of(parts.routing, rollouts)
    parts = _with_first_bounds(parts, rollouts)

    parts.phase("old_logprobs", step)
    with clock.measure("old_logprobs"):
        old, found = old_logprobs(
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
        batch = _prepare(parts, settings, collected.groups, rollouts, old)
        batch, num_dropped = _without_non_finite(parts, settings, collected.groups, batch, step)

    parts.phase("update", step)
    with clock.measure("update"):
        updated = _updates(parts, settings, batch, collected.groups, step, progress.num_non_finite, routing)
    parts.set_policy_version(parts.optimizer.update)

    clock.add({"total": time.perf_counter() - start})
    metrics = rollout_metrics(collected.groups) | found | step_metrics(updated.results, batch, updated.log_s)
    if routing is not None:
        metrics |= routing.engine_metrics()
    metrics["groups/refilled"] = float(collected.num_refilled)
    metrics["reward/timeouts"] = float(parts.num_timeouts() - timeouts)
    metrics["rows/non_finite"] = float(num_dropped)
    metrics["skipped_updates/non_finite"] = float(updated.num_skipped)
    if parts.bounds.clip_low is not None and parts.bounds.clip_high is not None:
        metrics |= {"clip_low": parts.bounds.clip_low, "clip_high": parts.bounds.clip_high}
    if settings.num_logged_samples:
        number, column = settings.num_logged_samples, settings.answer_column
        samples = logged_samples(collected.groups, batch, updated.log_s, number, column)
        parts.emit("samples", step=step, samples=samples)
    parts.emit(
        "step",
        step=step,
        num_updates=sum(r.applied for r in updated.results),
        policy_version=parts.optimizer.update,
        seconds=clock.seconds,
        metrics=metrics,
    )
    alarms = parts.guard.observe_step(step, metrics) if parts.guard is not None else []
    _report(parts, alarms)
    parts = _calibrated(parts, batch, updated.log_s, step)
    return parts, Progress(
        step=step,
        num_updates=parts.optimizer.update,
        cursor=parts.cursor(),
        bounds=parts.bounds,
        calibration=parts.calibration,
        events_size=parts.events_size(),
        first=progress.first,
        last=progress.last,
        num_non_finite=updated.num_in_row,
        alarms=tuple(f"{alarm.detector}: {alarm.message}" for alarm in alarms),
    )


def _collect(parts: Parts, settings: LoopSettings, step: int, clock: Clock) -> Collected:
    """One group per prompt; ``refill`` replaces groups without signal by groups of other prompts."""
    parts.phase("rollout", step)
    groups, seconds = parts.collect(parts.next_prompts(settings.prompts_per_step), step)
    clock.add(seconds)
    if settings.groups_without_signal != "refill":
        return Collected(groups, 0)
    kept = [group for group in groups if group.has_signal]
    constant = [group for group in groups if not group.has_signal]
    num_refilled = 0
    for round_ in range(1, settings.max_refills + 1):
        if not constant:
            break
        parts.phase("rollout", step)
        extra, seconds = parts.collect(parts.next_prompts(len(constant)), step, round_ * settings.prompts_per_step)
        clock.add(seconds)
        fresh = [group for group in extra if group.has_signal]
        num_refilled += len(fresh)
        kept += fresh
        constant = constant[len(fresh) :]
    return Collected(kept + constant, num_refilled)


def _prepare(
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


def _updates(
    parts: Parts,
    settings: LoopSettings,
    batch: TrainBatch,
    groups: Sequence[RolloutGroup],
    step: int,
    num_in_row: int,
    routing: StepRouting | None,
) -> Updated:
    objective = parts.make_objective(parts.bounds)
    log_s = torch.full((len(batch.advantages),), torch.nan)
    results: list[UpdateResult] = []
    num_skipped = 0
    for mini in mini_batches(batch, settings.num_mini_batches, seed=settings.seed, step=step):
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


def _with_first_bounds(parts: Parts, rollouts: RolloutBatch) -> Parts:
    """Before anything was measured, calibration starts from the paper's bounds at this response length."""
    waiting = parts.calibration is not None and not parts.calibration.seen and parts.bounds.clip_low is None
    if not waiting or parts.paper_bounds is None:
        return parts
    return replace(
        parts, bounds=scaled_paper_bounds(parts.paper_bounds, float(rollouts.sequences.lengths.float().mean()))
    )


def _calibrated(parts: Parts, batch: TrainBatch, log_s: Tensor, step: int) -> Parts:
    """Adds this step to the measuring window; bounds follow the window and freeze when it is full.

    Rows with advantage 0 cannot be clipped and say nothing about the width, so they are left out. A step in which
    nothing moved outward does not count.
    """
    if parts.calibration is None or parts.calibration.frozen:
        return parts
    told = ~torch.isnan(log_s) & (batch.advantages != 0)
    if not bool((log_s[told] * batch.advantages[told] > 0).any()):
        return parts
    calibration = parts.calibration.observe(log_s[told], batch.advantages[told])
    bounds = calibration.bounds()
    if calibration.frozen:
        parts.emit("calibration", step=step, clip_low=bounds.clip_low, clip_high=bounds.clip_high)
    return replace(parts, calibration=calibration, bounds=bounds)
