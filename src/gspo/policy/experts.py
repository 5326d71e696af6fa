"""The experts of a mixture: tokens sorted by expert once, two matrix products per expert, sums in one pass.

``out_i = sum_k gate_ik * down[e_ik] (silu(a) * b)`` with ``[a | b] = gate_up[e_ik] x_i``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.policy.native import Native, native_for


class Experts(torch.autograd.Function):
    """hidden (n, H), ids (n, K), gates (n, K), gate_up (E, 2 I, H), down (E, H, I) -> (n, H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, ids: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, native: Native
    ) -> Tensor:
        gates = gates.contiguous()
        order, spans = sorted_by_expert(ids, len(gate_up))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        places = places.view(ids.shape)
        inputs = hidden.index_select(0, order // ids.shape[1])
        projected = hidden.new_empty(len(order), gate_up.shape[1])
        for expert, rows in spans:  # one matrix stored by inputs is read faster here; see decoder.py
            torch.mm(inputs[rows], gate_up[expert].t(), out=projected[rows])
        activated = _activate(projected, native)
        outputs = torch.empty_like(inputs)
        for expert, rows in spans:
            torch.mm(activated[rows], down[expert].t(), out=outputs[rows])
        result = torch.empty_like(hidden)
        native.combine(outputs, places, gates, result)
        ctx.save_for_backward(inputs, projected, outputs, places, gates, gate_up, down)
        ctx.native, ctx.spans = native, spans
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, projected, outputs, places, gates, gate_up, down = ctx.saved_tensors
        native: Native = ctx.native
        grad_outputs, grad_gates = torch.empty_like(outputs), torch.empty_like(gates)
        native.combine_backward(grads[0].contiguous(), outputs, places, gates, grad_outputs, grad_gates)
        activated = _activate(projected, native)
        grad_activated, grad_down = torch.empty_like(activated), torch.zeros_like(down)
        for expert, rows in ctx.spans:
            torch.mm(grad_outputs[rows], down[expert], out=grad_activated[rows])
            torch.mm(grad_outputs[rows].t(), activated[rows], out=grad_down[expert])
        grad_projected = torch.empty_like(projected)
        native.swiglu_backward(grad_activated, *projected.chunk(2, dim=1), *grad_projected.chunk(2, dim=1))
        grad_inputs, grad_gate_up = torch.empty_like(inputs), torch.zeros_like(gate_up)
        for expert, rows in ctx.spans:
            torch.mm(grad_projected[rows], gate_up[expert], out=grad_inputs[rows])
            torch.mm(grad_projected[rows].t(), inputs[rows], out=grad_gate_up[expert])
        grad_hidden = inputs.new_empty(len(places), inputs.shape[1])
        native.combine(grad_inputs, places, None, grad_hidden)
        return grad_hidden, None, grad_gates, grad_gate_up, grad_down, None


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


def _activate(projected: Tensor, native: Native) -> Tensor:
    gate, up = projected.chunk(2, dim=1)
    activated = projected.new_empty(gate.shape)
    native.swiglu(gate, up, activated)
    return activated


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Takes the place of the library's; see ``policy/fused.py``."""
    native = native_for(hidden_states)
    if native is None or top_k_weights.dtype != hidden_states.dtype or not len(hidden_states):
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
    out: Tensor = Experts.apply(  # type: ignore[no-untyped-call]
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, native
    )
    return out
