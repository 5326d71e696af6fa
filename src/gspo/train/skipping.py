"""Which rows need no forward and which no backward pass, because their gradient is exactly zero.

Rows whose advantage is exactly 0 (groups without signal) have loss and gradient 0 under every objective, which
multiplies by the advantage; they stay in the denominators and in the counts of the clip fractions. Rows that a sequence
objective clips lose all their tokens, so their backward pass is skipped where that saves arithmetic. With a KL term
every row has a gradient, and nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gspo.objectives.base import Objective
from gspo.types import Metric

#: A forward costs half of a backward pass, so another forward and a backward of the rows that are left, 3 (1 - c), are
#: cheaper than one backward of all rows, 2, from a clipped share c of 1/3 on; a little more pays for the packing.
WORTH_SHARE = 0.36


@runtime_checkable
class ClipsWholeRows(Protocol):
    """An objective that can say which rows have gradient exactly 0."""

    def clipped_rows(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> Tensor: ...


@dataclass
class Skipped:
    """What an update did not compute, in rows and response tokens of the loss."""

    rows: int = 0  # neither forward nor backward
    tokens: int = 0
    backward_tokens: int = 0  # forward only

    def metrics(self) -> dict[str, float]:
        return {
            "tokens/skipped_forward": float(self.tokens),
            "tokens/skipped_backward": float(self.tokens + self.backward_tokens),
        }

    def counted(self, sums: Mapping[str, Metric]) -> dict[str, Metric]:
        """Sums of the computed rows with clip fractions over all rows: a row without signal is not clipped."""
        counts = {"clip_fraction/sequence": self.rows, "clip_fraction/token": self.tokens}
        result = dict(sums)
        for prefix, more in counts.items():
            names = [name for name in sums if name.startswith(prefix)] or [prefix]
            for name in names:
                value, count = result.get(name, (0.0, 0.0))
                if more or name in result:
                    result[name] = (value, count + more)
        return result


def with_signal(advantages: Tensor, has_penalty: bool) -> Tensor:
    """(n,) bool: rows with a gradient. advantages: (n,) or (n, T)."""
    if has_penalty:
        return torch.ones(len(advantages), dtype=torch.bool)
    moved = advantages != 0
    return moved if moved.dim() == 1 else moved.any(dim=1)


def rows_to_differentiate(
    objective: Objective, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor | None:
    """Indices of the rows that are not clipped, on the CPU, where a pass over them alone is cheaper; None: all rows.

    (n, T) tensors as the objective gets them.
    """
    if not isinstance(objective, ClipsWholeRows):
        return None
    clipped: Any = objective.clipped_rows(logprobs.detach(), old_logprobs, advantages, mask)
    share = float(mask[clipped].sum()) / max(1, int(mask.sum()))
    return (~clipped).nonzero()[:, 0].cpu() if share >= WORTH_SHARE else None
