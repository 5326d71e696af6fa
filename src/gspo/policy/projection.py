"""From hidden states to log-probs, in chunks of rows: (rows, V) logits of a whole batch never exist.

``log p(y) = x_y - logsumexp(x)`` with ``x = logits / temperature``, in float32 whatever the dtype of the weights
(float64 for float64). The backward pass recomputes the logits, those of few chunks but one:
``dx = (onehot(y) - softmax(x)) * grad``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo.errors import ModelError
from gspo.policy.embedding import HeadGradient, head_gradient_of
from gspo.policy.native import native_for, zeros_apart
from gspo.policy.products import product

#: Bytes that the logits of one chunk may take.
CHUNK_BYTES = 96 << 20
#: Up to so many chunks the first one is kept for the backward pass: with few rows the product with a large vocabulary
#: is a quarter of an update. With more the others, which are computed again, outweigh it.
KEPT_OF_CHUNKS = 4


@dataclass(frozen=True, eq=False)
class LogitHead:
    """The last layer of a causal LM: ``logits = cap * tanh(scale * (h W^T + b) / cap)``."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None
    gradient: HeadGradient | None = None  # where that of the weight is left for the embedding, which adds its own

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (n, H) -> logits (n, V), float32 (float64 for float64 weights)."""
        dtype = compute_dtype(self.weight)
        wide = _wide(self.weight, dtype)
        return _logits(self, hidden, wide, hidden.new_empty(len(hidden), len(wide), dtype=dtype))

    @property
    def chunk_rows(self) -> int:
        """Rows whose logits fit into the budget."""
        return max(16, CHUNK_BYTES // (self.weight.shape[0] * compute_dtype(self.weight).itemsize))


def head_of(model: nn.Module) -> LogitHead:
    """The head of a transformers causal LM. Raises ModelError if it is not one linear layer."""
    layer: Any = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(getattr(layer, "weight", None), Tensor):
        raise ModelError(f"{type(model).__name__} has no linear output layer; use a causal language model")
    config: Any = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    cap = None if softcap is None else float(softcap)
    return LogitHead(layer.weight, getattr(layer, "bias", None), scale, cap, head_gradient_of(model))


def selected_logprobs(
    head: LogitHead,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool = False,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the targets, and the entropy of the distributions.

    hidden: (R, H) states that predict the targets; targets: (R,) int64; temperature > 0.
    chunk_rows: rows projected at once; default: what fits into the memory budget.
    Returns (R,) log-probs with gradient, float32, and (R,) entropies in nats without gradient or None.
    """
    logprobs, entropy = SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        head.weight,
        head.bias,
        targets,
        head,
        temperature,
        with_entropy,
        even_chunk(len(hidden), chunk_rows or head.chunk_rows),
        torch.is_grad_enabled(),
    )
    return logprobs, entropy if with_entropy else None


class SelectedLogprobs(torch.autograd.Function):
    """See selected_logprobs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: LogitHead,
        temperature: float,
        with_entropy: bool,
        chunk_rows: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(weight)
        wide = _wide(weight, dtype)
        num_rows = hidden.shape[0]
        logprobs = torch.empty(num_rows, dtype=dtype, device=hidden.device)
        lse = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        kept: Tensor | None = None
        room = _room(hidden, wide, chunk_rows)
        keep = keep and num_rows <= KEPT_OF_CHUNKS * chunk_rows
        for start in range(0, num_rows, chunk_rows):
            rows = slice(start, start + chunk_rows)
            if kept is room:
                room = torch.empty_like(room)
            x = _logits(head, hidden[rows], wide, room)
            if keep and start == 0:
                kept = room
            into = (logprobs[rows], lse[rows], entropy[rows] if with_entropy else None)
            _statistics(x, targets[rows], 1 / temperature, *into, overwrite=room is not kept)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.head, ctx.temperature, ctx.chunk_rows, ctx.kept = head, temperature, chunk_rows, kept
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        head: LogitHead = ctx.head
        dtype = compute_dtype(weight)
        wide = _wide(weight, dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_bias = torch.zeros(wide.shape[0], dtype=dtype, device=wide.device) if need_bias else None
        kept, ctx.kept = ctx.kept, None  # overwritten below; a second backward pass computes it again
        room = _room(hidden, wide, ctx.chunk_rows) if kept is None else kept
        d_weight = None
        if need_weight:  # where logits are too many to be kept, room is scarce
            d_weight = zeros_apart(wide) if kept is None else torch.empty_like(wide)
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            states = hidden[rows].to(dtype)
            x = _logits(head, states, wide, room) if start or kept is None else kept[: len(states)]
            dx = _logit_gradient(x, targets[rows], lse[rows], grads[0][rows], head, ctx.temperature)
            if d_hidden is not None:
                d_hidden[rows] = product(dx, wide)
            if d_weight is not None:
                product(dx.t(), states, out=d_weight, base=d_weight if start else None)
            if d_bias is not None:
                d_bias += dx.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        if d_weight is not None and need_hidden and head.gradient is not None:
            head.gradient.leave(d_weight)
            d_weight = None
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


def _statistics(
    x: Tensor, targets: Tensor, factor: float, logprobs: Tensor, lse: Tensor, entropy: Tensor | None, overwrite: bool
) -> None:
    """Of softmax(factor * x), (rows, V): fills log-probs of the targets, log-sum-exps and entropies (rows,).

    overwrite: x is not needed any more.
    """
    native = native_for(x)
    if native is not None:
        native.logprob_rows(x, targets, factor, logprobs, lse, entropy)
        return
    x = x.mul_(factor) if overwrite else x * factor
    top = x.amax(1, keepdim=True)
    x = x.sub_(top)
    chosen = x.gather(1, targets[:, None])[:, 0]
    weights = x.exp()
    total = weights.sum(1)
    log_total = total.log()
    if entropy is not None:  # sum p (log total - x) = log total - sum p x
        entropy.copy_(log_total - torch.linalg.vecdot(weights, x) / total)
    lse.copy_(top[:, 0] + log_total)
    logprobs.copy_(chosen - log_total)


def even_chunk(num_rows: int, most: int) -> int:
    """Rows of a chunk where no chunk is much shorter than the others."""
    return max(1, -(-num_rows // max(1, -(-num_rows // most))))


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float32, or float64 for float64: what logits and log-probs are computed in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype)


def _room(hidden: Tensor, wide: Tensor, chunk_rows: int) -> Tensor:
    """For the logits of one chunk after the other: two at a time would be most of what a pass adds to memory."""
    return hidden.new_empty(min(len(hidden), chunk_rows), len(wide), dtype=wide.dtype)


def _logits(head: LogitHead, hidden: Tensor, wide: Tensor, room: Tensor) -> Tensor:
    """(n, V) logits of hidden states (n, H), in the first rows of the room."""
    base = None if head.bias is None else head.bias.to(wide.dtype)
    x = product(hidden.to(wide.dtype), wide.t(), out=room[: len(hidden)], base=base)
    if head.scale != 1.0:
        x = x.mul_(head.scale)
    return x if head.softcap is None else x.div_(head.softcap).tanh_().mul_(head.softcap)


def _logit_gradient(
    x: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, head: LogitHead, temperature: float
) -> Tensor:
    """(rows, V): gradient of sum(grad * log-probs) by h W^T + b, in the buffer of the logits x."""
    slope = None if head.softcap is None else 1 - (x / head.softcap) ** 2
    grad = grad.to(x.dtype).contiguous()
    native = native_for(x)
    if native is not None:
        native.logprob_gradient(x, targets, lse, grad, 1 / temperature)
    else:
        x.div_(temperature).sub_(lse[:, None]).exp_().mul_(-grad[:, None] / temperature)
        x.scatter_add_(1, targets[:, None], grad[:, None] / temperature)
    if slope is not None:
        x.mul_(slope)
    return x if head.scale == 1.0 else x.mul_(head.scale)
