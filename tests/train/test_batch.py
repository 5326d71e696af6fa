import math

import pytest
import torch

from gspo.train.batch import included_rows, rollout_batch, rollout_metrics, train_batch
from gspo.types import StopReason

from .builders import group, rollout


def groups():
    return [
        group(
            "a",
            [1, 2],
            rollout([3, 4, 5], 1.0),
            rollout([3], 0.0, stop_reason=StopReason.LENGTH),
        ),
        group("b", [7], rollout([6, 2], None), rollout([], 1.0, stop_reason=StopReason.EMPTY)),
    ]


def test_rows_are_prompt_major_and_padding_is_masked():
    batch = rollout_batch(groups())
    assert batch.sequences.token_ids.tolist() == [[3, 4, 5], [3, 0, 0], [6, 2, 0], [0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.truncated.tolist() == [False, True, False, False]
    assert [p.tolist() for p in batch.sequences.prompts] == [[1, 2], [7]]
    assert math.isnan(float(batch.rewards[2]))


def test_the_same_prompt_drawn_twice_is_two_groups():
    twice = [group("a", [1], rollout([2], 1.0), rollout([3], 0.0)) for _ in range(2)]
    assert rollout_batch(twice).group_ids.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("truncated", "signal", "expected"),
    [
        ("keep", "keep", [True, True, False, False]),  # unscored and empty rows never enter
        ("exclude", "keep", [True, False, False, False]),
        ("keep", "drop", [True, True, False, False]),
    ],
)
def test_included_rows(truncated, signal, expected):
    has_signal = torch.tensor([True, True, False, False])
    rows = included_rows(rollout_batch(groups()), has_signal, truncated=truncated, groups_without_signal=signal)
    assert rows.tolist() == expected


def test_excluding_truncated_rows_leaves_the_group_statistics_alone():
    batch = rollout_batch(groups())
    included = torch.tensor([True, False, False, False])
    made = train_batch(batch, batch.rollout_logprobs, advantage_scale="group_std", std_floor=1e-4, included=included)
    # Rewards 1 and 0: mean 1/2, std with ddof 1 is sqrt(1/2), so the advantages are +-1/sqrt(2).
    assert made.advantages[:2].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert made.loss_mask.int().tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_metrics_are_over_all_rows():
    found = rollout_metrics(groups())
    assert found["length/mean"] == (3 + 1 + 2 + 0) / 4
    assert found["truncated_fraction"] == 1 / 4
    assert found["reward/mean"] == pytest.approx((1 + 0 + 1) / 3)  # the unscored row is outside
    assert found["reward/unscored"] == 1
    assert found["groups/constant"] == 1  # group b has one scored row only
    assert found["tokens/generated"] == 6


def test_components_are_averaged_over_the_rows_they_applied_to():
    rows = group(
        "a",
        [1],
        rollout([2], 1.0, components={"math": 1.0, "format": None}),
        rollout([3], 0.5, components={"math": 0.0, "format": 0.5}),
    )
    found = rollout_metrics([rows])
    assert found["reward/math"] == 0.5
    assert found["reward/format"] == 0.5
