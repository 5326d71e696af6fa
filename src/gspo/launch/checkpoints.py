"""The checkpoints of a run: written as it goes, and the newest good one found again.

What is in a checkpoint file is ``train/checkpoint.py``'s; putting optimizer and positions back is ``parts.py``'s.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config.schema import Recipe
from gspo.errors import ConfigError, ModelError
from gspo.evals.base import EvaluationResult, Outcome
from gspo.events import RunDirectory, package_versions
from gspo.launch.house import House
from gspo.launch.log import Log
from gspo.policy.causal_lm import CausalPolicy
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
    save_checkpoint,
    verify_model,
)
from gspo.train.journal import Journal
from gspo.train.manifest import read_manifest
from gspo.train.optimizer import Optimizer
from gspo.train.progress import Progress, calibration_tensors, position


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


def find_start(recipe: Recipe, directory: RunDirectory) -> Start:
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


def evaluation_from(state: Mapping[str, Any]) -> EvaluationResult:
    return EvaluationResult(
        name=state["name"],
        step=state["step"],
        outcomes=tuple(Outcome(*outcome) for outcome in state["outcomes"]),
        num_samples=state["num_samples"],
        confidence=state["confidence"],
        metrics={name: float(value) for name, value in state["metrics"].items()},
    )


def save_cold_start(policy: CausalPolicy, directory: RunDirectory, log: Log) -> None:
    """The end of the cold start as ``checkpoints/sft``, from where a run can go on."""
    path = directory.checkpoints_path / "sft"
    log.emit("checkpoint", step=0, path=str(path.relative_to(directory.path)))
    where = {"step": 0, "events_size": log.events.size, "recipe": _recipe_digest(directory)}
    save_checkpoint(policy, path, TrainerState({}, where), {"versions": package_versions()})
