"""The checkpoints of a run: written as it goes, and the newest good one found again.

What is in a checkpoint file is ``train/checkpoint.py``'s; putting optimizer and positions back is ``parts.py``'s.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.config.effects import goes_back
from gspo.config.schema import Recipe
from gspo.errors import ConfigError, ModelError
from gspo.evals.base import EvaluationResult, Outcome
from gspo.events import RunDirectory, package_versions
from gspo.launch.attempts import History, read_history
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
    newest_sft,
    optimizer_state,
    partial_name,
    remove,
    remove_abandoned,
    remove_leftovers,
    remove_sft,
    save_checkpoint,
    sft_checkpoints,
    sft_name,
    verify_model,
)
from gspo.train.guard import SHORT
from gspo.train.journal import Journal
from gspo.train.manifest import read_manifest
from gspo.train.optimizer import Optimizer
from gspo.train.progress import Progress, calibration_tensors, position


@dataclass(frozen=True, eq=False)
class Start:
    """Where a run begins: at its first line, within or after the cold start, or after a step.

    history: the times that the run went back to an earlier checkpoint.
    checkpoint: holds weights (and ``trainer`` what goes with them); None at the first line.
    """

    checkpoint: Path | None = None
    trainer: TrainerState | None = None
    warnings: tuple[str, ...] = ()
    history: History = field(default_factory=History)

    @property
    def events_size(self) -> int:
        return 0 if self.trainer is None else int(self.trainer.position["events_size"])

    @property
    def sft_update(self) -> int:
        """Updates of the cold start behind the weights, where that goes on."""
        return 0 if self.trainer is None else int(self.trainer.position.get("sft_update", 0))

    @property
    def goes_back(self) -> bool:
        """Whether an attempt begins here: the checkpoint is of an earlier one."""
        return self.trainer is not None and self.history.begins(self.trainer.position.get("attempt", 0))

    @property
    def is_cold(self) -> bool:
        """Whether the cold start, if the recipe has one, is still to be made or to be ended."""
        return self.trainer is None or "sft_update" in self.trainer.position


def find_start(recipe: Recipe, directory: RunDirectory) -> Start:
    """The newest good checkpoint of a run; else the end of its cold start, or a place in it; else its beginning."""
    history, folder = read_history(directory), directory.checkpoints_path
    remove_leftovers(folder)
    if history.attempts:
        remove_abandoned(folder, history.attempts[-1].step, history.number)
    path, faults = newest_good(folder)
    if path is None and recipe.sft is not None:
        path, faults = _in_cold_start(folder)
    if path is None:
        return Start(warnings=tuple(f"{fault}; the cold start is made again" for fault in faults), history=history)
    if path.parent == folder and path not in sft_checkpoints(folder):
        remove_sft(folder)
    trainer = load_trainer_state(path)
    recorded = trainer.position.get("recipe")
    if recorded != _recipe_digest(directory):
        raise ConfigError(
            f"{directory.recipe_path} is not the recipe that {path} was trained with; put back the one it had, or "
            "start a new run from the checkpoint with model.path"
        )
    warnings = tuple(f"{fault}; going on from the newest good one, {path.name}" for fault in faults)
    return Start(path, trainer, (*warnings, *_other_versions(path)), history)


def _in_cold_start(folder: Path) -> tuple[Path | None, list[str]]:
    """The end of the cold start; else the newest good checkpoint within it; and what is wrong with newer ones."""
    faults = []
    if (folder / "sft").exists():
        try:
            verify_model(folder / "sft")
        except ModelError as error:
            faults.append(str(error))
        else:
            return folder / "sft", []
    path, more = newest_sft(folder)
    return path, faults + more


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
        # A detector looks back over SHORT steps: one from before these is to be there when it fires.
        older = SHORT - 1 if goes_back(self.house.recipe) else None
        keep(self.directory.checkpoints_path, settings.keep_last, settings.keep_best, older)
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


@dataclass(eq=False)
class ColdStartSaver:
    """Writes the checkpoints of a cold start: places within it while it goes on, ``checkpoints/sft`` at its end.

    Args:
        saved: updates behind the newest checkpoint that is there.
    """

    policy: CausalPolicy
    optimizer: Optimizer
    directory: RunDirectory
    log: Log
    saved: int = 0

    def save(self, update: int) -> str:
        """The two newest are kept; one that is there is not written again."""
        folder = self.directory.checkpoints_path
        path = folder / sft_name(update)
        if update != self.saved:
            self._write(path, update, optimizer_state(self.policy, self.optimizer), sft_update=update)
            self.saved = update
        for older in sft_checkpoints(folder)[:-2]:
            remove(older)
        return str(path.relative_to(self.directory.path))

    def finish(self, num_updates: int) -> None:
        """The end, from where a run can go on; what was kept within the cold start is deleted."""
        path = self.directory.checkpoints_path / "sft"
        self.log.emit("checkpoint", step=0, path=str(path.relative_to(self.directory.path)))
        self._write(path, num_updates, {})
        remove_sft(self.directory.checkpoints_path)

    def _write(self, path: Path, num_updates: int, optimizer: Mapping[str, Any], **more: int) -> None:
        self.log.events.sync()
        recipe = _recipe_digest(self.directory)
        size = self.log.events.size
        where = {"step": 0, "num_updates": num_updates, "events_size": size, "recipe": recipe, **more}
        facts = {"recipe": recipe, "versions": package_versions()}
        save_checkpoint(self.policy, path, TrainerState(optimizer, where), facts)
