"""Slow references: loops over Python floats, written from the formulas and sharing nothing with the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Answer:
    loss: float
    gradient: list[list[float]]


def _rows(logprobs: Tensor, old: Tensor, mask: Tensor) -> list[list[tuple[int, float]]]:
    """Per row: (token index, log ratio) of the tokens that enter."""
    return [
        [(t, float(logprobs[n, t]) - float(old[n, t])) for t in range(mask.shape[1]) if mask[n, t]]
        for n in range(mask.shape[0])
    ]


def _clipped(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """min(r A, clip(r) A) and its derivative by log pi where r's own derivative is r."""
    free = ratio * advantage
    clipped = min(max(ratio, 1 - low), 1 + high) * advantage
    return (free, free) if free <= clipped else (clipped, 0.0)


def gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Answer:
    """(N,) advantages; equations (5)-(7)."""
    rows = _rows(logprobs, old, mask)
    num_sequences = sum(1 for row in rows if row)
    gradient = [[0.0] * mask.shape[1] for _ in rows]
    total = 0.0
    for n, row in enumerate(rows):
        if not row:
            continue
        ratio = math.exp(math.fsum(d for _, d in row) / len(row))
        value, slope = _clipped(ratio, float(advantages[n]), low, high)
        total += value
        for t, _ in row:
            gradient[n][t] = -slope / len(row) / num_sequences
    return Answer(-total / num_sequences, gradient)


def token_ratio(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, by_token: bool
) -> Answer:
    """(N, T) advantages; mean in the row then over rows, or over all tokens."""
    rows = _rows(logprobs, old, mask)
    num_sequences = sum(1 for row in rows if row)
    num_tokens = sum(len(row) for row in rows)
    gradient = [[0.0] * mask.shape[1] for _ in rows]
    total = 0.0
    for n, row in enumerate(rows):
        for t, d in row:
            weight = 1 / num_tokens if by_token else 1 / len(row) / num_sequences
            value, slope = _clipped(math.exp(d), float(advantages[n, t]), low, high)
            total += value * weight
            gradient[n][t] = -slope * weight
    return Answer(-total, gradient)


def gradient_tensor(answer: Answer) -> Tensor:
    return torch.tensor(answer.gradient, dtype=torch.float64)
