"""What the loop works with, put together: optimizer, cursor, journal, guard, reference, saver.

For a run that goes on, each part is put back to where its checkpoint was taken. The loop itself is ``train/loop.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gspo.config.schema import Recipe
from gspo.data.prompts import PromptCursor
from gspo.evals.base import EvaluationResult
from gspo.events import RunDirectory, read_event_log
from gspo.launch.checkpoints import Saver, Start, evaluation_from
from gspo.launch.house import House, policy_of
from gspo.launch.log import Log
from gspo.launch.settings import calibration_of, correction_of, first_bounds, objective_of, prompts_per_call
from gspo.launch.signals import StopSignal
from gspo.objectives.bundle import PAPER_BOUNDS
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy
from gspo.rollout.retrying import Failure
from gspo.seeding import derive_seed
from gspo.train.checkpoint import newest_before, restore_optimizer, verify_model
from gspo.train.guard import Guard, replay
from gspo.train.journal import Journal, JournaledEngine, JournaledRewards
from gspo.train.loop import Collect, Parts
from gspo.train.optimizer import Optimizer
from gspo.train.progress import Progress, progress_from
from gspo.types import Prompt, RolloutGroup


def make_parts(
    log: Log, house: House, directory: RunDirectory, start: Start, stop: StopSignal
) -> tuple[Parts, Progress | None]:
    """What the loop works with, and where it goes on; None at the beginning."""
    recipe = house.recipe
    objective, trainer = recipe.objective, recipe.train
    paper = PAPER_BOUNDS[objective.name]
    bounds = first_bounds(recipe)
    kl = reference = None
    if objective.kl_coefficient > 0:
        kl = KLPenalty(objective.kl_coefficient, objective.kl_estimator, objective_of(recipe, bounds).unit)
        reference = _reference(house, directory, start)
    cursor = PromptCursor(house.prompts, seed=derive_seed(recipe.run.seed, "prompts"))
    optimizer = Optimizer(
        house.policy.model,
        learning_rate=start.history.learning_rate(recipe),
        num_updates=start.history.num_updates(recipe),
        warmup_steps=trainer.warmup_steps,
        schedule=trainer.schedule,
        betas=trainer.betas,
        adam_eps=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
    )
    progress = _put_back(house, optimizer, cursor, start)
    journal = Journal(directory.journal_path, lambda message: log.emit("warning", message=message))
    at = At(start.history.seed(recipe))
    house.failures.tell = _teller(log)
    house = replace(
        house,
        engine=JournaledEngine(
            house.engine,
            journal,
            at.step,
            stop.check,
            prompts_per_call=prompts_per_call(recipe),
            failures=house.failures,
        ),
        reward_set=JournaledRewards(house.reward_set, journal, at.step),
    )
    saver = Saver(house, optimizer, directory, log, journal)
    parts = Parts(
        policy=house.policy,
        optimizer=optimizer,
        next_prompts=cursor.next,
        cursor=cursor.state,
        collect=at.collecting(house),
        make_objective=lambda bounds: objective_of(recipe, bounds),
        bounds=bounds,
        paper_bounds=paper,
        set_policy_version=house.set_policy_version,
        evaluate=at.evaluating(house) if house.eval_prompts else None,
        save=saver.save,
        save_partial=saver.save_partial,
        checkpoint_before=lambda step: newest_before(directory.checkpoints_path, start.history.not_before(step)),
        events_size=lambda: log.events.size,
        check_stop=stop.check,
        counts=lambda: {
            "reward/timeouts": house.reward_set.counters.get("timeouts", 0),
            **{f"engine/{name}": count for name, count in house.failures.counts.items()},
        },
        emit=log.emit,
        phase=log.screen.on_phase,
        guard=_guard(recipe, directory),
        calibration=calibration_of(recipe),
        kl=kl,
        reference=reference,
        correction=correction_of(recipe),
        routing=house.routing,
    )
    return parts, progress


@dataclass(eq=False)
class At:
    """The step that the engine and the rewards work for: the journal keeps one file a step.

    seed: of the rollouts.
    """

    seed: int
    current: int = 0

    def step(self) -> int:
        return self.current

    def collecting(self, house: House) -> Collect:
        def collect(
            prompts: Sequence[Prompt], step: int, first_draw: int = 0
        ) -> tuple[list[RolloutGroup], dict[str, float]]:
            self.current = step
            return house.collect(prompts, step, first_draw, self.seed)

        return collect

    def evaluating(self, house: House) -> Callable[[int], EvaluationResult]:
        def evaluate(step: int) -> EvaluationResult:
            self.current = step
            return house.evaluate(step)

        return evaluate


def _teller(log: Log) -> Callable[[Failure], None]:
    """Says in the events that the engine failed."""

    def tell(failure: Failure) -> None:
        then = "; the call is made again" if failure.retried else ""
        log.emit("warning", message=f"the engine failed ({failure.kind}): {failure.message}{then}", engine=failure.kind)

    return tell


def _guard(recipe: Recipe, directory: RunDirectory) -> Guard | None:
    """The detectors, with what the events say of the steps before."""
    if {recipe.guard.reaction, *recipe.guard.reactions.values()} == {"off"}:
        return None
    return replay(read_event_log(directory.events_path).events)[0]


def _put_back(house: House, optimizer: Optimizer, cursor: PromptCursor, start: Start) -> Progress | None:
    """Optimizer state and positions of the checkpoint whose weights are already there."""
    trainer = start.trainer
    if trainer is None or trainer.position["step"] == 0:  # also after a cold start, whose optimizer is not used again
        return None
    restore_optimizer(house.policy, optimizer, trainer.optimizer, trainer.position["num_updates"])
    cursor.restore(trainer.position["cursor"])
    house.set_policy_version(optimizer.update)
    progress = progress_from(trainer.position, calibration_of(house.recipe), trainer.calibration, evaluation_from)
    return start.history.started(house.recipe, progress) if start.history.begins(progress.attempt) else progress


def _reference(house: House, directory: RunDirectory, start: Start) -> CausalPolicy:
    """The weights at the first step, frozen: those of now, or of then for a run that goes on."""
    policy = house.policy
    if start.trainer is not None and start.trainer.position["step"] > 0:
        cold = directory.checkpoints_path / "sft"
        if house.recipe.sft is not None:
            verify_model(cold)
        policy = policy_of(house.recipe, cold if house.recipe.sft is not None else None)
        return replace(policy, model=policy.model.requires_grad_(False))
    return replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))
