"""Steps of a known decoder family through one compiled call over all layers.

A library forward spends most of a small step outside arithmetic, and a product of a few rows with a weight stored by
outputs runs at half of the machine's rate or less. So for CPU models whose modules ``policy.fused`` has recognised (and
probed against their own forwards), a sampling call first packs the weights into panels (``panels.h``) and then steps
through ``decode.c``. The packed weights are a copy that lives as long as the call. Mixtures that are not known are
computed by their own modules between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.fused import norm_eps
from gspo.policy.moe.replay import RoutingPass, RoutingShape, hand_over
from gspo.policy.native import native_for
from gspo.rollout.embedded.layout import Layout, is_known, lay_out
from gspo.rollout.embedded.library import FOREIGN, MIXTURE, Library, Step, load_decoding
from gspo.rollout.embedded.pages import Pages
from gspo.rollout.embedded.slots import Admission, PrefillPlan

#: Decoding steps from which packing the weights pays for itself.
WORTH_STEPS = 8


def make_decoder(
    policy: CausalPolicy, num_slots: int, limit: int, num_steps: int, routing: RoutingShape | None = None
) -> Decoder | None:
    """Packs the weights as they are now; None where the model's own forward has to be used.

    num_slots: most rows. limit: most positions of a row. num_steps: decoding steps to come.
    routing: of routes that are to be recorded.
    """
    head = policy.head
    if native_for(head.weight) is None or num_steps < WORTH_STEPS or not is_known(policy.base):
        return None
    library = load_decoding(head.weight.dtype)
    if library is None or len({parameter.dtype for parameter in policy.base.parameters()}) != 1:
        return None
    return Decoder(policy, library, num_slots, limit, routing)


class Decoder:
    """A decoder laid out for steps of one token per row; see ``steps.Steps``. No autograd."""

    def __init__(
        self, policy: CausalPolicy, library: Library, num_slots: int, limit: int, routing: RoutingShape | None
    ) -> None:
        base: Any = policy.base
        self._base, self._library, self._routing, self._head = base, library, routing, policy.head
        self._layout = lay_out(policy, library)
        self._embedding = base.embed_tokens.weight.detach().contiguous()
        self._norm, self._eps = base.norm.weight.detach().contiguous(), norm_eps(base.norm)
        attention = base.layers[0].self_attn
        size = int(attention.head_dim)
        key_heads = attention.k_proj.out_features // size
        self.pages = Pages(
            library, num_slots, limit, [int(x.self_attn.layer_idx) for x in base.layers], key_heads, size
        )
        positions = torch.arange(limit)[None]
        self._tables = [table[0].contiguous() for table in base.rotary_emb(self._embedding[:1], positions)]
        self._step = Step(
            size=self._embedding.shape[1],
            table_width=self.pages.table.shape[1],
            query_heads=attention.q_proj.out_features // size,
            key_heads=key_heads,
            head_size=size,
            layer_stride=self.pages.layer_stride,
            prompts=self.pages.prompt_lengths.data_ptr(),
            table=self.pages.table.data_ptr(),
            cosine=self._tables[0].data_ptr(),
            sine=self._tables[1].data_ptr(),
        )
        self._room = _rooms(self._layout, num_slots, self._embedding.shape[1], library.dtype)
        for name, tensor in self._room.items():
            setattr(self._step, name, tensor.data_ptr())
        self._logits = torch.empty(num_slots, self._layout.head.width, dtype=library.dtype)

    def admit(self, first_slot: int, prompts: Sequence[Admission], plan: PrefillPlan) -> None:
        self.pages.admit(first_slot, prompts, plan)

    def first_logits(self, states: Tensor) -> Tensor:
        logits = states.new_empty(len(states), self._layout.head.width)
        self._library.project(states.contiguous(), self._layout.head, logits)
        return self._finished(logits)

    def step(self, token_ids: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor | None]:
        self.pages.begin_step(positions)
        self._step.rows, self._step.positions = len(token_ids), positions.data_ptr()
        self._library.embed(self._embedding, token_ids, self._step)
        routes = self._layers(len(token_ids))
        logits = self._logits[: len(token_ids)]
        self._library.decode_logits(self._norm, self._eps, self._layout.head, self._step, logits)
        return self._finished(logits), routes

    def release(self, slots: Tensor, lengths: Tensor) -> None:
        self.pages.release(slots, lengths)

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        self.pages.move(source, target)

    def _layers(self, rows: int) -> Tensor | None:
        """Runs all layers and returns routes (n, L, K) if they are recorded."""
        layers = self._layout.layers
        foreign = [index for index, layer in enumerate(layers) if layer.kind == FOREIGN]
        routing = None if self._routing is None else RoutingPass(self._routing)
        if foreign and routing is not None:
            hand_over(self._base, routing)
        start = 0
        for index in foreign:
            self._library.decode_layers(layers, start, index + 1, self._step)
            hidden, normed = self._room["hidden"][:rows], self._room["normed"][:rows]
            hidden += self._layout.mlps[index](normed[None])[0]
            start = index + 1
        self._library.decode_layers(layers, start, len(layers), self._step)
        if routing is None:
            return None
        if foreign:
            return routing.ids
        mixtures = [layer for layer in layers if layer.kind == MIXTURE]
        ids = self._room["routes"][: len(mixtures) * rows * mixtures[0].choices]
        return ids.view(len(mixtures), rows, -1).transpose(0, 1).to(routing.shape.dtype)

    def _finished(self, logits: Tensor) -> Tensor:
        """Scale and cap of the head; its bias is in the product."""
        if self._head.scale != 1.0:
            logits.mul_(self._head.scale)
        cap = self._head.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _rooms(layout: Layout, rows: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a step computes for its rows, by the names of ``library.Step``."""
    pairs = rows * layout.most("choices")
    sizes = {
        "hidden": rows * size,
        "normed": rows * size,
        "projected": rows * layout.most("projection"),
        "attended": rows * max(layer.output.depth for layer in layout.layers),
        "activated": max(rows * layout.most("gate_up"), pairs * layout.most("gate_up")),
        "scores": rows * layout.most("experts"),
        "mixed": pairs * size,
        "gates": pairs,
    }
    whole = {
        "routes": len(layout.layers) * pairs,
        "places": pairs,
        "sources": pairs,
        "starts": layout.most("experts") + 1,
    }
    numbers = {name: torch.empty(size, dtype=dtype) for name, size in sizes.items()}
    for name in ("hidden", "normed"):
        numbers[name] = numbers[name].view(rows, size)
    return numbers | {name: torch.empty(size, dtype=torch.int64) for name, size in whole.items()}
