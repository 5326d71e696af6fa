"""A house without a loop: sampled batches and single updates, for studies that measure and do not train.

Everything here is the trainer's own code; only the order in which it is called is the study's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from gspo.config.schema import Recipe
from gspo.data.prompts import PromptCursor
from gspo.launch.attempts import History
from gspo.launch.house import House, build
from gspo.launch.settings import settings_of
from gspo.objectives.base import Objective
from gspo.policy.causal_lm import CausalPolicy
from gspo.rollout.base import Engine
from gspo.seeding import derive_seed
from gspo.train.batch import included_rows, train_batch
from gspo.train.loop import LoopSettings
from gspo.train.optimizer import Optimizer
from gspo.train.routing import Replay, StepRouting
from gspo.train.step import UpdateResult, score, update
from gspo.types import MiniBatch, Prompt, RolloutBatch, RolloutGroup, TrainBatch

Kind = TypeVar("Kind", bound=Optimizer)


@dataclass(frozen=True, eq=False)
class Laboratory:
    """The model, sampler, prompts and rewards of a recipe, and a position in its prompts."""

    house: House
    settings: LoopSettings
    cursor: PromptCursor

    @property
    def policy(self) -> CausalPolicy:
        return self.house.policy

    def with_engine(self, engine: Engine) -> Laboratory:
        """The same with another sampler."""
        return replace(self, house=replace(self.house, engine=engine))

    def optimizer(self, kind: type[Kind]) -> Kind:
        """The recipe's, at its beginning; ``kind`` is ``Optimizer`` or does something else with the gradient."""
        trainer = self.house.recipe.train
        return kind(
            self.policy.model,
            learning_rate=trainer.learning_rate,
            num_updates=trainer.num_steps * trainer.num_mini_batches,
            warmup_steps=trainer.warmup_steps,
            schedule=trainer.schedule,
            betas=trainer.betas,
            adam_eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
        )

    def sample(self, num_prompts: int, step: int) -> list[RolloutGroup]:
        """Scored groups for the next prompts. ``step`` names the random streams: give each call another one."""
        return self.sample_for(self.cursor.next(num_prompts), step)

    def sample_for(self, prompts: Sequence[Prompt], step: int) -> list[RolloutGroup]:
        groups, _ = self.house.collect(prompts, step)
        return groups

    def score(self, rollouts: RolloutBatch, routing: StepRouting | None = None) -> Tensor:
        """(N, T) log-probs under the policy as it is now; routing records what the trainer's routers did."""
        rows = torch.arange(len(rollouts.rewards))
        return score(self.policy, rollouts, rows, self.settings.temperature, self.settings.cut, routing)

    def routing(self, rollouts: RolloutBatch, replay: Replay) -> StepRouting | None:
        """Routes of these rollouts, recorded by the next ``score``; None for a dense model."""
        base = self.house.routing
        return None if base is None else StepRouting.of(replace(base, replay=replay), rollouts)

    def batch(self, groups: Sequence[RolloutGroup], rollouts: RolloutBatch, old_logprobs: Tensor) -> TrainBatch:
        """Advantages and included rows as the recipe has them."""
        settings = self.settings
        signal = torch.tensor([group.has_signal for group in groups])[rollouts.group_ids]
        return train_batch(
            rollouts,
            old_logprobs,
            advantage_scale=settings.advantage_scale,
            std_floor=settings.std_floor,
            included=included_rows(
                rollouts,
                signal,
                truncated=settings.truncated,
                groups_without_signal=settings.groups_without_signal,
            ),
        )

    def update(
        self,
        optimizer: Optimizer,
        objective: Objective,
        batch: TrainBatch,
        mini: MiniBatch,
        routing: StepRouting | None = None,
    ) -> UpdateResult:
        """One update of the trainer."""
        return update(
            self.policy,
            optimizer,
            objective,
            batch,
            mini,
            temperature=self.settings.temperature,
            cut=self.settings.cut,
            routing=routing,
        )


@contextmanager
def laboratory(recipe: Recipe) -> Iterator[Laboratory]:
    """Opens the house of a recipe and closes it again. Raises InputError for a recipe that cannot work."""
    house = build(recipe)
    try:
        cursor = PromptCursor(house.prompts, seed=derive_seed(recipe.run.seed, "prompts"))
        yield Laboratory(house, settings_of(recipe, History()), cursor)
    finally:
        house.close()
