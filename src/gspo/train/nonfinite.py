"""Where a number that is not finite came from, in words: prompt, sample, token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.types import RolloutGroup, TrainBatch


def bad_old_logprobs(groups: Sequence[RolloutGroup], batch: TrainBatch) -> tuple[Tensor, list[str]]:
    """(N,) bool, the rows with an old log-prob in the loss that is not finite; and a sentence for each of them."""
    bad = ~torch.isfinite(batch.old_logprobs) & batch.loss_mask
    sentences = []
    for row in bad.any(dim=1).nonzero()[:, 0].tolist():
        token = int(bad[row].nonzero()[0, 0])
        value = float(batch.old_logprobs[row, token])
        sentences.append(f"the old log-prob of {place(groups, row)}, response token {token}, is {value}")
    return bad.any(dim=1), sentences


def first_bad_logprob(groups: Sequence[RolloutGroup], batch: TrainBatch, rows: Tensor, logprobs: Tensor) -> str:
    """Names the first of ``rows`` to which the policy gives a log-prob that is not finite; empty if there is none.

    Args:
        rows: (n,) into the batch.
        logprobs: (n, T) of these rows.
    """
    bad = ~torch.isfinite(logprobs) & batch.loss_mask[rows]
    if not bad.any():
        return ""
    row, token = (int(i) for i in bad.nonzero()[0])
    return f" (the policy's log-prob of {place(groups, int(rows[row]))}, response token {token})"


def place(groups: Sequence[RolloutGroup], row: int) -> str:
    """A row of the rollout batch in words."""
    first = 0
    for group in groups:
        if row < first + len(group.rollouts):
            return f"prompt {group.prompt.id!r}, sample {row - first} (row {row})"
        first += len(group.rollouts)
    raise IndexError(f"row {row} of {first}")
