from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.advantages import constant_groups, gae, group_advantages
from gspo.errors import ConfigError, RewardError

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases" / "objective_cases.json").read_text())}
SCALES = ["group_std", "none", "batch_std", "leave_one_out"]


def advantages(rewards: list[float | None], ids: list | None = None, **options: object) -> list[float]:
    values = torch.tensor([math.nan if r is None else r for r in rewards], dtype=torch.float64)
    return group_advantages(values, ids or [0] * len(rewards), **options).tolist()  # type: ignore[arg-type]


def test_the_four_scales_on_one_group() -> None:
    """Rewards 1, 0, 0, 1: mean 0.5; squares 4 * 0.25 = 1, over 3: std 1 / sqrt(3); the others' mean is 1/3 or 2/3."""
    rewards: list[float | None] = [1, 0, 0, 1]
    root = math.sqrt(3) / 2
    assert advantages(rewards) == pytest.approx([root, -root, -root, root], abs=1e-14)
    assert advantages(rewards, scale="none") == [0.5, -0.5, -0.5, 0.5]
    assert advantages(rewards, scale="batch_std") == pytest.approx([root, -root, -root, root], abs=1e-14)
    assert advantages(rewards, scale="leave_one_out") == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3], abs=1e-14)


def test_batch_std_divides_every_group_by_the_spread_of_the_whole_batch() -> None:
    rewards: list[float | None] = [0.0, 1.0, 10.0, 14.0, None]
    got = advantages(rewards, [0, 0, 1, 1, 1], scale="batch_std")
    std = statistics.stdev([0.0, 1.0, 10.0, 14.0])
    assert got == pytest.approx([-0.5 / std, 0.5 / std, -2 / std, 2 / std, 0.0], abs=1e-14)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [0.95, 0.1, 0.7, 1000.1, 0.0, -3.3])
def test_a_constant_group_is_exactly_zero(scale: str, dtype: torch.dtype, value: float) -> None:
    rewards = torch.tensor([value] * 8 + [0.0, 1.0], dtype=dtype)
    got = group_advantages(rewards, [0] * 8 + [1, 1], scale=scale)  # type: ignore[arg-type]
    assert got[:8].tolist() == [0.0] * 8
    assert (got[8:] != 0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_unscored_members_take_no_part(scale: str) -> None:
    got = advantages([1, 0, None, 1, 5.0, 7.0], [0, 0, 0, 0, 1, 1], scale=scale)
    without = advantages([1, 0, 1, 5.0, 7.0], [0, 0, 0, 1, 1], scale=scale)
    assert got[2] == 0.0
    assert got[:2] + got[3:] == without


@pytest.mark.parametrize("scale", SCALES)
def test_a_single_scored_member_and_none_at_all_are_exactly_zero(scale: str) -> None:
    ids = [0, 0, 0, 1, 1, 2, 3, 3]
    rewards: list[float | None] = [None, 0.7, None, None, None, 4.0, 0.0, 1.0]
    assert advantages(rewards, ids, scale=scale)[:6] == [0.0] * 6


def test_none_nan_lists_and_tensors_are_the_same() -> None:
    want = advantages([1, 0, None, 1])
    assert group_advantages([1, 0, None, 1], [0] * 4).tolist() == pytest.approx(want, abs=1e-7)
    assert group_advantages([1, 0, math.nan, 1], torch.zeros(4, dtype=torch.int64)).tolist() == pytest.approx(
        want, abs=1e-7
    )


def test_the_dtype_is_float32_unless_the_rewards_are_float64() -> None:
    assert group_advantages([1.0, 0.0], [0, 0]).dtype == torch.float32
    assert group_advantages(torch.tensor([1, 0]), [0, 0]).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), [0, 0]).dtype == torch.float64


def test_the_floor_replaces_a_small_std_and_is_not_added() -> None:
    # std of [0, 2e-6] is sqrt(2) * 1e-6, below the floor: (r - mean) / 1e-4 = +-1e-6 / 1e-4
    assert advantages([0.0, 2e-6]) == pytest.approx([-0.01, 0.01], abs=1e-14)
    assert advantages([0.0, 2e-6], std_floor=0.0) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-12)
    assert advantages([0.0, 2e-6], scale="batch_std") == pytest.approx([-0.01, 0.01], abs=1e-14)
    assert advantages([0.0, 1.0], std_floor=0.5) == advantages([0.0, 1.0], std_floor=0.0)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0]))), min_size=1),
    st.randoms(use_true_random=False),
    st.sampled_from(SCALES),
)
def test_a_permutation_of_the_rows_permutes_the_answer(rows: list, random: object, scale: str) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    got = advantages([rows[n][1] for n in order], [rows[n][0] for n in order], scale=scale)
    want = advantages([r for _, r in rows], [g for g, _ in rows], scale=scale)
    assert got == pytest.approx([want[n] for n in order], abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.sampled_from(["none", "leave_one_out", "group_std"]))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float], scale: str) -> None:
    assert sum(advantages(list(rewards), scale=scale)) == pytest.approx(0.0, abs=1e-8)


def test_group_ids_may_be_anything_hashable() -> None:
    rewards: list[float | None] = [1, 1, 0, 2, 1, 0, 2, 0, 1]
    ids = ["a", "b", "a", "c", "b", "a", "c", "b", "b"]
    want = CASES["G05"]["expected"]["first"]
    assert advantages(rewards, ids) == pytest.approx(want, abs=1e-9)
    assert advantages(rewards, [("t", i) for i in ids]) == pytest.approx(want, abs=1e-9)
    numbers = torch.tensor([7, -2, 7, 100, -2, 7, 100, -2, -2])
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), numbers)
    assert got.tolist() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("name", ["a", "b", "e"])
def test_the_default_scale_has_ddof_1(name: str) -> None:
    rewards, want = CASES["G04"]["input"][name], CASES["G04"]["expected"][name]["ddof1"]
    got = advantages(rewards)
    if len(want) != len(rewards):  # one value per distinct reward
        got = [got[rewards.index(r)] for r in dict.fromkeys(rewards)]
    assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused_with_its_row(value: float) -> None:
    for call in (group_advantages, constant_groups):
        with pytest.raises(RewardError, match=f"reward function gave {value} for row 2"):
            call([1.0, None, value], [0, 0, 0])


def test_ids_and_rewards_must_pair_up() -> None:
    with pytest.raises(RewardError, match="2 rewards for 3 group ids"):
        group_advantages([1.0, 0.0], [0, 0, 0])
    with pytest.raises(RewardError, match=r"shape \(2, 1\)"):
        group_advantages(torch.zeros(2, 1), [0, 0])


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no advantage scale 'std'; it is one of group_std, none"):
        group_advantages([1.0, 0.0], [0, 0], scale="std")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"std_floor = -1\.0"):
        group_advantages([1.0, 0.0], [0, 0], std_floor=-1.0)


def test_an_empty_batch_has_no_advantages() -> None:
    assert group_advantages([], []).tolist() == []
    assert constant_groups([], []) == 0


def test_constant_groups_counts_groups_without_signal() -> None:
    rewards = torch.tensor([0.95] * 8 + [1.0, 0.0, 0.3, math.nan, math.nan])
    ids = ["same"] * 8 + ["mixed"] * 2 + ["one scored"] * 2 + ["none scored"]
    assert constant_groups(rewards, ids) == 3


def test_gae_by_hand() -> None:
    """gamma 0.5, lam 0.5, values 1, 2, 4, rewards 0, 0, 8.

    delta_2 = 8 - 4 = 4; delta_1 = 0.5 * 4 - 2 = 0; delta_0 = 0.5 * 2 - 1 = 0.
    A_2 = 4; A_1 = 0 + 0.25 * 4 = 1; A_0 = 0 + 0.25 * 1 = 0.25. Returns = A + V.
    """
    rewards, values = torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    got, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5, lam=0.5)
    assert got.tolist() == [[0.25, 1.0, 4.0]]
    assert returns.tolist() == [[1.25, 3.0, 8.0]]


def test_gae_skips_masked_tokens_and_reads_nothing_there() -> None:
    """The same three tokens with a tool token between and padding behind."""
    nan = math.nan
    mask = torch.tensor([[True, False, True, True, False]])
    got, returns = gae(
        torch.tensor([[0.0, nan, 0.0, 8.0, nan]]), torch.tensor([[1.0, nan, 2.0, 4.0, nan]]), mask, gamma=0.5, lam=0.5
    )
    assert got.tolist() == [[0.25, 0.0, 1.0, 4.0, 0.0]]
    assert returns.tolist() == [[1.25, 0.0, 3.0, 8.0, 0.0]]


def test_gae_with_lam_1_is_return_minus_value_and_with_lam_0_is_the_temporal_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(3, 6, dtype=torch.bool)
    gamma = 0.9
    following = torch.cat([values[:, 1:], torch.zeros(3, 1)], dim=1)
    one_step, _ = gae(rewards, values, mask, gamma, 0.0)
    torch.testing.assert_close(one_step, rewards + gamma * following - values)
    whole, returns = gae(rewards, values, mask, gamma, 1.0)
    expected = torch.stack([sum(gamma ** (s - t) * rewards[:, s] for s in range(t, 6)) for t in range(6)], dim=1)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(whole, expected - values)


def test_gae_refuses_bad_factors_and_shapes() -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"gamma = 1\.1"):
        gae(x, x, mask, gamma=1.1)
    with pytest.raises(ConfigError, match=r"lam = -0\.1"):
        gae(x, x, mask, lam=-0.1)
    with pytest.raises(ValueError, match="must be equal"):
        gae(x, torch.zeros(1, 3), mask)
