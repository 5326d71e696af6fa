"""Masks select, they never multiply: 0 * nan is nan, and so is its gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def select(values: Tensor, mask: Tensor) -> Tensor:
    """(N, T) values where the mask is True, exactly 0 elsewhere; the gradient there is exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """() sum over the True slots."""
    return select(values, mask).sum()


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) mean over the True slots of each row; 0 for a row that has none."""
    lengths = mask.sum(dim=-1).clamp(min=1)
    return select(values, mask).sum(dim=-1) / lengths


def first_true(mask: Tensor) -> tuple[int, int]:
    """(row, column) of the first True slot of an (N, T) mask that has one."""
    row, column = torch.nonzero(mask)[0].tolist()
    return row, column
