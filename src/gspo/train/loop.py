"""The loop: prompts -> groups -> batch -> M updates -> evaluation. Everything measured goes to the events.

The loop knows no file and no screen: it calls ``emit(kind, **fields)`` and ``phase(name, step)``; what it evaluates
and where it saves are callables too.
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
from gspo.diagnostics import log_ratio_quantiles
from gspo.objectives.base import Objective
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy
from gspo.train.batch import included_rows, rollout_batch, rollout_metrics, train_batch
from gspo.train.bounds import Bounds, Calibration, scaled_paper_bounds
from gspo.train.optimizer import Optimizer
from gspo.train.schedule import mini_batches
from gspo.train.step import MicroBatching, UpdateResult, old_logprobs, score, update
from gspo.types import Prompt, RolloutBatch, RolloutGroup, TrainBatch, add_metrics, mean_metrics


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
    num_probe_rows: int = 8


@dataclass(frozen=True, eq=False)
class Parts:
    """Everything that a run consists of, made by ``launch``."""

    policy: CausalPolicy
    optimizer: Optimizer
    next_prompts: Callable[[int], list[Prompt]]
    collect: Collect
    make_objective: Callable[[Bounds], Objective]
    bounds: Bounds
    paper_bounds: tuple[float, float] | None  # of the objective; None if it does not clip
    set_policy_version: Callable[[int], None]  # the engine samples with these weights from now on
    evaluate: Callable[[int], Evaluation] | None  # step -> its evaluation; None without held-out prompts
    save: Callable[[int], str]  # step -> path of the checkpoint
    num_timeouts: Callable[[], int]  # verdicts that ran into their limit so far
    emit: Callable[..., None]
    phase: Callable[[str, int], None]
    calibration: Calibration | None = None
    kl: KLPenalty | None = None
    reference: CausalPolicy | None = None  # frozen copy of the policy at the start, for the KL term


class Evaluation(Protocol):
    """What the loop needs of an evaluation."""

    def event_fields(self) -> dict[str, Any]: ...

    def difference_metrics(self, earlier: Any, *, seed: int = 0) -> dict[str, float]: ...


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


def run(parts: Parts, settings: LoopSettings) -> tuple[Any, Any]:
    """Trains for ``num_steps`` rollout batches; returns the first and the last evaluation.

    Saves a checkpoint when anything stops it, so that no finished update is lost.
    """
    step = 0
    first = last = _evaluate(parts, 0, None)
    try:
        for step in range(1, settings.num_steps + 1):
            parts = _one_step(parts, settings, step)
            due = settings.eval_every and step % settings.eval_every == 0
            if due or step == settings.num_steps:
                last = _evaluate(parts, step, first)
            if step == settings.num_steps or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
                parts.phase("checkpoint", step)
                parts.emit("checkpoint", step=step, path=parts.save(step))
    except BaseException:
        if parts.optimizer.update:
            parts.emit("checkpoint", step=step, path=parts.save(step))
        raise
    return first, last


def _evaluate(parts: Parts, step: int, first: Evaluation | None) -> Evaluation | None:
    """Evaluates; from the second time on the event also has the paired difference from the first."""
    if parts.evaluate is None:
        return None
    parts.phase("evaluation", step)
    result = parts.evaluate(step)
    fields = result.event_fields()
    if first is not None:
        fields["metrics"] = {**fields["metrics"], **result.difference_metrics(first)}
    parts.emit("evaluation", step=step, **fields)
    return result


def _one_step(parts: Parts, settings: LoopSettings, step: int) -> Parts:
    """One rollout batch and its M updates; returns the parts with bounds as the next step needs them."""
    clock = Clock()
    start = time.perf_counter()
    timeouts = parts.num_timeouts()
    collected = _collect(parts, settings, step, clock)
    rollouts = rollout_batch(collected.groups)
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
        )
        batch = _prepare(parts, settings, collected.groups, rollouts, old)

    parts.phase("update", step)
    with clock.measure("update"):
        results, log_s = _updates(parts, settings, batch, step)
    parts.set_policy_version(parts.optimizer.update)

    clock.add({"total": time.perf_counter() - start})
    metrics = rollout_metrics(collected.groups) | found | _step_metrics(results, batch, log_s)
    metrics["groups/refilled"] = float(collected.num_refilled)
    metrics["reward/timeouts"] = float(parts.num_timeouts() - timeouts)
    if parts.bounds.clip_low is not None and parts.bounds.clip_high is not None:
        metrics |= {"clip_low": parts.bounds.clip_low, "clip_high": parts.bounds.clip_high}
    _log_samples(parts, settings, step, collected.groups, batch, log_s)
    parts.emit(
        "step",
        step=step,
        num_updates=sum(r.applied for r in results),
        policy_version=parts.optimizer.update,
        seconds=clock.seconds,
        metrics=metrics,
    )
    return _calibrated(parts, batch, log_s, step)


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


def _updates(parts: Parts, settings: LoopSettings, batch: TrainBatch, step: int) -> tuple[list[UpdateResult], Tensor]:
    """The M updates; also (N,) log s of every row at the update that it took part in."""
    objective = parts.make_objective(parts.bounds)
    log_s = torch.full((len(batch.advantages),), torch.nan)
    results = []
    for mini in mini_batches(batch, settings.num_mini_batches, seed=settings.seed, step=step):
        result = update(
            parts.policy,
            parts.optimizer,
            objective,
            batch,
            mini,
            temperature=settings.temperature,
            cut=settings.cut,
            kl=parts.kl,
        )
        log_s[mini.rows] = result.log_s
        results.append(result)
        parts.emit("update", step=step, update=parts.optimizer.update, mini_batch=mini.index, metrics=result.metrics)
    return results, log_s


def _step_metrics(results: Sequence[UpdateResult], batch: TrainBatch, log_s: Tensor) -> dict[str, float]:
    """The updates of a step in one row: ratio metrics over all rows, norms as the mean over updates."""
    applied = [r for r in results if r.applied]
    metrics = {
        **mean_metrics(add_metrics([r.sums for r in applied])),
        **log_ratio_quantiles(log_s),
        "groups/dropped": float(_num_dropped_groups(batch)),
        "tokens/trained": float(batch.loss_mask.sum()),
        "advantage/abs_mean": float(batch.advantages.abs().mean()),
        "skipped_updates": float(len(results) - len(applied)),
    }
    for name in ("loss", "grad_norm", "learning_rate"):
        if applied:
            metrics[name] = sum(r.metrics[name] for r in applied) / len(applied)
    return metrics


def _num_dropped_groups(batch: TrainBatch) -> int:
    """Groups of which no row entered the loss."""
    groups = batch.rollouts.group_ids
    return len(torch.unique(groups)) - len(torch.unique(groups[batch.included]))


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


def _log_samples(
    parts: Parts,
    settings: LoopSettings,
    step: int,
    groups: Sequence[RolloutGroup],
    batch: TrainBatch,
    log_s: Tensor,
) -> None:
    """A few responses of the first groups that have signal, best and worst first."""
    if not settings.num_logged_samples:
        return
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    order = sorted(range(len(rows)), key=lambda n: (not rows[n][0].has_signal, int(batch.rollouts.group_ids[n])))
    group = [n for n in order if rows[n][0] is rows[order[0]][0]]
    group.sort(key=lambda n: -abs(float(batch.advantages[n])))
    samples = []
    for n in group[: settings.num_logged_samples]:
        prompt, rollout = rows[n][0].prompt, rows[n][1]
        samples.append(
            {
                "prompt_id": prompt.id,
                "prompt": prompt.content if isinstance(prompt.content, str) else [dict(m) for m in prompt.content],
                "answer": rollout.text,
                "gold": prompt.columns.get("answer"),
                "reward": rollout.score.value,
                "components": dict(rollout.score.components),
                "ratio": float(log_s[n].exp()),
                "advantage": float(batch.advantages[n]),
                "stop_reason": str(rollout.stop_reason),
                "num_tokens": len(rollout.token_ids),
            }
        )
    parts.emit("samples", step=step, samples=samples)
