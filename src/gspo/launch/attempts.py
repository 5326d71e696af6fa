"""The times that a run went back to an earlier checkpoint, in ``attempts.json``, and what each of them changed.

Going back is a resume with another number. The file is written first, whole or not at all; then the checkpoints that
the run has left behind are deleted and the events are cut. Whatever is cut short of that is made up for by the next
resume, which goes the same way. The events of the stretch that was left are kept in ``abandoned/attempt-1.jsonl``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gspo.config.schema import Recipe
from gspo.errors import RunDirectoryError
from gspo.events import RunDirectory, replace_file, sync_path, write_json
from gspo.seeding import derive_seed
from gspo.train.bounds import Bounds
from gspo.train.checkpoint import load_trainer_state
from gspo.train.loop import GoBackError
from gspo.train.progress import Progress

_FILE = "attempts.json"
_ABANDONED = "abandoned"


@dataclass(frozen=True)
class Attempt:
    """One time that a run went back."""

    number: int  # from 1
    step: int  # of the checkpoint that it went back to
    num_updates: int  # optimizer updates behind that checkpoint
    from_step: int  # at which a detector fired
    alarms: tuple[str, ...]  # detector and evidence
    abandoned: str  # file of the events that were left behind, relative to the run directory


@dataclass(frozen=True)
class History:
    """All times that a run went back, and the settings that follow from them."""

    attempts: tuple[Attempt, ...] = ()

    @property
    def number(self) -> int:
        return len(self.attempts)

    def seed(self, recipe: Recipe) -> int:
        """Of rollouts and mini-batches: another with each attempt, so that the same accident does not come again."""
        return derive_seed(recipe.run.seed, "attempt", self.number) if self.attempts else recipe.run.seed

    def learning_rate(self, recipe: Recipe) -> float:
        return float(recipe.train.learning_rate * recipe.guard.go_back.learning_rate_factor**self.number)

    def num_mini_batches(self, recipe: Recipe) -> int:
        changed = recipe.guard.go_back.num_mini_batches if self.attempts else None
        return changed or recipe.train.num_mini_batches

    def num_updates(self, recipe: Recipe) -> int:
        """Updates of the whole run, for the schedule of the learning rate."""
        if not self.attempts:
            return recipe.train.num_steps * recipe.train.num_mini_batches
        last = self.attempts[-1]
        return last.num_updates + (recipe.train.num_steps - last.step) * self.num_mini_batches(recipe)

    def not_before(self, step: int) -> int:
        """``step``, but after the place that the run went back to last: what was before it was judged good then."""
        return max(step, self.attempts[-1].step + 1) if self.attempts else step

    def begins(self, position_attempt: int) -> bool:
        """Whether a checkpoint of this attempt number is what the last attempt starts from."""
        return position_attempt < self.number

    def started(self, recipe: Recipe, progress: Progress) -> Progress:
        """The progress of the checkpoint that an attempt starts from, with the changed bounds.

        Calibration ends where bounds are changed that it had already found.
        """
        change, bounds = recipe.guard.go_back, progress.bounds
        factor = change.bounds_factor ** (self.number - progress.attempt)
        changed = _changed(bounds, change.clip_low, change.clip_high, factor)
        calibration = progress.calibration if changed == bounds else None
        return replace(progress, bounds=changed, calibration=calibration, attempt=self.number, saved=True)


def _changed(bounds: Bounds, low: float | None, high: float | None, factor: float) -> Bounds:
    if low is not None or high is not None:
        return Bounds(low, high)
    return Bounds(*(None if bound is None else bound * factor for bound in (bounds.clip_low, bounds.clip_high)))


def read_history(directory: RunDirectory) -> History:
    """What ``attempts.json`` says; nothing if it is not there.

    Raises:
        RunDirectoryError: it cannot be read.
    """
    path = directory.path / _FILE
    if not path.exists():
        return History()
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return History(tuple(Attempt(**{**entry, "alarms": tuple(entry["alarms"])}) for entry in entries))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(f"{path}: cannot be read ({error}); it was changed or damaged") from error


def note_attempt(directory: RunDirectory, order: GoBackError) -> Attempt:
    """Keeps the events that are left behind, then writes the attempt down: from here on the run has gone back."""
    history = read_history(directory)
    position = load_trainer_state(order.checkpoint).position
    number = history.number + 1
    name = Path(_ABANDONED) / f"attempt-{number}.jsonl"
    attempt = Attempt(
        number=number,
        step=position["step"],
        num_updates=position["num_updates"],
        from_step=order.progress.step,
        alarms=tuple(f"{alarm.detector}: {alarm.message}" for alarm in order.alarms),
        abandoned=name.as_posix(),
    )
    if not (directory.path / _ABANDONED).is_dir():
        (directory.path / _ABANDONED).mkdir()
        sync_path(directory.path)
    left = directory.events_path.read_bytes()[position["events_size"] :]
    replace_file(directory.path / name, left)
    write_json(directory.path / _FILE, [asdict(entry) for entry in (*history.attempts, attempt)])
    return attempt
