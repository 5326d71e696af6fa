"""The tests of studies against numbers that can be counted by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import ConfigError
from gspo.study.statistics import interval_over_seeds, log_slope, one_sided_p, p_value, refuted_p

few = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=6)


def test_all_seeds_on_one_side_give_the_smallest_p_there_is():
    assert one_sided_p([0.3, 0.1, 0.2, 0.4]) == 1 / 16  # one pattern of 2^4 reaches the observed sum


def test_p_is_counted_over_all_sign_patterns():
    # Sums of ±1 ±2 ±4: 7 5 3 1 -1 -3 -5 -7; observed 1 + 2 - 4 = -1 is reached by 7, 5, 3, 1 and itself.
    assert one_sided_p([1.0, 2.0, -4.0]) == 5 / 8


def test_ties_count():
    assert one_sided_p([0.0, 0.0]) == 1.0
    assert one_sided_p([0.1, 0.2, -0.3]) == 5 / 8  # sums 0.6 0.4 0.2 0 0 | -0.2 -0.4 -0.6, rounding aside


@given(few)
def test_it_equals_the_definition(values):
    hits = sum(
        math.fsum(s * v for s, v in zip(signs, values, strict=True)) >= math.fsum(values)
        for signs in itertools.product((1, -1), repeat=len(values))
    )
    assert one_sided_p(values) == hits / 2 ** len(values)


@given(few, st.integers(-3, 3).map(float))
def test_null_and_sign_belong_together(values, null):
    shifted = [value - null for value in values]
    assert p_value(values, "greater", null, None) == one_sided_p(shifted)
    assert p_value(values, "less", null, None) == one_sided_p([-value for value in shifted])
    assert refuted_p(values, "greater", null, None) == p_value(values, "less", null, None)


def test_equivalence_needs_both_sides():
    inside = [0.01, -0.02, 0.0, 0.015, -0.005, 0.01]
    assert p_value(inside, "equivalent", 0.0, 0.1) == 1 / 64
    outside = [0.2 + value for value in inside]
    assert p_value(outside, "equivalent", 0.0, 0.1) == 1.0  # no pattern of signs has a sum below the observed one
    assert refuted_p(outside, "equivalent", 0.0, 0.1) == 2 / 64
    assert refuted_p(inside, "equivalent", 0.0, 0.1) == 1.0


def test_that_two_things_differ_is_never_refuted():
    assert refuted_p([0.0, 0.0, 0.0], "different", 0.0, None) == 1.0
    assert p_value([1.0, 1.0, 1.0, 1.0], "different", 0.0, None) == 2 / 16


@pytest.mark.parametrize("count", [0, 21])
def test_too_few_or_too_many_seeds_are_refused(count):
    with pytest.raises(ConfigError, match=f"not {count}"):
        one_sided_p([1.0] * count)


def test_the_bootstrap_is_reproducible_and_covers_its_mean():
    values = [0.1, 0.2, 0.4, 0.3, 0.25]
    one = interval_over_seeds(values, confidence=0.95)
    assert one == interval_over_seeds(values, confidence=0.95)
    assert one.low < one.value < one.high
    assert one.value == pytest.approx(0.25)
    assert min(values) <= one.low
    assert one.high <= max(values)


def test_constant_values_have_an_interval_of_no_width_and_one_value_has_none():
    assert interval_over_seeds([0.5] * 4, confidence=0.9).high == 0.5
    lone = interval_over_seeds([0.5], confidence=0.9)
    assert (lone.low, lone.high) == (-math.inf, math.inf)


def test_coverage_of_six_normal_seeds_is_what_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        found = interval_over_seeds(rng.normal(size=6), confidence=0.9, num_resamples=500)
        inside += found.low <= 0.0 <= found.high
    assert 0.85 <= inside / 400 <= 0.95


def test_no_value_is_refused():
    with pytest.raises(ConfigError, match="at least one value"):
        interval_over_seeds([], confidence=0.9)


@given(st.floats(-2, 2), st.floats(0.1, 10))
def test_a_power_law_gives_its_exponent(exponent, factor):
    x = [1.0, 2.0, 8.0]
    assert log_slope(x, [factor * value**exponent for value in x]) == pytest.approx(exponent, abs=1e-9)


def test_a_slope_needs_two_positive_points_at_different_places():
    assert log_slope([1.0, 2.0], [0.0, 1.0]) is None
    assert log_slope([2.0, 2.0], [1.0, 3.0]) is None
