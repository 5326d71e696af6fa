"""Ratings from places and from problems, against hand calculation, enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import DataError
from gspo.evals.elo import (
    SCALE,
    expected_ranks,
    failures_before_success,
    rating_of_problems,
    ratings_of_ranks,
    win_probability,
)

FIELDS = st.lists(st.integers(0, 4000), min_size=1, max_size=40)


def test_a_win_at_equal_ratings_is_even_and_400_points_are_ten_to_one():
    assert win_probability(1500, 1500) == 0.5
    assert math.isclose(float(win_probability(1900, 1500)), 10 / 11)
    assert math.isclose(float(win_probability(1500, 1900)), 1 / 11)


def test_the_seed_equation_by_hand():
    """Among two of 1500, a rank of 1.5 means two wins of 1/4 each against us: 10^(x/400) = 3, x = 400 log10 3."""
    ratings = ratings_of_ranks([1.5, 2.0, 2.5], [1500, 1500])
    gap = 400 * math.log10(3)
    assert np.allclose(ratings, [1500 + gap, 1500, 1500 - gap], atol=1e-6)


@given(field=FIELDS, share=st.floats(0, 1))
def test_the_rating_of_a_rank_has_that_expected_rank(field, share):
    """On the reals: no rounding, for every rank that a finite rating can have."""
    rank = 1.5 + share * (len(field) - 1)
    assert math.isclose(expected_ranks(ratings_of_ranks([rank], field), field)[0], rank, abs_tol=1e-6)


@given(field=FIELDS, shift=st.integers(-500, 500))
def test_ratings_fall_with_the_rank_and_move_with_the_field(field, shift):
    ranks = np.arange(1, len(field) + 2)
    ratings = ratings_of_ranks(ranks, field)
    assert np.all(np.diff(ratings) <= 0)
    assert np.allclose(ratings_of_ranks(ranks, [one + shift for one in field]), ratings + shift, atol=1e-5)


def test_first_and_last_place_are_solved_half_a_place_inside():
    field = [1200, 1500, 1900]
    assert ratings_of_ranks([1, 4], field).tolist() == ratings_of_ranks([1.5, 3.5], field).tolist()


@pytest.mark.parametrize(("ranks", "field"), [([1], []), ([0.5], [1500]), ([3], [1500])])
def test_places_that_cannot_be_are_refused(ranks, field):
    with pytest.raises(DataError):
        ratings_of_ranks(ranks, field)


def test_a_field_of_twenty_thousand():
    """As large as a real one, ranks at both ends included."""
    field = np.random.default_rng(0).normal(1500, 400, 20_000).round()
    ranks = np.array([2, 3, 100, 10_000, 19_999, 20_000])
    assert np.allclose(expected_ranks(ratings_of_ranks(ranks, field), field), ranks, atol=1e-6)


@given(n=st.integers(0, 7), data=st.data())
@settings(max_examples=30)
def test_failures_before_the_first_success_are_those_of_all_orders(n, data):
    """The closed form against every order of the samples."""
    c = data.draw(st.integers(0, n))
    orders = set(itertools.permutations([1] * c + [0] * (n - c)))
    counted = [0] * (n - c + 1)
    for order in orders:
        if c:
            counted[order.index(1)] += 1
    expected = [count / len(orders) for count in counted] if c else []
    assert np.allclose(failures_before_success(n, c), expected)


@pytest.mark.parametrize(("n", "c"), [(2, 3), (2, -1)])
def test_more_successes_than_samples_are_refused(n, c):
    with pytest.raises(DataError):
        failures_before_success(n, c)


def test_likelihood_of_problems_by_hand():
    """Half of the samples pass on problems of one rating: that is the rating. A quarter: 400 log10(1/3) below."""
    assert math.isclose(rating_of_problems([(1500, 8, 4), (1500, 2, 1)]).rating, 1500, abs_tol=1e-6)
    assert math.isclose(rating_of_problems([(1500, 8, 2)]).rating, 1500 - 400 * math.log10(3), abs_tol=1e-6)


def test_the_interval_of_two_problems_by_hand():
    """Scores of +1 and -1 at p = 1/2 with 4 samples each: information 4 * 1/4 * 2 = 2, sandwich variance
    (1 + 1) * 2 / 1 / 2^2 = 1, t(0.975, 1) = 12.706: half the interval is 12.706 units of log odds."""
    found = rating_of_problems([(1500, 4, 3), (1500, 4, 1)])
    assert math.isclose(found.rating, 1500, abs_tol=1e-6)
    assert math.isclose(found.high - found.rating, 12.706204736 * SCALE, rel_tol=1e-6)
    assert math.isinf(rating_of_problems([(1500, 4, 2)]).high)  # one problem says nothing of others


def test_all_or_nothing_gives_a_bound():
    """Separation: all of 8 pass at 1500, so p^8 = 0.05 at the bound."""
    all_right, none = rating_of_problems([(1500, 8, 8)]), rating_of_problems([(1500, 8, 0)])
    assert (all_right.bound, none.bound) == ("lower", "upper")
    assert math.isclose(float(win_probability(all_right.rating, 1500)) ** 8, 0.05, rel_tol=1e-6)
    assert math.isclose(all_right.rating + none.rating, 3000, abs_tol=1e-6)
    assert all_right.high == math.inf
    assert none.low == -math.inf


def test_likelihood_recovers_a_rating_and_its_interval_covers():
    """200 made-up agents of rating 1850, each with 30 problems and 8 samples: no bias, and 95 % cover 1850."""
    rng = np.random.default_rng(7)
    difficulty = np.linspace(1000, 2600, 30)
    found = []
    for _ in range(200):
        passed = rng.binomial(8, win_probability(1850, difficulty))
        found.append(rating_of_problems([(d, 8, int(c)) for d, c in zip(difficulty, passed, strict=True)]))
    assert abs(np.mean([one.rating for one in found]) - 1850) < 10
    assert 0.90 <= np.mean([one.low <= 1850 <= one.high for one in found]) <= 0.99


@pytest.mark.parametrize("counts", [[], [(1500, 0, 0)], [(1500, 2, 3)], [(math.nan, 2, 1)]])
def test_nothing_to_estimate_from_is_refused(counts):
    with pytest.raises(DataError):
        rating_of_problems(counts)
