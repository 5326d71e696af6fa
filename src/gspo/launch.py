"""The composition root: the only file that knows every part. A recipe comes in, parts are built, a run is started.

A run that is continued goes the same way: the events are cut back to where the newest good checkpoint was taken,
weights, optimizer state and position are put back, and the loop goes on; what was sampled and judged since comes out
of the journal.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gspo.config.check import plan_batch
from gspo.config.load import load_recipe, recipe_text
from gspo.config.presets import PRESETS
from gspo.config.schema import DataConfig, Recipe
from gspo.data.pairs import load_pairs
from gspo.data.prompts import PromptCursor, load_prompts
from gspo.envs.runner import collect
from gspo.envs.tasks import Split, Task, make_task
from gspo.errors import ConfigError, ModelError, RewardError, RunDirectoryError
from gspo.evals.base import EvaluationResult, Outcome
from gspo.evals.base import evaluate as evaluate_prompts
from gspo.events import EventWriter, RunDirectory, package_versions, read_event_log, write_json
from gspo.objectives import make_objective
from gspo.objectives.base import Objective
from gspo.objectives.bundle import PAPER_BOUNDS
from gspo.objectives.correction import Correction
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.policy.moe.capture import routing_shape
from gspo.policy.moe.families import has_experts, understands
from gspo.report.terminal import TerminalReporter
from gspo.rewards.audit import audit
from gspo.rewards.base import RewardSet
from gspo.rewards.builtin import build_rewards
from gspo.rollout.base import Engine, SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.scripted import ScriptedEngine
from gspo.seeding import derive_seed
from gspo.train.bounds import Bounds, Calibration
from gspo.train.checkpoint import (
    TrainerState,
    checkpoint_step,
    checkpoints,
    keep,
    load_trainer_state,
    newest_good,
    optimizer_state,
    partial_name,
    remove_leftovers,
    restore_optimizer,
    save_checkpoint,
    verify_model,
)
from gspo.train.guard import Guard, replay
from gspo.train.journal import Journal, JournaledEngine, JournaledRewards
from gspo.train.loop import Collect, LoopSettings, Parts, StoppedError, run
from gspo.train.manifest import read_manifest
from gspo.train.optimizer import Optimizer
from gspo.train.progress import Progress, calibration_tensors, position, progress_from
from gspo.train.routing import RoutingSettings
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
    routing: RoutingSettings | None = None  # of a mixture of experts

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.policy.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def collect(
        self, prompts: Sequence[Prompt], step: int, first_draw: int = 0
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        rollout = self.recipe.rollout
        return collect(
            prompts,
            self.engine,
            replace(
                self._params(rollout.temperature, rollout.max_new_tokens),
                record_routing=self.routing is not None and self.routing.engine_records,
            ),
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


def build(recipe: Recipe, model: str | Path | None = None) -> House:
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
        isolate=reward.isolate,
        memory_limit_mb=reward.memory_limit_mb,
    )
    return House(recipe, policy, _engine(recipe, policy), reward_set, prompts, eval_prompts, _routing(recipe, policy))


@dataclass(eq=False)
class StopSignal:
    """SIGINT and SIGTERM as a wish: the run ends at the next safe point. The same signal again ends it at once."""

    received: str | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises StoppedError if a signal came."""
        if self.received is not None:
            raise StoppedError(f"stopped by {self.received}")

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, self._before.pop(number))


@dataclass(frozen=True, eq=False)
class Start:
    """Where a run begins: at its first line, after the cold start, or after a step.

    checkpoint: holds weights (and ``trainer`` what goes with them); None at the first line.
    """

    checkpoint: Path | None = None
    trainer: TrainerState | None = None
    warnings: tuple[str, ...] = ()

    @property
    def events_size(self) -> int:
        return 0 if self.trainer is None else int(self.trainer.position["events_size"])


def train(recipe: Recipe, *, run_dir: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """Audit, cold start if the recipe has one, GSPO, evaluation before and after; returns the summary.

    Raises:
        InputError: something in the recipe, data, model or rewards cannot work.
        RunError: the run went wrong; a checkpoint of the last good weights is in the run directory.
        StoppedError: SIGINT or SIGTERM; the run can be continued.
    """
    with _open_run(recipe, run_dir, command) as directory:
        return _train(recipe, directory, Start())


def resume(run_dir: Path, *, command: Sequence[str]) -> dict[str, Any]:
    """Continues a run from its newest good checkpoint and its journal, as if it had never been interrupted.

    A finished run is left as it is; its summary is returned.

    Raises:
        RunDirectoryError: holds no run of ``gspo train``, or is in use.
        ModelError: there are checkpoints, and none is whole; names the files.
        As ``train``.
    """
    with RunDirectory.reopen(run_dir) as directory:
        info = directory.info()
        if info.get("command", [])[1:2] == ["sft"]:
            raise RunDirectoryError(f"{run_dir} is a run of gspo sft, which starts from its beginning: run it again")
        if directory.summary_path.exists():
            return dict(json.loads(directory.summary_path.read_text(encoding="utf-8")))
        recipe = load_recipe(directory.recipe_path)
        start = _start(recipe, directory)
        directory.note_resume(
            command=list(command),
            checkpoint=None if start.checkpoint is None else start.checkpoint.name,
            ended=_last_words(directory),
        )
        directory.cut_events(start.events_size)
        return _train(recipe, directory, start)


def _train(recipe: Recipe, directory: RunDirectory, start: Start) -> dict[str, Any]:
    with StopSignal() as stop, _logged(directory, recipe, start) as log:
        settings = _settings(recipe)
        with closing(build(recipe, start.checkpoint)) as house:
            if start.trainer is None:
                _audit(log, house)
                if recipe.sft is not None:
                    _cold_start(log, recipe, house.policy, house.evaluate_sft, directory, stop)
            parts, progress = _parts(log, house, directory, start, stop)
            progress = run(parts, settings, progress)
        summary = _summary(directory, progress, settings, log.seconds())
    directory.write_summary(summary)
    return summary


def sft(recipe: Recipe, *, run_dir: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """The cold start alone; the model is left in ``RUN_DIR/checkpoints/sft``. Returns the summary."""
    with _open_run(recipe, run_dir, command) as directory, StopSignal() as stop, _logged(directory, recipe) as log:
        if recipe.sft is not None and recipe.sft.stop_at_pass is not None:
            with closing(build(recipe)) as house:
                num_updates = _cold_start(log, recipe, house.policy, house.evaluate_sft, directory, stop)
        else:
            num_updates = _cold_start(log, recipe, _policy(recipe, None), None, directory, stop)
        summary: dict[str, Any] = {
            "num_updates": num_updates,
            "seconds": log.seconds(),
            "model": str(directory.checkpoints_path / "sft"),
        }
        directory.write_summary(summary)
    return summary


def evaluate(recipe: Recipe, *, model: str | None, output: Path | None) -> dict[str, Any]:
    """Evaluates ``model`` (default: the recipe's) on the recipe's held-out prompts; returns the event's fields."""
    if model is not None:
        verify_model(Path(model))
    with closing(build(recipe, model)) as house:
        if not house.eval_prompts:
            raise ConfigError("there are no held-out prompts: give [data.eval] a path or a task")
        result = {"model": model or recipe.model.path or recipe.model.tiny, **house.evaluate(0).event_fields()}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)
    return result


# The parts of a run.


def _policy(recipe: Recipe, path: str | Path | None) -> CausalPolicy:
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


def _parts(
    log: Log, house: House, directory: RunDirectory, start: Start, stop: StopSignal
) -> tuple[Parts, Progress | None]:
    """What the loop works with, and where it goes on; None at the beginning."""
    recipe = house.recipe
    objective, trainer = recipe.objective, recipe.train
    paper = PAPER_BOUNDS[objective.name]
    bounds = _first_bounds(recipe)
    kl = reference = None
    if objective.kl_coefficient > 0:
        kl = KLPenalty(objective.kl_coefficient, objective.kl_estimator, _objective(recipe, bounds).unit)
        reference = _reference(house, directory, start)
    cursor = PromptCursor(house.prompts, seed=derive_seed(recipe.run.seed, "prompts"))
    optimizer = Optimizer(
        house.policy.model,
        learning_rate=trainer.learning_rate,
        num_updates=trainer.num_steps * trainer.num_mini_batches,
        warmup_steps=trainer.warmup_steps,
        schedule=trainer.schedule,
        betas=trainer.betas,
        adam_eps=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
    )
    progress = _put_back(house, optimizer, cursor, start)
    journal = Journal(directory.journal_path, lambda message: log.emit("warning", message=message))
    at = At()
    house = replace(
        house,
        engine=JournaledEngine(house.engine, journal, at.step, stop.check),
        reward_set=JournaledRewards(house.reward_set, journal, at.step),
    )
    saver = Saver(house, optimizer, directory, log, journal)
    parts = Parts(
        policy=house.policy,
        optimizer=optimizer,
        next_prompts=cursor.next,
        cursor=cursor.state,
        collect=at.collecting(house),
        make_objective=lambda bounds: _objective(recipe, bounds),
        bounds=bounds,
        paper_bounds=paper,
        set_policy_version=house.set_policy_version,
        evaluate=at.evaluating(house) if house.eval_prompts else None,
        save=saver.save,
        save_partial=saver.save_partial,
        events_size=lambda: log.events.size,
        check_stop=stop.check,
        num_timeouts=lambda: house.reward_set.counters.get("timeouts", 0),
        emit=log.emit,
        phase=log.screen.on_phase,
        guard=_guard(recipe, directory),
        calibration=_calibration(recipe),
        kl=kl,
        reference=reference,
        correction=_correction(recipe),
        routing=house.routing,
    )
    return parts, progress


@dataclass(eq=False)
class At:
    """The step that the engine and the rewards work for: the journal keeps one file a step."""

    current: int = 0

    def step(self) -> int:
        return self.current

    def collecting(self, house: House) -> Collect:
        def collect(
            prompts: Sequence[Prompt], step: int, first_draw: int = 0
        ) -> tuple[list[RolloutGroup], dict[str, float]]:
            self.current = step
            return house.collect(prompts, step, first_draw)

        return collect

    def evaluating(self, house: House) -> Callable[[int], EvaluationResult]:
        def evaluate(step: int) -> EvaluationResult:
            self.current = step
            return house.evaluate(step)

        return evaluate


def _guard(recipe: Recipe, directory: RunDirectory) -> Guard | None:
    """The detectors, with what the events say of the steps before."""
    if recipe.guard.reaction == "off":
        return None
    return replay(read_event_log(directory.events_path).events)[0]


# Going on from a checkpoint.


def _start(recipe: Recipe, directory: RunDirectory) -> Start:
    """The newest good checkpoint of a run; else the end of its cold start; else its beginning."""
    remove_leftovers(directory.checkpoints_path)
    path, faults = newest_good(directory.checkpoints_path)
    cold = directory.checkpoints_path / "sft"
    if path is None and recipe.sft is not None and cold.exists():
        try:
            verify_model(cold)
        except ModelError as error:
            return Start(warnings=(f"{error}; the cold start is made again",))
        path = cold
    if path is None:
        return Start()
    trainer = load_trainer_state(path)
    recorded = trainer.position.get("recipe")
    if recorded != _recipe_digest(directory):
        raise ConfigError(
            f"{directory.recipe_path} is not the recipe that {path} was trained with; put back the one it had, or "
            "start a new run from the checkpoint with model.path"
        )
    warnings = tuple(f"{fault}; going on from the newest good one, {path.name}" for fault in faults)
    return Start(path, trainer, (*warnings, *_other_versions(path)))


def _recipe_digest(directory: RunDirectory) -> str:
    """Of the file, not of what this build would write: a later one may have more keys."""
    return hashlib.blake2b(directory.recipe_path.read_bytes(), digest_size=16).hexdigest()


def _other_versions(path: Path) -> tuple[str, ...]:
    """A warning if the run was trained with other versions so far: its last bits may come out otherwise."""
    before, now = (read_manifest(path) or {}).get("versions", {}), package_versions()
    changed = [f"{name} {before[name]}, now {now.get(name)}" for name in before if before[name] != now.get(name)]
    if not changed:
        return ()
    return (f"the run was trained so far with {'; '.join(changed)}: from here on the last bits may differ",)


def _last_words(directory: RunDirectory) -> str:
    """How the run that is continued ended, as far as its events tell."""
    events = read_event_log(directory.events_path).events if directory.events_path.exists() else []
    if events and events[-1]["type"] == "end":
        return str(events[-1].get("message") or events[-1]["status"])
    return "died without a word"


def _put_back(house: House, optimizer: Optimizer, cursor: PromptCursor, start: Start) -> Progress | None:
    """Optimizer state and positions of the checkpoint whose weights are already there."""
    trainer = start.trainer
    if trainer is None or trainer.position["step"] == 0:  # also after a cold start, whose optimizer is not used again
        return None
    restore_optimizer(house.policy, optimizer, trainer.optimizer, trainer.position["num_updates"])
    cursor.restore(trainer.position["cursor"])
    house.set_policy_version(optimizer.update)
    return progress_from(trainer.position, _calibration(house.recipe), trainer.calibration, _evaluation_from)


def _reference(house: House, directory: RunDirectory, start: Start) -> CausalPolicy:
    """The weights at the first step, frozen: those of now, or of then for a run that goes on."""
    policy = house.policy
    if start.trainer is not None and start.trainer.position["step"] > 0:
        cold = directory.checkpoints_path / "sft"
        if house.recipe.sft is not None:
            verify_model(cold)
        policy = _policy(house.recipe, cold if house.recipe.sft is not None else None)
        return replace(policy, model=policy.model.requires_grad_(False))
    return replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))


@dataclass(frozen=True, eq=False)
class Saver:
    """Writes the checkpoints of a run and clears away what they make superfluous."""

    house: House
    optimizer: Optimizer
    directory: RunDirectory
    log: Log
    journal: Journal

    def save(self, progress: Progress) -> str:
        """The checkpoint of a step; one that holds exactly this is not written again."""
        path = self.directory.checkpoint_path(progress.step)
        if not progress.saved:
            self.log.events.sync()  # a checkpoint never knows of events that a lost disk cache takes away
            state = optimizer_state(self.house.policy, self.optimizer)
            _save(self.house, path, progress, state, _recipe_digest(self.directory))
        settings = self.house.recipe.checkpoint
        keep(self.directory.checkpoints_path, settings.keep_last, settings.keep_best)
        self.journal.forget(checkpoint_step(checkpoints(self.directory.checkpoints_path)[0]))
        return str(path.relative_to(self.directory.path))

    def save_partial(self, step: int) -> str:
        path = save_checkpoint(self.house.policy, self.directory.checkpoints_path / partial_name(step))
        return str(path.relative_to(self.directory.path))


def _save(house: House, path: Path, progress: Progress, optimizer: Mapping[str, Any], recipe: str) -> Path:
    where = {**position(progress, _evaluation_state), "recipe": recipe}
    if progress.evaluated and isinstance(progress.last, EvaluationResult):
        where["pass@1"] = _as_json(progress.last.metrics["pass@1"])
    trainer = TrainerState(optimizer, where, calibration_tensors(progress.calibration))
    facts = {"recipe": recipe, "step": progress.step, "versions": package_versions()}
    return save_checkpoint(house.policy, path, trainer, facts)


def _as_json(value: float) -> float | str:
    """JSON has no nan; float() reads the word."""
    return value if math.isfinite(value) else str(value)


def _evaluation_state(result: EvaluationResult) -> dict[str, Any]:
    """An evaluation without its responses, as JSON."""
    return {
        "name": result.name,
        "step": result.step,
        "outcomes": [[o.prompt_id, o.num_scored, o.num_passed, o.num_unscored] for o in result.outcomes],
        "num_samples": result.num_samples,
        "confidence": result.confidence,
        "metrics": {name: _as_json(value) for name, value in result.metrics.items()},
    }


def _evaluation_from(state: Mapping[str, Any]) -> EvaluationResult:
    return EvaluationResult(
        name=state["name"],
        step=state["step"],
        outcomes=tuple(Outcome(*outcome) for outcome in state["outcomes"]),
        num_samples=state["num_samples"],
        confidence=state["confidence"],
        metrics={name: float(value) for name, value in state["metrics"].items()},
    )


def _settings(recipe: Recipe) -> LoopSettings:
    trainer = recipe.train
    low = min(_first_bounds(recipe).clip_low or (PAPER_BOUNDS[recipe.objective.name] or (1e-3,))[0], 0.2)
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
        non_finite=recipe.guard.non_finite,
        max_non_finite=recipe.guard.max_non_finite,
        reaction="stop" if recipe.guard.reaction == "stop" else "warn",
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
    settings, correction = recipe.objective, _correction(recipe)
    return make_objective(
        settings.name,
        bounds.clip_low,
        bounds.clip_high,
        settings.unit,
        tau_positive=settings.tau_positive,
        tau_negative=settings.tau_negative,
        length_divisor=settings.length_divisor or recipe.rollout.max_new_tokens,
        weighs_tokens=correction is not None and correction.by_token,
    )


def _correction(recipe: Recipe) -> Correction | None:
    settings = recipe.objective.correction
    return None if settings.kind == "none" else Correction(settings.kind, settings.low, settings.high)


def _routing(recipe: Recipe, policy: CausalPolicy) -> RoutingSettings | None:
    """What is done about the routing of a mixture of experts; None for a dense model.

    Raises:
        ModelError: routes are to be replayed, and the model has no experts or routers that are not understood.
    """
    replay, metrics = recipe.moe.replay, recipe.moe.metrics
    if replay == "none" and (metrics == "none" or not has_experts(policy.base)):
        return None
    if replay == "none" and "metrics" not in recipe.moe.model_fields_set and not understands(policy.base):
        return None  # nobody asked for it
    from_preset = PRESETS[recipe.run.preset]["moe.replay"] == replay if recipe.run.preset else False
    if from_preset and not has_experts(policy.base):
        return None  # a preset speaks of mixtures without knowing the model
    return RoutingSettings(routing_shape(policy), replay, metrics)


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
def _logged(directory: RunDirectory, recipe: Recipe, start: Start | None = None) -> Iterator[Log]:
    """Opens the events and the screen, says what is about to happen, and how it ended, whatever ended it."""
    start = start or Start()
    with directory.event_writer() as events, TerminalReporter() as screen:
        log = Log(events, screen)
        if start.trainer is None:
            log.emit("start", **_start_fields(recipe))
        else:  # the file has it already
            screen.on_event({"type": "start", **_start_fields(recipe)})
        for warning in start.warnings:
            log.emit("warning", message=warning)
        try:
            yield log
        except StoppedError as error:
            log.emit("end", status="interrupted", seconds=log.seconds(), message=str(error))
            raise StoppedError(f"{error}; continue with gspo train --resume {directory.path}") from error
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
    stop: StopSignal,
) -> int:
    """Supervised training on the recipe's pairs, saved as ``checkpoints/sft``; returns the number of updates.

    One that is broken off starts from its beginning when the run is continued.
    """
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

    def phase(name: str, step: int) -> None:
        stop.check()
        log.screen.on_phase(name, step)

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
        phase=phase,
    )
    path = directory.checkpoints_path / "sft"
    log.emit("checkpoint", step=0, path=str(path.relative_to(directory.path)))
    where = {"step": 0, "events_size": log.events.size, "recipe": _recipe_digest(directory)}
    save_checkpoint(policy, path, TrainerState({}, where), {"versions": package_versions()})
    return num_updates


def _summary(
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
        "num_updates": settings.num_steps * settings.num_mini_batches,
        "model": str(checkpoint),
        "run_dir": str(directory.path),
    }


def _interval(result: EvaluationResult) -> list[float]:
    return [result.metrics["pass@1/low"], result.metrics["pass@1/high"]]
