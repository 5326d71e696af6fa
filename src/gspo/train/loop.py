"""The loop: prompts -> groups -> batch -> M updates -> evaluation. Everything measured goes to the events.

The loop knows no file and no screen: it calls ``emit(kind, **fields)`` and ``phase(name, step)``; what it evaluates
and where it saves are callables too (``parts.py``). What one step hands to the next, beside the weights, is a
``Progress``: a run that is continued starts from the one of its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gspo.train.batch import rollout_batch, rollout_metrics
from gspo.train.checkpoint import CheckpointError
from gspo.train.guard import Alarm, CollapseError
from gspo.train.parts import Clock, Collect, LoopSettings, Parts, Reaction, StoppedError
from gspo.train.progress import Progress
from gspo.train.recording import logged_samples, step_metrics
from gspo.train.routing import StepRouting
from gspo.train.updates import Updated, calibrated, make_updates, prepare_batch, with_first_bounds
from gspo.types import RolloutGroup, StopReason, TrainBatch

__all__ = ["Clock", "Collect", "GoBackError", "LoopSettings", "Parts", "Reaction", "StoppedError", "run"]


class GoBackError(CollapseError):
    """A detector fired whose reaction is to go back; who started the loop does it.

    Args:
        checkpoint: of the last step before what the alarms are about.
    """

    def __init__(self, alarms: Sequence[Alarm], progress: Progress, checkpoint: Path) -> None:
        super().__init__(f"step {progress.step}: {_said(alarms)}; going back to {checkpoint.name}")
        self.alarms = tuple(alarms)
        self.progress = progress
        self.checkpoint = checkpoint


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
        CollapseError: a detector of the guard fired whose reaction is ``"stop"``.
        GoBackError: the same, ``"go_back"``, and there is a checkpoint from before; none of this step is left.
        NumericalError: a value was not finite and is not to be skipped, or too many in a row were.
    """
    if progress is None:
        progress = Progress(0, 0, parts.cursor(), parts.bounds, parts.calibration, parts.events_size())
    parts = replace(parts, bounds=progress.bounds, calibration=progress.calibration)
    try:
        progress = _finish_step(parts, settings, progress)
        while progress.step < settings.num_steps:
            _stop_if_told(settings, progress)
            parts.check_stop()
            parts, progress = _one_step(parts, settings, progress)
            progress = _finish_step(parts, settings, progress)
    except GoBackError:
        raise
    except BaseException:
        _save_what_there_is(parts, progress)
        raise
    return progress


def _finish_step(parts: Parts, settings: LoopSettings, progress: Progress) -> Progress:
    """The evaluation and the checkpoint that are due after a step, as far as they are not done."""
    step, ends = progress.step, progress.step == settings.num_steps
    if (step == 0 or ends or _is_due(step, settings.eval_every)) and not progress.evaluated:
        progress = _evaluate(parts, settings, progress)
    # Before anything is saved: a run that is killed here comes to the same alarm again.
    _go_back_if_told(parts, settings, progress)
    if step and (ends or _is_due(step, settings.checkpoint_every)):
        parts.phase("checkpoint", step)
        parts.emit("checkpoint", step=step, path=parts.save(progress))
        progress = replace(progress, saved=True)
    return progress


def _stop_if_told(settings: LoopSettings, progress: Progress) -> None:
    """Raises CollapseError if a detector says so, or would have gone back and cannot."""
    stopping = [alarm for alarm in progress.alarms if settings.reaction_to(alarm.detector) in ("stop", "go_back")]
    if stopping:
        raise CollapseError(
            f"stopped after step {progress.step}: {_said(stopping)}. {_why_stopped(settings, progress, stopping)} "
            "gspo doctor shows the evidence and the usual remedies"
        )


def _go_back_if_told(parts: Parts, settings: LoopSettings, progress: Progress) -> None:
    """Raises GoBackError if a detector says so, it is not too often, and there is something to go back to."""
    told = [alarm for alarm in progress.alarms if settings.reaction_to(alarm.detector) == "go_back"]
    stops = any(settings.reaction_to(alarm.detector) == "stop" for alarm in progress.alarms)
    if not told or stops or progress.attempt >= settings.max_go_backs:
        return
    checkpoint = parts.checkpoint_before(min(alarm.since for alarm in told))
    if checkpoint is not None:
        raise GoBackError(told, progress, checkpoint)


def _why_stopped(settings: LoopSettings, progress: Progress, alarms: Sequence[Alarm]) -> str:
    if any(settings.reaction_to(alarm.detector) == "stop" for alarm in alarms):
        return 'Its reaction in [guard] is "stop".'
    if progress.attempt >= settings.max_go_backs:
        return f"The run went back {progress.attempt} times, guard.go_back.max_times."
    first = min(alarm.since for alarm in alarms)
    return f"No checkpoint from before step {first} is there to go back to (checkpoint.every, keep_last, keep_best)."


def _said(alarms: Sequence[Alarm]) -> str:
    return "; ".join(f"{alarm.detector}: {alarm.message}" for alarm in alarms)


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


def _evaluate(parts: Parts, settings: LoopSettings, progress: Progress) -> Progress:
    """Evaluates; from the second time on the event also has the paired difference from the first."""
    if parts.evaluate is None:
        return progress
    parts.phase("evaluation", progress.step)
    result = parts.evaluate(progress.step)
    fields = result.event_fields()
    if progress.first is not None:
        fields["metrics"] = {**fields["metrics"], **result.difference_metrics(progress.first)}
    parts.emit("evaluation", step=progress.step, **fields)
    found = parts.guard.observe_evaluation(progress.step, fields["metrics"]) if parts.guard is not None else []
    alarms = _report(parts, settings, found)
    return replace(
        progress,
        first=progress.first or result,
        last=result,
        evaluated=True,
        saved=False,
        alarms=(*progress.alarms, *alarms),
        events_size=parts.events_size(),
    )


def _report(parts: Parts, settings: LoopSettings, found: Sequence[Alarm]) -> tuple[Alarm, ...]:
    """Says what the guard found, and returns it, without what nobody wants to hear."""
    alarms = tuple(alarm for alarm in found if settings.reaction_to(alarm.detector) != "off")
    for alarm in alarms:
        parts.emit("warning", message=f"{alarm.detector}: {alarm.message}", step=alarm.step, detector=alarm.detector)
    return alarms


def _one_step(parts: Parts, settings: LoopSettings, progress: Progress) -> tuple[Parts, Progress]:
    """One rollout batch and its M updates; returns the parts with bounds as the next step needs them."""
    step, clock, start, before = progress.step + 1, Clock(), time.perf_counter(), dict(parts.counts())
    collected = _collect(parts, settings, step, clock)
    parts.check_stop()  # nothing is lost: what was sampled and judged is in the journal
    rollouts = rollout_batch(collected.groups)
    routing = StepRouting.of(parts.routing, rollouts)
    parts = with_first_bounds(parts, rollouts)

    parts.phase("old_logprobs", step)
    with clock.measure("old_logprobs"):
        batch, measured = prepare_batch(parts, settings, collected.groups, rollouts, step, routing)
    parts.phase("update", step)
    with clock.measure("update"):
        updated = make_updates(parts, settings, batch, collected.groups, step, progress.num_non_finite, routing)
    parts.set_policy_version(parts.optimizer.update)

    clock.add({"total": time.perf_counter() - start})
    metrics = {
        **rollout_metrics(collected.groups),
        **measured,
        **step_metrics(updated.results, batch, updated.log_s),
        **(routing.engine_metrics() if routing is not None else {}),
        **_counts(parts, before, collected, updated),
    }
    _emit_step(parts, settings, step, collected, batch, updated, clock, metrics)
    found = parts.guard.observe_step(step, metrics) if parts.guard is not None else []
    alarms = _report(parts, settings, found)
    parts = calibrated(parts, batch, updated.log_s, step, progress.num_updates)
    return parts, replace(
        progress,
        step=step,
        num_updates=parts.optimizer.update,
        cursor=parts.cursor(),
        bounds=parts.bounds,
        calibration=parts.calibration,
        events_size=parts.events_size(),
        num_non_finite=updated.num_in_row,
        alarms=alarms,
        evaluated=False,
        saved=False,
    )


def _counts(parts: Parts, before: Mapping[str, int], collected: Collected, updated: Updated) -> dict[str, float]:
    """Accidents of the step, groups that were replaced, and the bounds in force."""
    rollouts = [rollout for group in collected.groups for rollout in group.rollouts]
    metrics = {
        **{name: float(count - before.get(name, 0)) for name, count in parts.counts().items()},
        "engine/aborted": float(sum(rollout.stop_reason is StopReason.ABORTED for rollout in rollouts)),
        "groups/refilled": float(collected.num_refilled),
        "skipped_updates/non_finite": float(updated.num_skipped),
    }
    if parts.bounds.clip_low is not None and parts.bounds.clip_high is not None:
        metrics |= {"clip_low": parts.bounds.clip_low, "clip_high": parts.bounds.clip_high}
    return metrics


def _emit_step(
    parts: Parts,
    settings: LoopSettings,
    step: int,
    collected: Collected,
    batch: TrainBatch,
    updated: Updated,
    clock: Clock,
    metrics: Mapping[str, float],
) -> None:
    if settings.num_logged_samples:
        number, column = settings.num_logged_samples, settings.answer_column
        samples = logged_samples(collected.groups, batch, updated.log_s, number, column)
        parts.emit("samples", step=step, samples=samples)
    parts.emit(
        "step",
        step=step,
        num_updates=sum(result.applied for result in updated.results),
        policy_version=parts.optimizer.update,
        seconds=clock.seconds,
        metrics=metrics,
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
