"""A large embedding that is also the output head: its gradient is rows that are added to the head's.

Autograd would make a second tensor of the weight's size, almost all of it zeros, only to add it. In a backward pass the
head comes first and the embedding last, so the head leaves its gradient here (``HeadGradient``) and the embedding
returns the sum.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gspo.policy.native import zeros_apart

#: Bytes of a weight from which this is done.
SHARED_FROM = 16 << 20


class HeadGradient:
    """The gradient of a weight (V, H) by the output head, on its way to the embedding of the same backward pass."""

    def __init__(self) -> None:
        self._left: Tensor | None = None

    def forget(self) -> None:
        """A backward pass that was broken off has left what nobody will take."""
        self._left = None

    def leave(self, gradient: Tensor) -> None:
        self._left = gradient if self._left is None else self._left.add_(gradient)

    def take(self, weight: Tensor) -> Tensor:
        """What was left, or zeros; nothing is left any more."""
        left, self._left = self._left, None
        return zeros_apart(weight) if left is None else left


class SharedEmbedding(torch.autograd.Function):
    """ids, weight (V, H) -> rows of the weight. Its gradient includes what the head has left."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, head: HeadGradient) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding, ctx.head = padding, head
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        rows = ids.flatten()
        by_row = grads[0].reshape(len(rows), -1).to(weight.dtype)
        if ctx.padding is not None:  # as in torch's embedding
            by_row = by_row.masked_fill((rows == ctx.padding)[:, None], 0)
        return None, ctx.head.take(weight).index_add_(0, rows, by_row), None, None


def embedding_forward(self: Any, input: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and self.weight.requires_grad):
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    self.head_gradient.forget()  # nothing is on its way between backward passes
    out: Tensor = SharedEmbedding.apply(input, self.weight, self.padding_idx, self.head_gradient)  # type: ignore[no-untyped-call]
    return out


def share_embedding_gradient(model: Any) -> bool:
    """Replaces the forward of a large tied embedding; whether the model has one."""
    inputs: Any = model.get_input_embeddings()
    plain = type(inputs) is nn.Embedding and inputs.max_norm is None and not inputs.scale_grad_by_freq
    tied = plain and inputs.weight is getattr(model.get_output_embeddings(), "weight", None)
    if not tied or inputs.weight.nbytes < SHARED_FROM:
        return False
    inputs.head_gradient = HeadGradient()
    inputs.forward = MethodType(embedding_forward, inputs)
    return True


def head_gradient_of(model: Any) -> HeadGradient | None:
    """Where the head leaves its gradient; None: nowhere."""
    return getattr(model.get_input_embeddings(), "head_gradient", None)
