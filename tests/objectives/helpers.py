"""Random batches and the mean loss with its gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.objectives.base import Objective


@dataclass(frozen=True, eq=False)
class Batch:
    logprobs: Tensor
    old: Tensor
    advantages: Tensor  # (N,)
    mask: Tensor

    def with_(self, **changes: Tensor) -> Batch:
        return replace(self, **changes)


def random_batch(
    seed: int, num_rows: int = 6, width: int = 7, drift: float = 0.3, dtype: torch.dtype = torch.float64
) -> Batch:
    """Ragged and non-contiguous masks; the last row has no token."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(num_rows, width, generator=generator, dtype=torch.float64) * 3 - 0.01
    logprobs = old + drift * torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_rows, width, generator=generator) < 0.6
    mask[:, 0] = True
    mask[-1] = False
    advantages = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    return Batch(logprobs.to(dtype), old.to(dtype), advantages.to(dtype), mask)


def loss_and_gradient(objective: Objective, batch: Batch, advantages: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The loss of one undivided batch, and its gradient by the log-probs."""
    leaf = batch.logprobs.clone().requires_grad_()
    out = objective(leaf, batch.old, batch.advantages if advantages is None else advantages, batch.mask)
    loss = out.loss_sum / out.count
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad
