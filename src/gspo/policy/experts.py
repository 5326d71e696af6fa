"""The experts of a mixture, each on the tokens that chose it, in one compiled call for each direction.

``out_i = skip_i + sum_k gate_ik * down[e_ik] (silu(a) * b)`` with ``[a | b] = gate_up[e_ik] x_i``.

What an expert reads and writes besides its weights (its tokens, their activations) is small enough to stay in the
cache, so tokens are gathered again in the backward pass instead of being kept, and outputs are not kept: with the
gradient d_i of out_i, the gradient by a gate is ``(down^T d_i) . (silu(a) * b)``. A token's experts are added in the
order of their numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.policy.native import Native, Pairs, native_for


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
        hidden, gates, gate_up, down = (x.contiguous() for x in (hidden, gates, gate_up, down))
        pairs = native.place_pairs(ids.long().contiguous(), len(gate_up))
        projected, result = hidden.new_empty(ids.numel(), gate_up.shape[1]), torch.empty_like(hidden)
        around = None if skip is None else skip.contiguous()
        native.mix_experts(pairs, hidden, gates, (gate_up, down), around, projected, result)
        ctx.save_for_backward(hidden, projected, gates, gate_up, down, pairs.starts, pairs.order, pairs.places)
        ctx.native, ctx.has_skip = native, skip is not None
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, projected, gates, gate_up, down, *pairs = ctx.saved_tensors
        native: Native = ctx.native
        grad_hidden, grad_gates = torch.empty_like(hidden), torch.empty_like(gates)
        grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)
        native.mix_experts_backward(
            Pairs(*pairs),
            grads[0].contiguous(),
            (hidden, projected, gates),
            (gate_up, down),
            (grad_hidden, grad_gates, grad_gate_up, grad_down),
        )
        return grad_hidden, None, grad_gates, grad_gate_up, grad_down, grads[0] if ctx.has_skip else None, None


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
