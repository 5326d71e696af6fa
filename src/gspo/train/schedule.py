"""How a rollout batch is cut, and how the learning rate moves.

rollout batch > mini-batch (one optimizer update) > micro-batch (one forward and backward). Cuts never
change a gradient: the denominators are counted before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.seeding import derive_seed
from gspo.types import MiniBatch, Sequences, TrainBatch


def learning_rate_factor(update: int, num_updates: int, warmup_steps: int, schedule: str) -> float:
    """Factor of the peak learning rate for update number ``update`` (from 0).

    Linear warm-up over ``warmup_steps`` updates (the first one already moves), then constant, or linear or
    cosine decay to 0 at ``num_updates``.
    """
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = (update - warmup_steps) / max(1, num_updates - warmup_steps)
    if schedule == "linear":
        return max(0.0, 1.0 - done)
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    raise ValueError(f"schedule {schedule!r} is none of constant, linear, cosine")


def mini_batches(
    batch: TrainBatch, num_mini_batches: int, *, seed: int, step: int, random_drop: Sequence[float] = ()
) -> list[MiniBatch]:
    """The M mini-batches of one rollout batch, each with its denominators.

    Groups are shuffled by a stream of their own and kept together as far as the cut allows; sizes differ by
    at most one row.

    random_drop: for each mini-batch the share of its rows that give no gradient, chosen at random: they leave the rows,
    while the denominators still count them, as they count a response that the clip cuts.
    """
    groups = batch.rollouts.group_ids
    generator = torch.Generator().manual_seed(derive_seed(seed, "mini_batches", step))
    unique = torch.unique(groups)
    place = torch.empty_like(unique)
    place[torch.randperm(len(unique), generator=generator)] = torch.arange(len(unique))
    order = torch.argsort(place[torch.searchsorted(unique, groups)], stable=True)
    mask = batch.loss_mask
    drop = random_drop or (0.0,) * num_mini_batches
    return [
        MiniBatch(
            index=index,
            rows=_without_dropped(rows, drop[index], seed, step, index),
            counts={
                "sequence": int(mask[rows].any(dim=1).sum()),
                "token": int(mask[rows].sum()),
            },
        )
        for index, rows in enumerate(torch.tensor_split(order, num_mini_batches))
        if len(rows)
    ]


def _without_dropped(rows: Tensor, share: float, seed: int, step: int, index: int) -> Tensor:
    """The rows that are left, in their order; a share that is no whole number of rows is rounded."""
    if share == 0:
        return rows
    generator = torch.Generator().manual_seed(derive_seed(seed, "random_drop", step, index))
    kept = torch.randperm(len(rows), generator=generator)[round(share * len(rows)) :]
    return rows[kept.sort().values]


def micro_batches(
    sequences: Sequences, rows: Tensor, *, micro_batch_size: int | None, micro_batch_tokens: int
) -> list[Tensor]:
    """Cuts ``rows`` in their order, so that a group's shared prompt stays with its responses.

    A micro-batch holds at most ``micro_batch_size`` rows and ``micro_batch_tokens`` tokens (a prompt counts once
    for all its rows), but always at least one row. Within these limits the rows are spread evenly.
    """
    if micro_batch_size is not None:
        return [part for part in rows.split(micro_batch_size) if len(part)]
    costs = _token_costs(sequences, rows)
    total = sum(costs)
    target = total / max(1, math.ceil(total / micro_batch_tokens))
    parts: list[list[int]] = [[]]
    used = 0
    for row, cost in zip(rows.tolist(), costs, strict=True):
        if parts[-1] and (used + cost > micro_batch_tokens or used + cost / 2 > target):
            parts.append([])
            used = 0
        parts[-1].append(row)
        used += cost
    return [torch.tensor(part) for part in parts if part]


def _token_costs(sequences: Sequences, rows: Tensor) -> list[int]:
    """Tokens that each row adds, the prompt charged to the first row that needs it."""
    costs = []
    previous = -1
    for row in rows.tolist():
        prompt = int(sequences.prompt_index[row])
        charged = 0 if prompt == previous else len(sequences.prompts[prompt])
        costs.append(charged + int(sequences.lengths[row]))
        previous = prompt
    return costs
