"""Intervals and tests: closed forms where there are some, simulation for what they promise."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import ConfigError
from gspo.evals.statistics import mean_interval, paired_difference, sign_flip_p_value, t_quantile

RATES = st.lists(st.integers(0, 8).map(lambda c: c / 8), min_size=1, max_size=40)


@pytest.mark.parametrize("p", [0.6, 0.9, 0.975, 0.9995, 0.2])
def test_t_quantile_has_its_closed_forms(p: float) -> None:
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)  # Cauchy
    a = 4 * p * (1 - p)
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / a), rel=1e-9)
    q = math.cos(math.acos(math.sqrt(a)) / 3) / math.sqrt(a)  # Shaw 2006, four degrees
    assert t_quantile(p, 4) == pytest.approx(math.copysign(2 * math.sqrt(q - 1), p - 0.5), rel=1e-9)
    # Cornish-Fisher expansion in 1 / nu (Abramowitz and Stegun 26.7.5)
    z = NormalDist().inv_cdf(p)
    for nu in (501, 502):
        second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
        assert t_quantile(p, nu) == pytest.approx(z + (z**3 + z) / (4 * nu) + second, abs=1e-6)


def test_t_quantile_has_the_tabulated_value() -> None:
    assert t_quantile(0.975, 29) == pytest.approx(2.0452, abs=5e-5)  # any printed table of Student's t


@pytest.mark.parametrize("beta", [(2.0, 2.0), (0.5, 0.5), (0.3, 1.2), (20.0, 20.0)])
def test_coverage_at_30_problems_and_32_samples(beta: tuple[float, float]) -> None:
    """Problems of mixed difficulty, most hard or easy, mostly hard, all alike: 95 % intervals cover in 93 to 97 %."""
    rng = np.random.default_rng(1)
    truth = beta[0] / sum(beta)
    rates = rng.binomial(32, rng.beta(*beta, size=(2000, 30))) / 32
    intervals = [mean_interval(row, 32) for row in rates]
    covered = np.mean([interval.low <= truth <= interval.high for interval in intervals])
    assert 0.93 <= covered <= 0.97


def test_treating_responses_as_independent_would_cover_far_less() -> None:
    """The same simulation with a binomial interval over all 960 responses: why the prompt is the unit."""
    rng = np.random.default_rng(1)
    means = (rng.binomial(32, rng.beta(0.5, 0.5, size=(2000, 30))) / 32).mean(axis=1)
    half = 1.96 * np.sqrt(means * (1 - means) / 960)
    assert np.mean(np.abs(means - 0.5) <= half) < 0.6


@pytest.mark.parametrize("count", [2, 30, 200])
def test_all_passed_or_all_failed_has_no_zero_width(count: int) -> None:
    t2 = t_quantile(0.975, count - 1) ** 2
    nothing, everything = mean_interval([0.0] * count, 32), mean_interval([1.0] * count, 32)
    # Wilson at 0 of P: the upper end is z^2 / (P + z^2)
    assert (nothing.low, nothing.high) == (0.0, pytest.approx(t2 / (count + t2)))
    assert (everything.low, everything.high) == (pytest.approx(count / (count + t2)), 1.0)


def test_one_problem_says_nothing_about_others() -> None:
    assert mean_interval([0.25], 32) == mean_interval([0.25], 4)
    interval = mean_interval([0.25], 32)
    assert (interval.value, interval.low, interval.high) == (0.25, 0.0, 1.0)


def test_far_from_the_ends_it_is_the_clustered_t_interval() -> None:
    rates = [0.4, 0.5, 0.6, 0.5] * 100
    interval = mean_interval(rates, 1000)
    # variance of the rates: mean of (0.1^2, 0, 0.1^2, 0) = 0.005, times 400/399 for ddof 1
    half = t_quantile(0.975, 399) * math.sqrt(0.005 * 400 / 399 / 400)
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=1e-3)
    assert interval.value == pytest.approx(0.5)


@settings(max_examples=50, deadline=None)
@given(rates=RATES, confidence=st.floats(0.5, 0.99))
def test_it_holds_the_mean_stays_in_range_and_mirrors(rates: list[float], confidence: float) -> None:
    interval = mean_interval(rates, 8, confidence)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    mirror = mean_interval([1 - rate for rate in rates], 8, confidence)
    assert (mirror.low, mirror.high) == (
        pytest.approx(1 - interval.high, abs=1e-9),
        pytest.approx(1 - interval.low, abs=1e-9),
    )


@settings(max_examples=50, deadline=None)
@given(rates=RATES)
def test_more_confidence_is_wider(rates: list[float]) -> None:
    narrow, wide = mean_interval(rates, 8, 0.8), mean_interval(rates, 8, 0.99)
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


@pytest.mark.parametrize(
    ("rates", "confidence", "sentence"),
    [([], 0.95, "at least one problem"), ([0.5, 1.5], 0.95, "problem 1 is 1.5"), ([math.nan], 0.95, "problem 0 is nan")]
    + [([0.5], confidence, "strictly between 0 and 1") for confidence in (0.0, 1.0, 95.0)],
)
def test_wrong_input_is_refused(rates: list[float], confidence: float, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        mean_interval(rates, 4, confidence)


# Differences ---------------------------------------------------------------------------------------------------------


def test_sign_flips_are_counted_exactly_for_few_problems() -> None:
    assert sign_flip_p_value([1.0, 1.0, 1.0]) == 2 / 8  # only +++ and --- are as extreme
    assert sign_flip_p_value([3.0, 1.0]) == 2 / 4  # |sum| 4, 2, 2, 4
    assert sign_flip_p_value([1.0, -1.0]) == 1.0
    assert sign_flip_p_value([0.0] * 5 + [1.0, 1.0, 1.0]) == 2 / 8  # zeros have no sign
    assert sign_flip_p_value([0.0, 0.0]) == 1.0
    # 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floating point; both count as ties
    assert sign_flip_p_value([0.1, 0.2, 0.3]) == 2 / 8


def test_many_problems_are_sampled_by_seed_and_agree_with_the_normal_limit() -> None:
    rng = np.random.default_rng(0)
    differences = rng.normal(0.1, 1.0, 200)
    p = sign_flip_p_value(differences, seed=1)
    assert p == sign_flip_p_value(differences, seed=1)
    assert p != sign_flip_p_value(differences, seed=2)
    z = abs(differences.sum()) / math.sqrt((differences**2).sum())
    expected = 2 * (1 - NormalDist().cdf(z))
    assert p == pytest.approx(expected, abs=0.015)  # 3 standard errors of 10,000 draws


def test_p_values_are_uniform_where_nothing_changed() -> None:
    rng = np.random.default_rng(2)
    rates = rng.beta(1, 1, size=(400, 30))
    first, second = rng.binomial(8, rates) / 8, rng.binomial(8, rates) / 8
    p_values = [sign_flip_p_value(b - a, num_permutations=400) for a, b in zip(first, second, strict=True)]
    assert np.mean(np.array(p_values) <= 0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert np.mean(np.array(p_values) <= 0.5) == pytest.approx(0.5, abs=3 * math.sqrt(0.25 / 400))


def test_paired_interval_covers_and_is_narrower_than_two_unpaired_ones() -> None:
    rng = np.random.default_rng(3)
    rates = rng.beta(0.5, 0.5, size=(1000, 30)) * 0.8
    first, second = rng.binomial(16, rates) / 16, rng.binomial(16, rates + 0.2) / 16
    found = [paired_difference(a, b, num_permutations=1) for a, b in zip(first, second, strict=True)]
    assert 0.93 <= np.mean([one.low <= 0.2 <= one.high for one in found]) <= 0.97
    widths = [one.high - one.low for one in found]
    alone = [mean_interval(a, 16) for a in first]
    assert np.mean(widths) < 0.7 * np.mean([one.high - one.low for one in alone])


def test_equal_differences_do_not_make_an_interval_without_width() -> None:
    t2 = t_quantile(0.975, 9) ** 2
    found = paired_difference([0.5] * 10, [0.5] * 10)
    assert (found.difference, found.p_value) == (0.0, 1.0)
    assert (found.low, found.high) == (pytest.approx(-t2 / (10 + t2)), pytest.approx(t2 / (10 + t2)))


@settings(max_examples=50, deadline=None)
@given(rates=RATES)
def test_swapping_the_evaluations_mirrors_the_difference(rates: list[float]) -> None:
    other = [1 - rate for rate in reversed(rates)]
    there = paired_difference(rates, other, num_permutations=50)
    back = paired_difference(other, rates, num_permutations=50)
    assert there.difference == pytest.approx(-back.difference)
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
    assert there.p_value == pytest.approx(back.p_value)


def test_other_numbers_of_problems_cannot_be_paired() -> None:
    with pytest.raises(ConfigError, match="2 problems with one of 3"):
        paired_difference([0.1, 0.2], [0.1, 0.2, 0.3])
