import math

import pytest
import torch

from gspo.train.batch import rollout_batch, train_batch
from gspo.train.schedule import learning_rate_factor, micro_batches, mini_batches
from gspo.types import Sequences, TrainBatch

from .builders import group, rollout


def batch_of(lengths: list[list[int]], included: list[bool] | None = None) -> TrainBatch:
    """One group per inner list, with the response lengths that it names."""
    groups = [
        group(f"p{g}", [1] * (g + 1), *(rollout([2] * n, float(i)) for i, n in enumerate(row)))
        for g, row in enumerate(lengths)
    ]
    rollouts = rollout_batch(groups)
    keep = torch.tensor(included) if included else torch.ones(len(rollouts.rewards), dtype=torch.bool)
    return train_batch(rollouts, rollouts.rollout_logprobs, advantage_scale="group_std", std_floor=1e-4, included=keep)


def test_learning_rate_warms_up_and_decays():
    # Four updates of warm-up: the first already moves by a quarter of the peak.
    assert [learning_rate_factor(u, 12, 4, "constant") for u in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    # Eight updates of decay: half way after four of them, 0 at the end.
    assert learning_rate_factor(8, 12, 4, "linear") == 0.5
    assert learning_rate_factor(12, 12, 4, "linear") == 0.0
    assert learning_rate_factor(8, 12, 4, "cosine") == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    with pytest.raises(ValueError, match="triangle"):
        learning_rate_factor(8, 12, 4, "triangle")


def test_mini_batches_cover_every_row_once_and_differ_by_at_most_one_row():
    batch = batch_of([[3, 4, 5]] * 5)  # 15 rows into 4
    parts = mini_batches(batch, 4, seed=0, step=1)
    assert sorted(len(p.rows) for p in parts) == [3, 4, 4, 4]
    assert sorted(torch.cat([p.rows for p in parts]).tolist()) == list(range(15))
    assert [p.index for p in parts] == [0, 1, 2, 3]


def test_mini_batches_keep_groups_together_and_shuffle_them_by_seed_and_step():
    batch = batch_of([[3, 3]] * 8)
    parts = mini_batches(batch, 4, seed=0, step=1)
    for part in parts:
        ids = batch.rollouts.group_ids[part.rows].tolist()
        assert ids == sorted(ids, key=ids.index)
        assert len(set(ids)) == 2  # four rows are two whole groups
    again = mini_batches(batch, 4, seed=0, step=1)
    other = mini_batches(batch, 4, seed=0, step=2)
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(parts, again, strict=True))
    assert any(not torch.equal(a.rows, b.rows) for a, b in zip(parts, other, strict=True))


def test_random_drop_takes_rows_out_and_leaves_the_denominators():
    batch = batch_of([[3] * 10] * 8)  # 20 rows in each of 4
    whole = mini_batches(batch, 4, seed=0, step=1)
    parts = mini_batches(batch, 4, seed=0, step=1, random_drop=(0.0, 0.25, 0.5, 0.97))
    assert [len(part.rows) for part in parts] == [20, 15, 10, 1]  # 0.97 * 20 is rounded to 19
    assert all(part.counts == before.counts for part, before in zip(parts, whole, strict=True))
    for part, before in zip(parts, whole, strict=True):
        left = [row for row in before.rows.tolist() if row in part.rows.tolist()]
        assert part.rows.tolist() == left  # the same rows in the same order


def test_random_drop_is_drawn_anew_for_each_step_and_mini_batch_and_repeats_by_seed():
    batch = batch_of([[3] * 10] * 2)

    def kept(seed: int, step: int) -> list[list[int]]:
        return [part.rows.tolist() for part in mini_batches(batch, 2, seed=seed, step=step, random_drop=(0.5, 0.5))]

    assert kept(0, 1) == kept(0, 1)
    assert len({str([sorted(rows) for rows in kept(0, step)]) for step in range(1, 6)}) == 5


def test_denominators_leave_out_excluded_rows_and_rows_without_tokens():
    batch = batch_of([[3, 2], [4, 0]], included=[True, False, True, True])
    (part,) = mini_batches(batch, 1, seed=0, step=1)
    # Rows of 3 and 4 tokens are left: the second is excluded, the last is empty.
    assert dict(part.counts) == {"sequence": 2, "token": 7}


def sequences(lengths: list[int], prompt_length: int = 5, group_size: int = 2) -> Sequences:
    n = len(lengths)
    prompts = -(-n // group_size)
    return Sequences(
        prompts=tuple(torch.ones(prompt_length, dtype=torch.long) for _ in range(prompts)),
        prompt_index=torch.arange(n) // group_size,
        token_ids=torch.ones(n, max(lengths), dtype=torch.long),
        lengths=torch.tensor(lengths),
    )


def test_micro_batches_by_size():
    parts = micro_batches(sequences([4] * 12), torch.arange(12), micro_batch_size=5, micro_batch_tokens=1)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("size", [None, 3])
def test_no_rows_are_no_micro_batches(size):
    """An update in which no response has signal."""
    rows = torch.empty(0, dtype=torch.int64)
    assert micro_batches(sequences([4] * 3), rows, micro_batch_size=size, micro_batch_tokens=8) == []


@pytest.mark.parametrize("limit", [1, 17, 30, 64, 10_000])
def test_micro_batches_by_tokens_hold_the_limit_and_every_row_once(limit):
    data = sequences([4, 9, 1, 30, 2, 2, 8, 8])
    parts = micro_batches(data, torch.arange(8), micro_batch_size=None, micro_batch_tokens=limit)
    assert torch.cat(parts).tolist() == list(range(8))
    for part in parts:
        prompts = len(set(data.prompt_index[part].tolist())) * 5
        assert len(part) == 1 or int(data.lengths[part].sum()) + prompts <= limit + 5


def test_one_micro_batch_when_everything_fits():
    parts = micro_batches(sequences([4] * 8), torch.arange(8), micro_batch_size=None, micro_batch_tokens=10_000)
    assert len(parts) == 1
