"""AdamW with a learning-rate schedule, gradient clipping and a finite-gradient check: one ``apply`` per update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gspo.errors import NumericalError
from gspo.policy.native import STRETCH, Native, native_for, zeros_apart
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
        updated = [p for p in self._parameters if p.grad is not None]
        native = _native_for_all(updated)
        norm = torch_norm(updated) if native is None else gradient_norm(updated, native)
        if not math.isfinite(norm):
            raise NumericalError(
                f"the gradient norm is {norm} at update {self.update} (first in {self._first_bad_gradient()}); "
                "the weights were left as before it. Lower train.learning_rate or train.max_grad_norm"
            )
        for group in self.inner.param_groups:
            group["lr"] = self.learning_rate
        if native is None:
            torch.nn.utils.clip_grads_with_norm_(updated, self.max_grad_norm, torch.tensor(norm, dtype=torch.float64))
            self.inner.step()
        else:
            self._step(native, clip_factor(norm, self.max_grad_norm))
        self.update += 1
        return norm

    def _step(self, native: Native, clip: float) -> None:
        """Clipping and AdamW in one pass over memory; the state is left as ``inner``'s own step would."""
        for group in self.inner.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.inner.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = zeros_apart(parameter)
                    state["exp_avg_sq"] = zeros_apart(parameter)
                state["step"] += 1
                count = float(state["step"])
                native.adamw(
                    (parameter.data, parameter.grad, state["exp_avg"], state["exp_avg_sq"]),
                    (
                        clip,
                        group["lr"] * group["weight_decay"],
                        beta1,
                        beta2,
                        group["lr"] / (1 - beta1**count),
                        math.sqrt(1 - beta2**count),
                        group["eps"],
                    ),
                )

    def _first_bad_gradient(self) -> str:
        for parameter in self._parameters:
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return self._names[id(parameter)]
        return "the sum over all parameters"


def torch_norm(parameters: Sequence[Tensor]) -> float:
    """Euclidean norm of all gradients, by torch."""
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def gradient_norm(parameters: Sequence[Tensor], native: Native) -> float:
    """Euclidean norm of all gradients; sums of fixed stretches, so the same for any number of threads."""
    sizes = [-(-parameter.numel() // STRETCH) for parameter in parameters]
    parts = torch.zeros(sum(sizes), dtype=torch.float64)
    for parameter, room in zip(parameters, parts.split(sizes), strict=True):
        assert parameter.grad is not None
        native.squares(parameter.grad, room)
    return math.sqrt(float(parts.sum()))


def clip_factor(norm: float, most: float) -> float:
    """What gradients are multiplied by, as in torch's clipping."""
    return min(1.0, most / (norm + 1e-6))


def _native_for_all(parameters: Sequence[Tensor]) -> Native | None:
    """The kernels, if they can update all of these: on the CPU, of one dtype, without gaps."""
    tensors = [tensor for p in parameters for tensor in (p, p.grad) if tensor is not None]
    if len({tensor.dtype for tensor in tensors}) != 1:
        return None
    if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in tensors):
        return None
    return native_for(tensors[0])
