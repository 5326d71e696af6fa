"""Pages are shared by a group, taken when a row needs one, and given back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo.policy.packed_attention import make_plan
from gspo.rollout.embedded.library import Library, load_decoding
from gspo.rollout.embedded.pages import Pages
from gspo.rollout.embedded.slots import Admission, PrefillPlan

pytestmark = pytest.mark.skipif(load_decoding(torch.float32) is None, reason="no C compiler here: torch code is used")
LAYERS, HEADS, SIZE = 2, 2, 4


def library() -> Library:
    found = load_decoding(torch.float32)
    assert found is not None
    return found


def plan_of(num_tokens: int) -> PrefillPlan:
    """Keys and values (S, heads, size) of every layer that say where they come from."""
    plan = PrefillPlan(make_plan([(0, num_tokens)], [], torch.arange(num_tokens)))
    for layer in range(LAYERS):
        numbers = torch.arange(num_tokens * HEADS * SIZE, dtype=torch.float32).view(num_tokens, HEADS, SIZE)
        plan.keys[layer], plan.values[layer] = numbers + 1000 * layer, -numbers - 1000 * layer
    return plan


def pages(slots: int = 4, limit: int = 64) -> Pages:
    return Pages(library(), slots, limit, list(range(LAYERS)), HEADS, SIZE)


def keys_at(found: Pages, address: int, layer: int, head: int) -> Tensor:
    """(page positions, size) of one page, from the memory that the table points to."""
    chunk = next(c for c in found._chunks if c.data_ptr() <= address < c.data_ptr() + 4 * c.numel())
    part = library().page_numbers(1, SIZE)
    start = (address - chunk.data_ptr()) // 4 + layer * found.layer_stride + head * part
    return chunk[start : start + SIZE * library().page].view(SIZE, library().page).t()


def test_a_group_shares_the_pages_of_its_prompt_and_they_hold_its_keys() -> None:
    page = library().page
    found, length = pages(), page + 3
    plan = plan_of(5 + length)
    found.admit(0, [Admission(7, 5, length, 2, 3)], plan)
    assert found.num_used == 2  # for two rows
    assert torch.equal(found.table[0, :2], found.table[1, :2])
    for layer in range(LAYERS):
        for head in range(HEADS):
            both = torch.cat([keys_at(found, int(found.table[0, i]), layer, head) for i in range(2)])
            assert torch.equal(both[:length], plan.keys[layer][5:, head])
    found.admit(2, [Admission(7, 5, length, 1, 3)], plan)  # the third sample comes later
    assert found.num_used == 2


def test_a_row_takes_a_page_when_its_response_needs_one_and_all_come_back() -> None:
    page = library().page
    found = pages()
    found.admit(0, [Admission(0, 0, 3, 2, 2), Admission(1, 3, page, 1, 1)], plan_of(3 + page))
    assert found.num_used == 2
    for step in range(page + 1):
        found.begin_step(torch.tensor([3, 3, page]) + step)
        assert found.num_used == 2 + 3 * (1 if step < page else 2)
    taken = found.table[:3, 1:3].flatten().tolist()
    assert len(set(taken)) == 6  # a row's own pages are nobody else's
    found.move(torch.tensor([2]), torch.tensor([0]))  # the row in slot 0 would have been released before
    assert found.table[0].tolist() == found.table[2].tolist()
    assert int(found.prompt_lengths[0]) == page


def test_released_pages_serve_the_next_rows() -> None:
    page = library().page
    found = pages(slots=2)
    for prompt in range(20):
        found.admit(0, [Admission(prompt, 0, 5, 2, 2)], plan_of(5))
        for step in range(page + 2):
            found.begin_step(torch.tensor([5, 5]) + step)
        assert found.num_used == 5  # one of the prompt, two of each response
        found.release(torch.tensor([0]), torch.tensor([page + 2]))
        assert found.num_used == 3  # the prompt is still read
        found.release(torch.tensor([1]), torch.tensor([page + 2]))
        assert found.num_used == 0
    assert len(found._chunks) == 3  # two pages each


def test_a_response_that_was_never_fed_back_has_no_page() -> None:
    found = pages()
    found.admit(0, [Admission(0, 0, 5, 1, 1)], plan_of(5))
    found.release(torch.tensor([0]), torch.tensor([0]))
    assert found.num_used == 0
