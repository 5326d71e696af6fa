"""Sequences as one packed row: no padding, and the prompt of a group once.

The last token of a response predicts nothing that anybody asks for, so it is not part of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.errors import DataError
from gspo.policy.packed_attention import PackedPlan, SharedPrompt, make_plan, plan_to
from gspo.types import Sequences


@dataclass(frozen=True, eq=False)
class PackedRow:
    """S input tokens that predict R response tokens."""

    input_ids: Tensor  # (S,) int64
    position_ids: Tensor  # (S,) int64
    plan: PackedPlan
    row: Tensor  # (R,) int64, which sequence a response token belongs to
    column: Tensor  # (R,) int64, its place in the response
    predictor: Tensor  # (R,) int64, index of the input token whose hidden state predicts it
    num_prompt_tokens: int


def pack(sequences: Sequences, device: torch.device, share_prompts: bool = True) -> PackedRow:
    """Packs sequences, ordered by prompt.

    share_prompts=False repeats the prompt for every response: the plain form that the shared one must equal.
    Raises DataError for an empty prompt, because nothing would predict the first response token.
    """
    lengths = sequences.lengths.cpu()
    index = sequences.prompt_index.cpu()
    order = torch.argsort(index, stable=True).tolist()
    prompt_lengths = [len(prompt) for prompt in sequences.prompts]
    layout = _lay_out(order, index.tolist(), lengths.tolist(), prompt_lengths, share_prompts)
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    column = torch.arange(len(row)) - (torch.cumsum(lengths, 0) - lengths)[row]
    starts, last = torch.tensor(layout.response_starts), torch.tensor(layout.prompt_ends) - 1
    predictor = torch.where(column == 0, last[row], starts[row] + column - 1)
    ids = torch.empty(layout.size, dtype=torch.int64)
    positions = torch.empty(layout.size, dtype=torch.int64)
    for start, prompt in layout.prompt_starts:
        end = start + prompt_lengths[prompt]
        ids[start:end] = sequences.prompts[prompt].cpu()
        positions[start:end] = torch.arange(end - start)
    read = column < lengths[row] - 1
    place = (starts[row] + column)[read]
    ids[place] = sequences.token_ids.cpu()[row[read], column[read]]
    positions[place] = (torch.tensor(prompt_lengths)[index[row]] + column)[read]
    plan = plan_to(make_plan(layout.segments, layout.shared, positions), device)
    num_prompt_tokens = sum(prompt_lengths[prompt] for _, prompt in layout.prompt_starts)
    return PackedRow(
        ids.to(device),
        plan.positions,
        plan,
        row.to(device),
        column.to(device),
        predictor.to(device),
        num_prompt_tokens,
    )


@dataclass(eq=False)
class _Layout:
    """Where everything goes."""

    size: int
    prompt_starts: list[tuple[int, int]]  # (start in the row, which prompt)
    response_starts: list[int]  # by sequence
    prompt_ends: list[int]  # by sequence, end of its prompt
    segments: list[tuple[int, int]]
    shared: list[SharedPrompt]


def _lay_out(order: list[int], index: list[int], lengths: list[int], prompt_lengths: list[int], share: bool) -> _Layout:
    layout = _Layout(0, [], [0] * len(order), [0] * len(order), [], [])
    prompt_of: list[tuple[int, int]] = []  # by place in order, the stretch of the prompt in the row
    prompt = -1
    for sequence in order:
        if index[sequence] != prompt or not share:
            prompt = index[sequence]
            if not prompt_lengths[prompt]:
                raise DataError(f"prompt {prompt} of a batch has no tokens; nothing predicts the first response token")
            layout.prompt_starts.append((layout.size, prompt))
            layout.segments.append((layout.size, prompt_lengths[prompt]))
            layout.size += prompt_lengths[prompt]
        prompt_of.append((layout.size - prompt_lengths[prompt], layout.size))
    for sequence, keys in zip(order, prompt_of, strict=True):
        length = max(lengths[sequence] - 1, 0)
        start = layout.size
        layout.prompt_ends[sequence] = keys[1]
        layout.response_starts[sequence] = start
        if not length:
            continue
        layout.segments.append((start, length))
        layout.size += length
        if layout.shared and layout.shared[-1].keys == keys:
            start = layout.shared.pop().queries[0]
        layout.shared.append(SharedPrompt((start, layout.size), keys))
    return layout
