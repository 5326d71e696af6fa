from dataclasses import replace

import pytest
import torch

from gspo.train.batch import rollout_batch, train_batch
from gspo.train.recording import logged_samples

from .builders import group, rollout


@pytest.mark.parametrize(
    ("columns", "gold"),
    [
        ({"key": "4", "answer": "no"}, "4"),  # the column that the recipe names
        ({"reward_model": {"style": "rule", "ground_truth": "5"}}, "5"),  # verl's files
        ({"answer": "6"}, None),
    ],
)
def test_samples_show_the_gold_answer_that_the_reward_reads(columns, gold):
    flat = group("a", [1], rollout([2], 1.0), rollout([3], 1.0))
    mixed = group("b", [1], rollout([2], 0.0), rollout([3, 4], 1.0))
    groups = [flat, replace(mixed, prompt=replace(mixed.prompt, columns=columns))]
    rollouts = rollout_batch(groups)
    everything = torch.ones(4, dtype=torch.bool)
    batch = train_batch(
        rollouts, rollouts.rollout_logprobs, advantage_scale="group_std", std_floor=1e-4, included=everything
    )
    samples = logged_samples(groups, batch, torch.zeros(4), 5, "key")
    assert [s["prompt_id"] for s in samples] == ["b", "b"]  # the group that has signal
    assert {s["gold"] for s in samples} == {gold}
    assert [s["ratio"] for s in samples] == [1.0, 1.0]
