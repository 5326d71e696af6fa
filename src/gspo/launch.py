"""The composition root: the only file that knows every part. A recipe comes in, parts are built, a run is started."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gspo.config.check import plan_batch
from gspo.config.load import recipe_text
from gspo.config.schema import DataConfig, Recipe
from gspo.data.pairs import load_pairs
from gspo.data.prompts import PromptCursor, load_prompts
from gspo.envs.runner import collect
from gspo.envs.tasks import Split, Task, make_task
from gspo.errors import ConfigError, RewardError
from gspo.evals.base import EvaluationResult
from gspo.evals.base import evaluate as evaluate_prompts
from gspo.events import EventWriter, RunDirectory, write_json
from gspo.objectives import make_objective
from gspo.objectives.base import Objective
from gspo.objectives.bundle import PAPER_BOUNDS
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.report.terminal import TerminalReporter
from gspo.rewards.audit import audit
from gspo.rewards.base import RewardSet
from gspo.rewards.builtin import build_rewards
from gspo.rollout.base import Engine, SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.scripted import ScriptedEngine
from gspo.seeding import derive_seed
from gspo.train.bounds import Bounds, Calibration
from gspo.train.checkpoint import keep_last, save_checkpoint
from gspo.train.loop import LoopSettings, Parts, run
from gspo.train.optimizer import Optimizer
from gspo.train.sft import SftSettings
from gspo.train.sft import sft as run_sft
from gspo.train.step import MicroBatching
from gspo.types import Prompt, RolloutGroup


@dataclass(frozen=True, eq=False)
class House:
    """What training and evaluation share: the model, the sampler, the prompts and the rewards."""

    recipe: Recipe
    policy: CausalPolicy
    engine: Engine
    reward_set: RewardSet
    prompts: list[Prompt]
    eval_prompts: list[Prompt]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.policy.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def collect(
        self, prompts: Sequence[Prompt], step: int, first_draw: int = 0
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        rollout = self.recipe.rollout
        return collect(
            prompts,
            self.engine,
            self._params(rollout.temperature, rollout.max_new_tokens),
            self.reward_set,
            step=step,
            seed=self.recipe.run.seed,
            group_size=rollout.group_size,
            decode=self.decode,
            first_draw=first_draw,
        )

    def evaluate(self, step: int, name: str = "held_out") -> EvaluationResult:
        settings = self.recipe.eval
        return evaluate_prompts(
            self.eval_prompts,
            self.engine,
            self._params(settings.temperature, settings.max_new_tokens or self.recipe.rollout.max_new_tokens),
            self.reward_set,
            num_samples=settings.num_samples,
            decode=self.decode,
            k=settings.k,
            threshold=settings.threshold,
            confidence=settings.confidence,
            seed=self.recipe.run.seed,
            step=step,
            name=name,
        )

    def evaluate_sft(self, step: int) -> dict[str, Any]:
        return self.evaluate(step, "sft").event_fields()

    def close(self) -> None:
        """Ends the verifier processes."""
        self.reward_set.close()

    def set_policy_version(self, version: int) -> None:
        self.engine.policy_version = version

    def _params(self, temperature: float, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.policy.stop_token_ids,
            stop_strings=self.recipe.rollout.stop_strings,
        )


@dataclass(frozen=True, eq=False)
class Log:
    """Where a run speaks: every event goes to the file and to the screen."""

    events: EventWriter
    screen: TerminalReporter
    start: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def emit(self, kind: str, **fields: Any) -> None:
        self.screen.on_event(self.events.write(kind, **fields))


def build(recipe: Recipe, model: str | None = None) -> House:
    """Loads the model, the prompts and the rewards. Raises an InputError for anything that cannot work."""
    if recipe.run.num_threads:
        torch.set_num_threads(recipe.run.num_threads)
    policy = _policy(recipe, model)
    held_out = recipe.data.eval or (recipe.data if recipe.data.task is not None else None)
    task = _task(recipe, recipe.data, "train")
    eval_task = _task(recipe, held_out, "eval") if held_out is not None else None
    eval_prompts = _prompts(recipe, held_out, policy, eval_task) if held_out is not None else []
    prompts = _prompts(recipe, recipe.data, policy, task, without=eval_prompts)
    reward = recipe.reward
    reward_set = build_rewards(
        reward.functions,
        timeout_s=reward.timeout_s,
        num_workers=reward.num_workers,
        answer_column=reward.answer_column,
        task=task,
    )
    return House(recipe, policy, _engine(recipe, policy), reward_set, prompts, eval_prompts)


def train(recipe: Recipe, *, run_dir: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """Audit, cold start if the recipe has one, GSPO, evaluation before and after; returns the summary.

    Raises:
        InputError: something in the recipe, data, model or rewards cannot work.
        RunError: the run went wrong; a checkpoint of the last good weights is in the run directory.
    """
    with _open_run(recipe, run_dir, command) as directory, _logged(directory, recipe) as log:
        settings = _settings(recipe)
        with closing(build(recipe)) as house:
            _audit(log, house)
            if recipe.sft is not None:
                _cold_start(log, recipe, house.policy, house.evaluate_sft, directory)
            first, last = run(_parts(log, house, directory), settings)
        summary = _summary(directory, first, last, settings, log.seconds())
        directory.write_summary(summary)
    return summary


def sft(recipe: Recipe, *, run_dir: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """The cold start alone; the model is left in ``RUN_DIR/checkpoints/sft``. Returns the summary."""
    with _open_run(recipe, run_dir, command) as directory, _logged(directory, recipe) as log:
        if recipe.sft is not None and recipe.sft.stop_at_pass is not None:
            with closing(build(recipe)) as house:
                num_updates = _cold_start(log, recipe, house.policy, house.evaluate_sft, directory)
        else:
            num_updates = _cold_start(log, recipe, _policy(recipe, None), None, directory)
        summary: dict[str, Any] = {
            "num_updates": num_updates,
            "seconds": log.seconds(),
            "model": str(directory.checkpoints_path / "sft"),
        }
        directory.write_summary(summary)
    return summary


def evaluate(recipe: Recipe, *, model: str | None, output: Path | None) -> dict[str, Any]:
    """Evaluates ``model`` (default: the recipe's) on the recipe's held-out prompts; returns the event's fields."""
    with closing(build(recipe, model)) as house:
        if not house.eval_prompts:
            raise ConfigError("there are no held-out prompts: give [data.eval] a path or a task")
        result = {"model": model or recipe.model.path or recipe.model.tiny, **house.evaluate(0).event_fields()}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)
    return result


# The parts of a run.


def _policy(recipe: Recipe, path: str | None) -> CausalPolicy:
    model = recipe.model
    own = path is None
    return load_policy(
        path=model.path if own else path,
        gguf_file=model.gguf_file if own else None,
        tiny=model.tiny if own else None,
        tiny_config=model.tiny_config if own else {},
        dtype=model.dtype,
        device=recipe.run.device,
        gradient_checkpointing=model.gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        seed=derive_seed(recipe.run.seed, "weights"),
    )


def _task(recipe: Recipe, data: DataConfig, split: Split) -> Task | None:
    """The generated task of one section; training and held-out problems share none."""
    if data.task is None:
        return None
    return make_task(data.task, data.task_options, seed=_data_seed(recipe, data), split=split, num=data.num_prompts)


def _data_seed(recipe: Recipe, data: DataConfig) -> int:
    return recipe.run.seed if data.seed is None else data.seed


def _prompts(
    recipe: Recipe, data: DataConfig, policy: CausalPolicy, task: Task | None, without: Sequence[Prompt] = ()
) -> list[Prompt]:
    """The prompts of one section; ``without`` are held out, and none of their texts is trained on."""
    return load_prompts(
        path=data.path,
        rows=None if task is None else task.rows,
        num_prompts=data.num_prompts,
        seed=_data_seed(recipe, data),
        tokenizer=policy.tokenizer,
        prompt_column=data.prompt_column,
        system_prompt=data.system_prompt,
        instruction=data.instruction,
        chat_template=data.chat_template,
        template_options=data.template_options,
        max_prompt_tokens=data.max_prompt_tokens or policy.context_length - recipe.rollout.max_new_tokens,
        without=[prompt.content for prompt in without],
    )


def _engine(recipe: Recipe, policy: CausalPolicy) -> Engine:
    if recipe.rollout.engine == "scripted":
        assert recipe.rollout.script is not None  # config/check.py has seen to it
        return ScriptedEngine(recipe.rollout.script, policy.tokenizer)
    return EmbeddedEngine(policy, max_slots=recipe.rollout.max_slots)


def _parts(log: Log, house: House, directory: RunDirectory) -> Parts:
    recipe = house.recipe
    objective, trainer = recipe.objective, recipe.train
    paper = PAPER_BOUNDS[objective.name]
    bounds = _first_bounds(recipe)
    kl = reference = None
    if objective.kl_coefficient > 0:
        kl = KLPenalty(objective.kl_coefficient, objective.kl_estimator, _objective(recipe, bounds).unit)
        reference = replace(house.policy, model=copy.deepcopy(house.policy.model).requires_grad_(False))
    cursor = PromptCursor(house.prompts, seed=derive_seed(recipe.run.seed, "prompts"))
    return Parts(
        policy=house.policy,
        optimizer=Optimizer(
            house.policy.model,
            learning_rate=trainer.learning_rate,
            num_updates=trainer.num_steps * trainer.num_mini_batches,
            warmup_steps=trainer.warmup_steps,
            schedule=trainer.schedule,
            betas=trainer.betas,
            adam_eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
        ),
        next_prompts=cursor.next,
        collect=house.collect,
        make_objective=lambda bounds: _objective(recipe, bounds),
        bounds=bounds,
        paper_bounds=paper,
        set_policy_version=house.set_policy_version,
        evaluate=house.evaluate if house.eval_prompts else None,
        save=lambda step: _save_step(house, directory, step),
        num_timeouts=lambda: house.reward_set.counters.get("timeouts", 0),
        emit=log.emit,
        phase=log.screen.on_phase,
        calibration=_calibration(recipe),
        kl=kl,
        reference=reference,
    )


def _settings(recipe: Recipe) -> LoopSettings:
    trainer = recipe.train
    low = _first_bounds(recipe).clip_low or (PAPER_BOUNDS[recipe.objective.name] or (1e-3,))[0]
    return LoopSettings(
        seed=recipe.run.seed,
        num_steps=trainer.num_steps,
        prompts_per_step=recipe.rollout.prompts_per_step,
        num_mini_batches=trainer.num_mini_batches,
        cut=MicroBatching(trainer.micro_batch_size, trainer.micro_batch_tokens),
        temperature=recipe.rollout.temperature,
        old_logprobs=trainer.old_logprobs,
        mismatch_bound=trainer.mismatch_bound or low / 10,
        groups_without_signal=trainer.groups_without_signal,
        max_refills=trainer.max_refills,
        truncated=trainer.truncated,
        advantage_scale=recipe.advantage.scale,
        std_floor=recipe.advantage.std_floor,
        eval_every=recipe.eval.every,
        checkpoint_every=recipe.checkpoint.every,
        num_logged_samples=trainer.num_logged_samples,
    )


def _first_bounds(recipe: Recipe) -> Bounds:
    """Explicit ones, the paper's, or none yet: calibration finds them in the first steps."""
    objective = recipe.objective
    paper = PAPER_BOUNDS[objective.name]
    if paper is None or objective.clip == "calibrated":
        return Bounds(None, None)
    if objective.clip == "explicit":
        return Bounds(objective.clip_low, objective.clip_high)
    return Bounds(*paper)


def _objective(recipe: Recipe, bounds: Bounds) -> Objective:
    return make_objective(recipe.objective.name, bounds.clip_low, bounds.clip_high, recipe.objective.unit)


def _calibration(recipe: Recipe) -> Calibration | None:
    if recipe.objective.clip != "calibrated":
        return None
    return Calibration(recipe.objective.clip_target, recipe.objective.calibration_steps)


# The stages of a run.


def _open_run(recipe: Recipe, run_dir: Path | None, command: Sequence[str]) -> RunDirectory:
    return RunDirectory.create(
        run_dir or Path("runs") / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        command=command,
        config_text=recipe_text(recipe),
        seed=recipe.run.seed,
        host={"num_threads": torch.get_num_threads()},
    )


@contextmanager
def _logged(directory: RunDirectory, recipe: Recipe) -> Iterator[Log]:
    """Opens the events and the screen, says what is about to happen, and how it ended, whatever ended it."""
    with directory.event_writer() as events, TerminalReporter() as screen:
        log = Log(events, screen)
        log.emit("start", **_start_fields(recipe))
        try:
            yield log
        except KeyboardInterrupt:
            log.emit("end", status="interrupted", seconds=log.seconds())
            raise
        except BaseException as error:
            log.emit("end", status="failed", seconds=log.seconds(), message=f"{type(error).__name__}: {error}")
            raise
        log.emit("end", status="finished", seconds=log.seconds())


def _start_fields(recipe: Recipe) -> dict[str, Any]:
    bounds = _first_bounds(recipe)
    return {
        "name": recipe.run.name,
        "objective": recipe.objective.name,
        "clip_low": bounds.clip_low,
        "clip_high": bounds.clip_high,
        "num_steps": recipe.train.num_steps,
        "num_mini_batches": recipe.train.num_mini_batches,
        "prompts_per_step": recipe.rollout.prompts_per_step,
        "group_size": recipe.rollout.group_size,
        "num_sft_updates": recipe.sft.num_steps if recipe.sft else 0,
    }


def _audit(log: Log, house: House) -> None:
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


def _cold_start(
    log: Log,
    recipe: Recipe,
    policy: CausalPolicy,
    evaluate: Callable[[int], Mapping[str, Any]] | None,
    directory: RunDirectory,
) -> int:
    """Supervised training on the recipe's pairs, saved as ``checkpoints/sft``; returns the number of updates."""
    settings = recipe.sft
    if settings is None:
        raise ConfigError("the recipe has no [sft] section: say what to train on (sft.path or sft.task)")
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
    num_updates = run_sft(
        policy,
        optimizer,
        [(prompt.token_ids, response) for prompt, response in pairs],
        SftSettings(
            seed=recipe.run.seed,
            num_steps=settings.num_steps,
            batch_size=settings.batch_size,
            micro_batch_tokens=settings.micro_batch_tokens,
            stop_at_pass=settings.stop_at_pass,
            eval_every=settings.eval_every,
        ),
        evaluate=evaluate,
        emit=log.emit,
        phase=log.screen.on_phase,
    )
    path = save_checkpoint(policy, directory.checkpoints_path / "sft")
    log.emit("checkpoint", step=0, path=str(path.relative_to(directory.path)))
    return num_updates


def _save_step(house: House, directory: RunDirectory, step: int) -> str:
    path = save_checkpoint(house.policy, directory.checkpoint_path(step))
    keep_last(directory.checkpoints_path, house.recipe.checkpoint.keep_last)
    return str(path.relative_to(directory.path))


def _summary(
    directory: RunDirectory,
    first: EvaluationResult | None,
    last: EvaluationResult | None,
    settings: LoopSettings,
    seconds: float,
) -> dict[str, Any]:
    """What the run came to: one JSON line, and summary.json."""
    summary: dict[str, Any] = {}
    if first is not None and last is not None:
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
        "num_updates": settings.num_steps * settings.num_mini_batches,
        "model": str(checkpoint),
        "run_dir": str(directory.path),
    }


def _interval(result: EvaluationResult) -> list[float]:
    return [result.metrics["pass@1/low"], result.metrics["pass@1/high"]]
