"""What training and evaluation share: the model, the sampler, the prompts and the rewards of a recipe.

Reads the recipe and nothing of a run: no directory, no optimizer, no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gspo.config.presets import PRESETS
from gspo.config.schema import DataConfig, Recipe
from gspo.data.prompts import load_prompts
from gspo.envs.runner import collect
from gspo.envs.tasks import Split, Task, make_task
from gspo.evals.base import EvaluationResult
from gspo.evals.base import evaluate as evaluate_prompts
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.policy.moe.capture import routing_shape
from gspo.policy.moe.families import has_experts, understands
from gspo.rewards.base import RewardSet
from gspo.rewards.builtin import build_rewards
from gspo.rollout.base import Engine, SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.retrying import FailureLog, RetryingEngine
from gspo.rollout.scripted import ScriptedEngine
from gspo.seeding import derive_seed
from gspo.train.routing import RoutingSettings
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
    failures: FailureLog = field(default_factory=FailureLog)  # of the engine

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.policy.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def collect(
        self, prompts: Sequence[Prompt], step: int, first_draw: int = 0, seed: int | None = None
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """The scored groups of a step; ``seed`` is run.seed unless it is given."""
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
            seed=self.recipe.run.seed if seed is None else seed,
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


def build(recipe: Recipe, model: str | Path | None = None) -> House:
    """Loads the model, the prompts and the rewards. Raises an InputError for anything that cannot work."""
    if recipe.run.num_threads:
        torch.set_num_threads(recipe.run.num_threads)
    policy = policy_of(recipe, model)
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
        environment=reward.environment,
    )
    failures, rollout = FailureLog(), recipe.rollout
    engine = RetryingEngine(
        _engine(recipe, policy), failures, max_retries=rollout.max_retries, keep=rollout.engine_failure == "keep"
    )
    return House(recipe, policy, engine, reward_set, prompts, eval_prompts, routing_of(recipe, policy), failures)


def policy_of(recipe: Recipe, path: str | Path | None) -> CausalPolicy:
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


def routing_of(recipe: Recipe, policy: CausalPolicy) -> RoutingSettings | None:
    """What is done about the routing of a mixture of experts; None for a dense model.

    Raises:
        ModelError: routes are to be replayed or balanced, and the model has no experts or routers that are not
            understood.
    """
    replay, metrics, balance = recipe.moe.replay, recipe.moe.metrics, recipe.moe.load_balancing_coefficient
    only_measured = replay == "none" and not balance
    if only_measured and (metrics == "none" or not has_experts(policy.base)):
        return None
    if only_measured and "metrics" not in recipe.moe.model_fields_set and not understands(policy.base):
        return None  # nobody asked for it
    from_preset = PRESETS[recipe.run.preset]["moe.replay"] == replay if recipe.run.preset else False
    if from_preset and not balance and not has_experts(policy.base):
        return None  # a preset speaks of mixtures without knowing the model
    return RoutingSettings(routing_shape(policy), replay, metrics, balance)
