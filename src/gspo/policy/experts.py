"""The experts of a mixture, one after the other, each on the tokens that chose it.

``out_i = skip_i + sum_k gate_ik * down[e_ik] (silu(a) * b)`` with ``[a | b] = gate_up[e_ik] x_i``.

What an expert reads and writes besides its weights (its tokens, their activations) is small enough to stay in the
cache, so tokens are gathered again in the backward pass instead of being kept, and outputs are never stored: with the
gradient d_i of out_i, the gradient by a gate is ``(down^T d_i) . (silu(a) * b)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.policy.native import Native, native_for


class Experts(torch.autograd.Function):
    """hidden (n, H), ids (n, K), gates (n, K), gate_up (E, 2 I, H), down (E, H, I), skip (n, H) or None -> (n, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        ids: Tensor,
        gates: Tensor,
        gate_up: Tensor,
        down: Tensor,
        skip: Tensor | None,
        native: Native,
    ) -> Tensor:
        hidden = hidden.contiguous()
        order, spans = sorted_by_expert(ids, len(gate_up))
        tokens = order // ids.shape[1]
        sorted_gates = gates.flatten().index_select(0, order)
        projected = hidden.new_empty(len(order), gate_up.shape[1])
        result = torch.zeros_like(hidden) if skip is None else skip.clone(memory_format=torch.contiguous_format)
        room = _Room(hidden, spans, (hidden.shape[1], hidden.shape[1], down.shape[2]))
        for expert, rows in spans:
            inputs, outputs, activated = room.of(rows)
            native.take_rows(hidden, tokens[rows], inputs)
            part = torch.mm(inputs, gate_up[expert].t(), out=projected[rows])
            gate, up = part.chunk(2, dim=1)
            native.swiglu(gate, up, activated)
            torch.mm(activated, down[expert].t(), out=outputs)
            native.add_rows(outputs, tokens[rows], sorted_gates[rows], result)
        ctx.save_for_backward(hidden, projected, order, sorted_gates, gate_up, down)
        ctx.native, ctx.spans, ctx.shape, ctx.has_skip = native, spans, ids.shape, skip is not None
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, projected, order, gates, gate_up, down = ctx.saved_tensors
        native: Native = ctx.native
        grad = grads[0].contiguous()
        tokens = order // ctx.shape[1]
        grad_hidden, sorted_grads = torch.zeros_like(hidden), torch.empty_like(gates)
        grad_gate_up, grad_down = _untouched(gate_up, ctx.spans), _untouched(down, ctx.spans)
        size, inner = hidden.shape[1], down.shape[2]
        room = _Room(hidden, ctx.spans, (size, size, inner, inner, 2 * inner, size))
        for expert, rows in ctx.spans:
            inputs, upstream, grad_activated, activated, grad_projected, grad_inputs = room.of(rows)
            native.take_rows(hidden, tokens[rows], inputs)
            native.take_rows(grad, tokens[rows], upstream)
            torch.mm(upstream, down[expert], out=grad_activated)
            native.expert_backward(
                grad_activated, projected[rows], gates[rows], activated, grad_projected, sorted_grads[rows]
            )
            torch.mm(upstream.t(), activated, out=grad_down[expert])
            torch.mm(grad_projected.t(), inputs, out=grad_gate_up[expert])
            torch.mm(grad_projected, gate_up[expert], out=grad_inputs)
            native.add_rows(grad_inputs, tokens[rows], None, grad_hidden)
        grad_gates = torch.empty_like(sorted_grads)
        grad_gates[order] = sorted_grads
        skipped = grads[0] if ctx.has_skip else None
        return grad_hidden, None, grad_gates.view(ctx.shape), grad_gate_up, grad_down, skipped, None


class _Room:
    """Buffers for the rows of one expert, one after the other in memory that every expert uses again."""

    def __init__(self, like: Tensor, spans: list[tuple[int, slice]], widths: tuple[int, ...]) -> None:
        most = max((rows.stop - rows.start for _, rows in spans), default=0)
        self.buffers = [like.new_empty(most, width) for width in widths]

    def of(self, rows: slice) -> list[Tensor]:
        return [buffer[: rows.stop - rows.start] for buffer in self.buffers]


def _untouched(weight: Tensor, spans: list[tuple[int, slice]]) -> Tensor:
    """Room for a gradient, zero for experts without tokens."""
    grad = torch.empty_like(weight)
    used = {expert for expert, _ in spans}
    for expert in range(len(weight)):
        if expert not in used:
            grad[expert].zero_()
    return grad


def sorted_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, slice]]]:
    """Order of the (token, choice) pairs of (n, K) ids by expert, and the stretch of each expert that has any."""
    flat = ids.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    spans, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, slice(start, start + count)))
        start += count
    return torch.argsort(flat, stable=True), spans


def experts_forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    skip: Tensor | None = None,
) -> Tensor:
    """Takes the place of the library's; see ``policy/fused.py``. skip (n, H), where given, is added."""
    native = native_for(hidden_states)
    if native is None or top_k_weights.dtype != hidden_states.dtype or not len(hidden_states):
        out = type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        return out if skip is None else skip + out
    result: Tensor = Experts.apply(  # type: ignore[no-untyped-call]
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, skip, native
    )
    return result
