"""Keys and values of the running responses in pages: a prompt's pages are shared by its group, and no page ever moves.

A row has a list of pages, those of its prompt and then its own. Rows that change slots take their list along; pages of
a finished response serve the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.rollout.embedded.library import Library, room
from gspo.rollout.embedded.slots import Admission, PrefillPlan


@dataclass(eq=False)
class _Prompt:
    """Pages that the rows of a group share."""

    pages: Tensor  # addresses
    rows_to_come: int  # rows that have not been released yet, running or not


class Pages:
    """Which pages each running row has. Per-row tensors hold the running rows in 0..n-1, like the engine's."""

    def __init__(self, library: Library, num_slots: int, limit: int, layers: Sequence[int], heads: int, size: int):
        """limit: most positions of a row. layers: places of the layers' keys in a prefill plan."""
        self._library, self._layers = library, tuple(layers)
        self._numbers = library.page_numbers(heads, size)
        self._page, self._chunk = library.page, num_slots  # about what the rows need for their next page
        #: numbers from a layer of a page to the next: a chunk has all pages of one layer, then of the next
        self.layer_stride = self._chunk * self._numbers
        self._chunks: list[Tensor] = []
        self._free: list[int] = []
        self._prompts: dict[int, _Prompt] = {}
        self._prompt_of = torch.zeros(num_slots, dtype=torch.int64)
        #: (slots, most pages) addresses; a row's response begins on a page of its own, hence one more.
        self.table = torch.zeros(num_slots, -(-limit // self._page) + 1, dtype=torch.int64)
        self.prompt_lengths = torch.zeros(num_slots, dtype=torch.int64)

    @property
    def num_used(self) -> int:
        """Pages that hold something."""
        return len(self._chunks) * self._chunk - len(self._free)

    def admit(self, first_slot: int, prompts: Sequence[Admission], plan: PrefillPlan) -> None:
        """Gives rows first_slot, first_slot + 1, ... the pages of their prompts, which are filled the first time."""
        slot = first_slot
        for entry in prompts:
            prompt = self._prompts.get(entry.prompt)
            if prompt is None:
                prompt = self._prompts[entry.prompt] = _Prompt(self._fill(entry, plan), entry.num_samples)
            rows = slice(slot, slot + entry.copies)
            self.table[rows, : len(prompt.pages)] = prompt.pages
            self.prompt_lengths[rows] = entry.length
            self._prompt_of[rows] = entry.prompt
            slot += entry.copies

    def begin_step(self, positions: Tensor) -> None:
        """A page for each row whose new position (n,) begins one."""
        place = positions - self.prompt_lengths[: len(positions)]
        rows = (place % self._page == 0).nonzero()[:, 0]
        if len(rows):
            index = self._response_start(rows) + place[rows] // self._page
            self.table[rows, index] = self._take(len(rows))

    def release(self, slots: Tensor, lengths: Tensor) -> None:
        """Rows in slots (m,) have finished; they wrote keys of lengths (m,) response tokens."""
        starts, counts = self._response_start(slots), -(-lengths // self._page)
        for slot, start, count in zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
            self._free += self.table[slot, start : start + count].tolist()
        for prompt in self._prompt_of[slots].tolist():
            entry = self._prompts[prompt]
            entry.rows_to_come -= 1
            if not entry.rows_to_come:
                self._free += entry.pages.tolist()
                del self._prompts[prompt]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows in slots source (m,) are in slots target (m,) from now on."""
        for state in (self.table, self.prompt_lengths, self._prompt_of):
            state[target] = state[source]

    def _response_start(self, slots: Tensor) -> Tensor:
        return -(-self.prompt_lengths[slots] // self._page)

    def _fill(self, entry: Admission, plan: PrefillPlan) -> Tensor:
        pages = self._take(-(-entry.length // self._page))
        span = slice(entry.start, entry.start + entry.length)
        for place, layer in enumerate(self._layers):
            self._library.keep_prompt(
                plan.keys[layer][span], plan.values[layer][span], place * self.layer_stride, pages
            )
        return pages

    def _take(self, number: int) -> Tensor:
        """Addresses of `number` free pages."""
        while len(self._free) < number:
            chunk = room(len(self._layers) * self.layer_stride, self._library.dtype)
            self._chunks.append(chunk)
            step = self._numbers * chunk.itemsize
            self._free += [chunk.data_ptr() + step * page for page in reversed(range(self._chunk))]
        taken = self._free[len(self._free) - number :]
        del self._free[len(self._free) - number :]
        return torch.tensor(taken[::-1], dtype=torch.int64)  # rows side by side read pages side by side
