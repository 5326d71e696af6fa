"""The stages around the loop: the reward audit before it, the cold start, the summary after it.

In which order they come is said in ``runs.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gspo.config.check import plan_batch
from gspo.config.schema import Recipe, SftConfig
from gspo.data.pairs import load_pairs
from gspo.envs.tasks import make_task
from gspo.errors import ConfigError, RewardError
from gspo.evals.base import EvaluationResult
from gspo.events import RunDirectory
from gspo.launch.attempts import History
from gspo.launch.checkpoints import ColdStartSaver, Start
from gspo.launch.house import House
from gspo.launch.log import Log
from gspo.launch.signals import StopSignal
from gspo.policy.causal_lm import CausalPolicy
from gspo.rewards.audit import audit
from gspo.train.checkpoint import restore_optimizer
from gspo.train.loop import LoopSettings, Parts, StoppedError
from gspo.train.optimizer import Optimizer
from gspo.train.progress import Progress
from gspo.train.sft import Pair, SftSettings
from gspo.train.sft import sft as run_sft


def warn_of_remote_code(log: Log, recipe: Recipe, start: Start) -> None:
    """Says that modelling code shipped with the weights is run, which the recipe has asked for by name."""
    if recipe.model.trust_remote_code and start.trainer is None:
        text = f"model.trust_remote_code: Python code shipped with {recipe.model.path} is run with your rights"
        log.emit("warning", message=text)


def audit_rewards(log: Log, house: House) -> None:
    """Scores answers whose reward is known; a reward that gets them wrong stops the run before step 1."""
    reward = house.recipe.reward
    plan_batch(
        house.recipe.rollout.prompts_per_step,
        house.recipe.rollout.group_size,
        house.recipe.train.num_mini_batches,
        num_prompts=len(house.prompts),
    )
    if not house.eval_prompts:
        log.emit("warning", message="nothing is evaluated: give [data.eval] a path or task of held-out prompts")
    if not reward.audit:
        return
    log.screen.on_phase("audit", 0)
    report = audit(house.prompts, house.reward_set, reward.answer_column, reward.audit_num_prompts)
    log.emit("audit", findings=list(report.findings), num_prompts=report.num_prompts, num_scored=report.num_scored)
    for note in report.notes:
        log.emit("warning", message=note)
    if not report.ok:
        raise RewardError(
            "the reward audit failed before step 1: " + "; ".join(report.findings) + ". Nothing was trained. "
            "Mend the reward or the data, or set reward.audit = false if this is what you want"
        )


def pairs_of(recipe: Recipe, settings: SftConfig, policy: CausalPolicy) -> list[Pair]:
    """(prompt ids, response ids) of the cold start; prompts are rendered as those of [data]."""
    task = None
    if settings.task is not None:
        task = make_task(settings.task, settings.task_options, seed=recipe.run.seed, num=settings.num_pairs)
    pairs = load_pairs(
        path=settings.path,
        rows=None if task is None else task.rows,
        response_column=settings.response_column,
        prompt_column=recipe.data.prompt_column,
        system_prompt=recipe.data.system_prompt,
        instruction=recipe.data.instruction,
        chat_template=recipe.data.chat_template,
        template_options=recipe.data.template_options,
        tokenizer=policy.tokenizer,
        max_tokens=policy.context_length,
    )
    return [(prompt.token_ids, response) for prompt, response in pairs]


def cold_start(
    log: Log,
    recipe: Recipe,
    policy: CausalPolicy,
    evaluate: Callable[[int], Mapping[str, Any]] | None,
    directory: RunDirectory,
    stop: StopSignal,
    start: Start,
) -> int:
    """Supervised training on the recipe's pairs, saved as ``checkpoints/sft``; returns the number of updates.

    Args:
        policy: with the weights of ``start``.
        start: the beginning, or a place within the cold start.
    """
    settings = recipe.sft
    if settings is None:
        raise ConfigError("the recipe has no [sft] section: say what to train on (sft.path or sft.task)")
    pairs = pairs_of(recipe, settings, policy)
    optimizer = Optimizer(
        policy.model,
        learning_rate=settings.learning_rate,
        num_updates=settings.num_steps,
        warmup_steps=settings.warmup_steps,
        schedule=settings.schedule,
        betas=settings.betas,
        adam_eps=1e-8,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )

    if start.trainer is not None:
        restore_optimizer(policy, optimizer, start.trainer.optimizer, start.sft_update)
    saver = ColdStartSaver(policy, optimizer, directory, log, start.sft_update)

    def phase(name: str, step: int) -> None:
        try:
            stop.check()
        except StoppedError:
            if step - 1 > saver.saved:
                log.emit("checkpoint", step=0, path=saver.save(step - 1))
            raise
        log.screen.on_phase(name, step)

    num_updates = run_sft(
        policy,
        optimizer,
        pairs,
        SftSettings(
            seed=recipe.run.seed,
            num_steps=settings.num_steps,
            batch_size=settings.batch_size,
            micro_batch_tokens=settings.micro_batch_tokens,
            stop_at_pass=settings.stop_at_pass,
            eval_every=settings.eval_every,
            checkpoint_every=settings.checkpoint_every,
        ),
        evaluate=evaluate,
        emit=log.emit,
        phase=phase,
        save=saver.save,
        first=start.sft_update,
    )
    saver.finish(num_updates)
    return num_updates


def say_gone_back(log: Log, parts: Parts, settings: LoopSettings, progress: Progress, history: History) -> None:
    """Tells the events that an attempt begins here, why, and with which settings."""
    last, bounds = history.attempts[-1], progress.bounds
    rate = parts.optimizer.peak_learning_rate
    text = (
        f"went back from step {last.from_step} to step {progress.step} (attempt {last.number}): "
        f"{'; '.join(last.alarms)}. From here on with learning rate {rate:.3g}, "
        f"{settings.num_mini_batches} mini-batches"
    )
    if bounds.clip_low is not None and bounds.clip_high is not None:
        text += f", bounds {bounds.clip_low:.3g} and {bounds.clip_high:.3g}"
    log.emit("warning", message=text, step=progress.step)
    log.emit(
        "go_back",
        step=progress.step,
        from_step=last.from_step,
        attempt=last.number,
        alarms=list(last.alarms),
        learning_rate=rate,
        clip_low=bounds.clip_low,
        clip_high=bounds.clip_high,
        num_mini_batches=settings.num_mini_batches,
        abandoned=last.abandoned,
    )


def summarize(
    directory: RunDirectory,
    progress: Progress,
    settings: LoopSettings,
    seconds: float,
) -> dict[str, Any]:
    """What the run came to: one JSON line, and summary.json."""
    summary: dict[str, Any] = {}
    first, last = progress.first, progress.last
    if isinstance(first, EvaluationResult) and isinstance(last, EvaluationResult):
        gain = last.difference_from(first)
        summary = {
            "before": first.metrics["pass@1"],
            "after": last.metrics["pass@1"],
            "before_interval": _interval(first),
            "after_interval": _interval(last),
            "gain": gain.difference,
            "gain_interval": [gain.low, gain.high],
            "confidence": last.confidence,
            "num_prompts": len(last.outcomes),
            "num_samples": last.num_samples,
        }
    checkpoint = directory.checkpoint_path(settings.num_steps)
    return summary | {
        "seconds": round(seconds, 1),
        "num_steps": settings.num_steps,
        "num_updates": progress.num_updates,
        "model": str(checkpoint),
        "run_dir": str(directory.path),
    }


def _interval(result: EvaluationResult) -> list[float]:
    return [result.metrics["pass@1/low"], result.metrics["pass@1/high"]]
