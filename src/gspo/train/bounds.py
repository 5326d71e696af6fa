"""Where the clip bounds come from, and how calibrated ones are found.

The width that clips a given share of responses depends on their length: log s has a standard deviation of
about sigma / sqrt(|y|) (docs/algorithms/gspo.md). ``calibrated`` measures log s for a window of steps and freezes
the bounds that would have clipped the target share. The window opens after the warm-up of the learning rate, during
which log s spreads less than it will.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gspo.diagnostics import calibrated_bounds

#: Response length at which the paper's bounds are taken as they are; at 64 tokens it gives the tenfold
#: bounds that were measured there (3e-3 / 4e-3).
PAPER_LENGTH = 6400


@dataclass(frozen=True)
class Bounds:
    """The clip band 1 - clip_low .. 1 + clip_high; both None for objectives that do not clip."""

    clip_low: float | None
    clip_high: float | None


@dataclass(frozen=True, eq=False)
class Calibration:
    """The measuring window of calibrated bounds. Immutable: ``observe`` returns the next state.

    first_update: number of optimizer updates, those of the warm-up, before which a step must not begin to be measured.
    """

    target: float
    num_steps: int
    first_update: int = 0
    seen: tuple[tuple[Tensor, Tensor], ...] = field(default=())  # (log_s, advantages) of each step

    @property
    def frozen(self) -> bool:
        return len(self.seen) >= self.num_steps

    def measures(self, num_updates: int) -> bool:
        """Whether a step belongs into the window that began when this many updates were made."""
        return not self.frozen and num_updates >= self.first_update

    def observe(self, log_s: Tensor, advantages: Tensor) -> Calibration:
        """Adds one step: (n,) log sequence ratios of its updates and the advantages of the same rows."""
        return replace(self, seen=(*self.seen, (log_s.detach(), advantages.detach())))

    def bounds(self) -> Bounds:
        """Bounds that would have clipped the target share of all responses seen."""
        log_s = torch.cat([log_s for log_s, _ in self.seen])
        advantages = torch.cat([advantages for _, advantages in self.seen])
        return Bounds(*calibrated_bounds(log_s, advantages, target=self.target))


def scaled_paper_bounds(paper: tuple[float, float], mean_length: float) -> Bounds:
    """The paper's bounds carried over to another response length by the square-root law.

    The starting point of calibration, before anything was measured.
    """
    factor = max(1.0, math.sqrt(PAPER_LENGTH / max(1.0, mean_length)))
    return Bounds(paper[0] * factor, paper[1] * factor)
