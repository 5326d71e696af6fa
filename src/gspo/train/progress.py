"""Where a run stands between two steps, and the same as a checkpoint carries it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from gspo.train.bounds import Bounds, Calibration
from gspo.train.guard import Alarm


class Evaluation(Protocol):
    """What the loop needs of an evaluation."""

    def event_fields(self) -> dict[str, Any]: ...

    def difference_metrics(self, earlier: Any, *, seed: int = 0) -> dict[str, float]: ...


@dataclass(frozen=True, eq=False)
class Progress:
    """Everything beside weights and optimizer that the rest of a run depends on.

    Random streams have no state: each is derived from the seed and from what it is for (``gspo.seeding``).
    """

    step: int  # the last one whose updates are all made; 0 before the first
    num_updates: int  # optimizer updates behind the weights
    cursor: Mapping[str, Any]  # position in the prompts
    bounds: Bounds
    calibration: Calibration | None
    events_size: int  # bytes of events.jsonl that tell the run up to here
    first: Evaluation | None = None
    last: Evaluation | None = None
    evaluated: bool = False  # the evaluation that is due at this step is in ``last``
    num_non_finite: int = 0  # updates in a row that were not made because of a non-finite number
    saved: bool = False  # a checkpoint holds exactly this; not part of the checkpoint
    attempt: int = 0  # how often the run went back to an earlier checkpoint
    alarms: tuple[Alarm, ...] = ()  # what the guard said of this step; not part of the checkpoint


def position(progress: Progress, encode: Callable[[Any], Any]) -> dict[str, Any]:
    """The progress as JSON; ``encode`` does the same for an evaluation."""
    return {
        "step": progress.step,
        "num_updates": progress.num_updates,
        "cursor": dict(progress.cursor),
        "clip_low": progress.bounds.clip_low,
        "clip_high": progress.bounds.clip_high,
        "events_size": progress.events_size,
        "first": None if progress.first is None else encode(progress.first),
        "last": None if progress.last is None else encode(progress.last),
        "evaluated": progress.evaluated,
        "num_non_finite": progress.num_non_finite,
        "attempt": progress.attempt,
        "calibrates": progress.calibration is not None,
    }


def progress_from(
    position: Mapping[str, Any],
    calibration: Calibration | None,
    window: Mapping[str, Tensor],
    decode: Callable[[Any], Any],
) -> Progress:
    """The inverse of :func:`position`.

    Args:
        calibration: the empty window of the recipe, or None.
        window: what :func:`calibration_tensors` gave.
    """
    if not position.get("calibrates", True):  # the bounds were set when the run went back
        calibration = None
    if calibration is not None:
        for index in range(len(window) // 2):
            calibration = calibration.observe(window[f"{index}/log_s"], window[f"{index}/advantages"])
    return Progress(
        step=position["step"],
        num_updates=position["num_updates"],
        cursor=position["cursor"],
        bounds=Bounds(position["clip_low"], position["clip_high"]),
        calibration=calibration,
        events_size=position["events_size"],
        first=None if position["first"] is None else decode(position["first"]),
        last=None if position["last"] is None else decode(position["last"]),
        evaluated=position["evaluated"],
        num_non_finite=position["num_non_finite"],
        saved=True,
        attempt=position.get("attempt", 0),
    )


def calibration_tensors(calibration: Calibration | None) -> dict[str, Tensor]:
    """The measuring window, step by step."""
    found: dict[str, Tensor] = {}
    for index, (log_s, advantages) in enumerate(calibration.seen if calibration is not None else ()):
        found[f"{index}/log_s"] = log_s.contiguous()
        found[f"{index}/advantages"] = advantages.contiguous()
    return found
