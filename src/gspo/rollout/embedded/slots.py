"""Keys and values for steps through the model's own forward: preallocated slots, written in place.

A slot is a row of every layer's cache, (slots, L, Hkv, D): positions 0..p-1 hold the prompt, the response follows.
Running rows are kept in slots 0..n-1, so that the cost of a step follows the rows that still run, and
attention reads columns 0..longest-1 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gspo.policy.packed_attention import PackedPlan

#: Positions by which the cache grows at least.
GROWTH = 64


@dataclass(eq=False)
class PrefillPlan:
    """Attends like the packed plan of the prompts and keeps what their keys and values were."""

    packed: PackedPlan
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, (S, Hkv, D)
    values: dict[int, Tensor] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.keys[layer] = key[0].transpose(0, 1)
        self.values[layer] = value[0].transpose(0, 1)
        return self.packed.attend(layer, query, key, value, scale, window)


@dataclass(frozen=True)
class Admission:
    """Rows that begin with one prompt."""

    prompt: int  # which one
    start: int  # of the prompt in the packed row of its plan
    length: int
    copies: int  # rows that begin now
    num_samples: int  # rows that begin with this prompt in all


class SlotCache:
    """The cache, and the attention plan of a decoding step over it."""

    def __init__(self, num_slots: int, limit: int, device: torch.device) -> None:
        """num_slots: most rows at once. limit: most positions a row can reach."""
        self.num_slots = num_slots
        self._limit = limit
        self._length = 0  # allocated positions
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        #: (slots, L) float32, added to scores: 0 where a slot holds a key, -inf elsewhere.
        self._visible = torch.empty(num_slots, 0, device=device)
        self._write = torch.empty(0, dtype=torch.int64, device=device)
        self._positions = torch.empty(0, dtype=torch.int64, device=device)
        self._running = 0
        self._longest = 0

    def admit(self, first_slot: int, prompts: Sequence[Admission], plan: PrefillPlan) -> None:
        """Copies prompts into slots first_slot, first_slot + 1, ..."""
        self._reserve(max(entry.length for entry in prompts), plan)
        source, target, slot = [], [], first_slot
        for entry in prompts:
            tokens = torch.arange(entry.length)
            source.append((entry.start + tokens).repeat(entry.copies))
            slots = torch.arange(slot, slot + entry.copies)
            target.append((slots[:, None] * self._length + tokens).flatten())
            self._visible[slot : slot + entry.copies] = -torch.inf
            self._visible[slot : slot + entry.copies, : entry.length] = 0.0
            slot += entry.copies
        device = self._visible.device
        read, write = torch.cat(source).to(device), torch.cat(target).to(device)
        for cache, packed in ((self._keys, plan.keys), (self._values, plan.values)):
            for layer, tensor in packed.items():
                cache[layer].flatten(0, 1).index_copy_(0, write, tensor.index_select(0, read))

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Copies slots source (m,) over slots target (m,), the first `longest` positions."""
        for cache in (*self._keys.values(), *self._values.values()):
            cache[target, :longest] = cache[source, :longest]
        self._visible[target] = self._visible[source]

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Prepares a step in which slot i gets a token at positions[i]; longest: largest position + 1."""
        self._reserve(longest, None)
        self._running, self._longest, self._positions = len(positions), longest, positions
        self._write = torch.arange(len(positions), device=positions.device) * self._length + positions
        self._visible.view(-1).index_fill_(0, self._write, 0.0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """One new token per running row: (n, Hq, 1, D), (n, Hkv, 1, D), (n, Hkv, 1, Dv) -> (n, 1, Hq, Dv)."""
        n, longest = self._running, self._longest
        for cache, new in ((self._keys, key), (self._values, value)):
            cache[layer].view(-1, *new.shape[1::2]).index_copy_(0, self._write, new[:, :, 0])
        keys = self._keys[layer][:n, :longest].transpose(1, 2)
        values = self._values[layer][:n, :longest].transpose(1, 2)
        # The query heads of one key head become the queries of that head: keys are read once, never repeated.
        grouped = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        visible = self._visible[:n, :longest]
        if window is not None and window < longest:
            far = self._positions[:, None] - torch.arange(longest, device=visible.device) >= window
            visible = visible.masked_fill(far, -torch.inf)
        mask = visible[:, None, None, :].to(query.dtype).expand(-1, -1, grouped.shape[2], -1)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.flatten(1, 2)[:, None]

    def _reserve(self, length: int, plan: PrefillPlan | None) -> None:
        """Grows to at least `length` positions. New memory is zero: a masked value must not be nan."""
        if not self._keys and plan is not None:
            self._allocate(plan)
        if length <= self._length:
            return
        grown = min(max(length, 2 * self._length, GROWTH), max(self._limit, length))
        for cache in (self._keys, self._values):
            for layer, tensor in cache.items():
                larger = tensor.new_zeros(self.num_slots, grown, *tensor.shape[2:])
                larger[:, : self._length] = tensor
                cache[layer] = larger
        visible = self._visible.new_full((self.num_slots, grown), -torch.inf)
        visible[:, : self._length] = self._visible
        self._visible, self._length = visible, grown

    def _allocate(self, plan: PrefillPlan) -> None:
        for cache, packed in ((self._keys, plan.keys), (self._values, plan.values)):
            for layer, tensor in packed.items():
                cache[layer] = tensor.new_zeros(self.num_slots, 0, *tensor.shape[1:])
