"""The same numbers however the rows are laid out: padding, order, cut into micro-batches, company."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gspo.policy.logprobs import sequence_logprobs
from gspo.types import Sequences
from tests.policy.models import gradients, small_policy, some_sequences, worst_difference

KINDS = ["qwen3", "qwen3_moe"]


def padded_logprobs(policy: object, sequences: Sequences, left: bool) -> Tensor:
    """The usual way: one padded batch with an attention mask, the model's own logits."""
    width = max(len(p) for p in sequences.prompts) + sequences.token_ids.shape[1]
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    ends = []
    for row, length in enumerate(sequences.lengths.tolist()):
        whole = torch.cat([sequences.prompts[int(sequences.prompt_index[row])], sequences.token_ids[row, :length]])
        start = width - len(whole) if left else 0
        ids[row, start : start + len(whole)] = whole
        mask[row, start : start + len(whole)] = 1
        ends.append(start + len(whole))
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = policy.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits  # type: ignore[attr-defined]
    logprobs = logits.log_softmax(-1)
    result = torch.zeros(sequences.token_ids.shape, dtype=logits.dtype)
    for row, (length, end) in enumerate(zip(sequences.lengths.tolist(), ends, strict=True)):
        if length:
            steps = logprobs[row, end - length - 1 : end - 1]
            result[row, :length] = steps.gather(1, sequences.token_ids[row, :length, None])[:, 0]
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [False, True], ids=["right-padded", "left-padded"])
def test_packed_equals_padded(kind: str, left: bool) -> None:
    policy, sequences = small_policy(kind, "float64"), some_sequences()
    packed = sequence_logprobs(policy, sequences, 1.0).logprobs
    padded = padded_logprobs(policy, sequences, left)
    torch.testing.assert_close(packed, padded, atol=1e-10, rtol=0)
    assert worst_difference(gradients(policy, packed.sum()), gradients(policy, padded.sum())) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_does_not_depend_on_the_micro_batch(kind: str, size: int) -> None:
    policy, sequences = small_policy(kind, "float64"), some_sequences()
    whole = sequence_logprobs(policy, sequences, 1.0).logprobs
    expected = gradients(policy, whole.sum())
    policy.model.zero_grad()
    for start in range(0, 6, size):
        rows = torch.arange(start, min(start + size, 6))
        part = sequence_logprobs(policy, sequences.rows(rows), 1.0).logprobs
        torch.testing.assert_close(part, whole[rows, : part.shape[1]], atol=1e-10, rtol=0)
        part.sum().backward()
    summed = {name: p.grad for name, p in policy.model.named_parameters()}
    assert worst_difference(summed, expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_rows_and_amount_of_padding_do_not_matter(kind: str) -> None:
    policy, sequences = small_policy(kind, "float64"), some_sequences()
    expected = sequence_logprobs(policy, sequences, 1.0).logprobs
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    shuffled = sequence_logprobs(policy, sequences.rows(order), 1.0).logprobs
    torch.testing.assert_close(shuffled, expected[order], atol=1e-10, rtol=0)
    wide = dataclasses.replace(sequences, token_ids=torch.nn.functional.pad(sequences.token_ids, (0, 20), value=77))
    torch.testing.assert_close(sequence_logprobs(policy, wide, 1.0).logprobs[:, :9], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_does_not_see_another(kind: str) -> None:
    policy, sequences = small_policy(kind, "float64"), some_sequences()
    before = sequence_logprobs(policy, sequences, 1.0).logprobs
    changed = sequences.token_ids.clone()
    changed[0] = (changed[0] - 4 + 48) % 96 + 4
    after = sequence_logprobs(policy, dataclasses.replace(sequences, token_ids=changed), 1.0).logprobs
    torch.testing.assert_close(after[1:], before[1:], atol=1e-12, rtol=0)
    assert (after[0] - before[0]).abs().max() > 0.1
