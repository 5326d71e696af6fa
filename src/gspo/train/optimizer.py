"""AdamW with a learning-rate schedule, gradient clipping and a finite-gradient check: one ``apply`` per update."""

from __future__ import annotations

import math

import torch
from torch import nn

from gspo.errors import NumericalError
from gspo.train.schedule import learning_rate_factor


class Optimizer:
    """AdamW over all trainable parameters; matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        num_updates: int,
        warmup_steps: int,
        schedule: str,
        betas: tuple[float, float],
        adam_eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = {id(p): name for name, p in named}
        self._parameters = [p for _, p in named]
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=learning_rate, betas=betas, eps=adam_eps, fused=True
        )
        self.peak_learning_rate = learning_rate
        self.num_updates = num_updates
        self.warmup_steps = warmup_steps
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.update = 0  # updates applied so far

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        factor = learning_rate_factor(self.update, self.num_updates, self.warmup_steps, self.schedule)
        return self.peak_learning_rate * factor

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    def apply(self) -> float:
        """One update from the accumulated gradients; returns the gradient norm before clipping.

        Raises:
            NumericalError: a gradient is not finite; the weights are left as they were.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(gradients)
        norm = float(total_norm)
        if not math.isfinite(norm):
            raise NumericalError(
                f"the gradient norm is {norm} at update {self.update} (first in {self._first_bad_gradient()}); "
                "the weights were left as before it. Lower train.learning_rate or train.max_grad_norm"
            )
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self.max_grad_norm, total_norm)
        for group in self.inner.param_groups:
            group["lr"] = self.learning_rate
        self.inner.step()
        self.update += 1
        return norm

    def _first_bad_gradient(self) -> str:
        for parameter in self._parameters:
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return self._names[id(parameter)]
        return "the sum over all parameters"
