"""Places and ratings in contests: by hand, against every order of the samples, and against a known rating."""

import itertools
import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import DataError
from gspo.evals.codeforces.contest import Contest, Contestant, ContestProblem, Solve, read_contest
from gspo.evals.codeforces.scoring import Samples, distribution, place, ranks_of, worth
from gspo.evals.codeforces.summary import rate, rate_problems
from gspo.evals.elo import win_probability

from .contests import elo_contest, five


@pytest.fixture
def contest() -> Contest:
    return read_contest(*five(), "five.json")


def rating_among_five(rank: float) -> float:
    """Five of 1500: the expected rank is 1 + 5 q with q the chance of each against us, so q = (rank - 1) / 5 and the
    rating is 1500 + 400 log10((1 - q) / q)."""
    q = (rank - 1) / 5
    return 1500 + 400 * math.log10((1 - q) / q)


def test_five_people_by_hand(contest):
    """One of two samples passes A, none passes B. The penalty is 20 minutes per rejected attempt, read off the rows.

    Sent at once: (1 point, 0) or (1, 20), both behind ann and bob and before cem (1, 30): third in each order, q = 2/5.
    At the pace of the field A takes the median of 10, 20, 30, 40 minutes = 25: (1, 25) is third, (1, 45) is behind cem
    and fourth; each with one half. So the expected rank is 3.5, q = 1/2, and the rating that of the field.
    """
    samples = {"A": Samples(2, 1), "B": Samples(2, 0)}
    assert contest.penalty_minutes == 20
    instant, field = place(contest, samples), place(contest, samples, "field")
    assert (instant.rank, instant.points, instant.penalty) == (3, 1, 10)
    assert math.isclose(instant.rating, 1500 + 400 * math.log10(3 / 2), abs_tol=1e-6)
    assert (field.rank, field.penalty) == (3.5, 35)
    assert math.isclose(field.rating, 1500, abs_tol=1e-6)
    assert instant.bound == field.bound == ""


def test_first_place_of_five_is_a_lower_bound(contest):
    """Both problems at once: (2, 0) is first. No finite rating is; half a place inside, q = 1/10."""
    found = place(contest, {"A": Samples(1, 1), "B": Samples(1, 1)})
    assert (found.rank, found.first, found.last, found.bound) == (1, 1, 0, "lower")
    assert math.isclose(found.rating, 1500 + 400 * math.log10(9), abs_tol=1e-6)


def test_nothing_solved_ties_with_the_last(contest):
    """eve has nothing either, and only four are strictly better: fifth, not sixth."""
    found = place(contest, {"A": Samples(3, 0), "B": Samples(3, 0)})
    assert (found.rank, found.last) == (5, 0)
    assert math.isclose(found.rating, rating_among_five(5), abs_tol=1e-6)


def test_last_place_is_an_upper_bound(contest):
    """Without eve the one with nothing is behind all four: q = 3.5 / 4 half a place inside."""
    four = replace(contest, field=contest.field[:4])
    found = place(four, {"A": Samples(3, 0)})
    assert (found.rank, found.last, found.bound) == (5, 1, "upper")
    assert math.isclose(found.rating, 1500 + 400 * math.log10(0.5 / 3.5), abs_tol=1e-6)


def test_orders_that_come_first_count_by_their_share(contest):
    """A and B by the field's pace take 25 and 45 minutes: (2, 70) is second behind ann (50), and (2, 90), where B
    passes at the second attempt, ties with bob: second too. At once (2, 0), (2, 20), (2, 40) are first, (2, 60) is
    second."""
    samples = {"A": Samples(1, 1), "B": Samples(2, 1)}
    found = place(contest, samples, "field")
    assert (found.rank, found.first) == (2, 0)
    assert math.isclose(found.rating, rating_among_five(2), abs_tol=1e-6)
    at_once = place(contest, {"A": Samples(1, 1), "B": Samples(4, 1)})
    assert (at_once.rank, at_once.first, at_once.bound) == (1.25, 0.75, "lower")


def test_the_rating_never_falls_with_a_better_place(contest):
    """Also within half a place of the first, where the equation alone would give more than for the first itself."""
    first = place(contest, {"A": Samples(1, 1), "B": Samples(1, 1)}).rating
    almost = place(contest, {"A": Samples(1, 1), "B": Samples(4, 1)}).rating
    assert place(contest, {"A": Samples(1, 1)}).rating < almost <= first


def test_a_limit_of_attempts(contest):
    """With one attempt A is solved in half of the orders: third or (tied with eve) fifth."""
    found = place(contest, {"A": Samples(2, 1)}, attempts=1)
    assert (found.rank, found.solved) == (4, 0.5)
    assert math.isclose(found.rating, rating_among_five(4), abs_tol=1e-6)


def with_points(problem_points: float = 1000.0) -> Contest:
    """Three people under CF rules, A for 1000 points: solved for 900, for 800 after a rejected attempt, not at all."""
    field = (
        Contestant("ann", 1700, 900.0, 0, {"A": Solve(25, 0, 900.0)}),
        Contestant("bob", 1500, 800.0, 0, {"A": Solve(40, 1, 800.0)}),
        Contestant("cem", 1300, 0.0, 0, {}),
    )
    return Contest(8, "Points", "CF", 120, 0, (ContestProblem("A", problem_points, 1500),), field)


def test_points_fall_by_fifty_per_attempt_and_never_below_thirty_percent():
    contest = with_points()
    found = worth(contest, contest.problems[0], 16, "instant")
    assert found[:3] == [(1000, 0), (950, 0), (900, 0)]
    assert found[13:] == [(350, 0), (300, 0), (300, 0)]  # 1000 - 50 * 14 = 300 = 30 %


def test_points_at_the_pace_of_the_field():
    """The price when the median of the solvers solved it: 900 and 800 + 50 back for the attempt, median 875."""
    contest = with_points()
    assert worth(contest, contest.problems[0], 2, "field") == [(875, 0), (825, 0)]
    assert place(contest, {"A": Samples(1, 1)}, "field").rank == 2
    assert place(contest, {"A": Samples(1, 1)}).rank == 1


def test_a_tie_in_points_is_not_strictly_better():
    assert ranks_of(with_points(), [(900, 0), (899, 0), (800, 0), (0, 0)]).tolist() == [1, 2, 2, 3]


@given(counts=st.tuples(*[st.integers(0, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))] * 2))
@settings(max_examples=25)
@pytest.mark.parametrize("pace", ["instant", "field"])
def test_the_closed_form_is_the_mean_over_every_order(pace, counts):
    """Every order of the samples of A and B is played out in a loop: same mean rank, so same rating."""
    contest = read_contest(*five(), "five.json")
    samples = {index: Samples(n, c) for index, (n, c) in zip("AB", counts, strict=True)}
    orders = [list(itertools.permutations([True] * c + [False] * (n - c))) for n, c in counts]
    minutes = {"A": 25.0, "B": 45.0} if pace == "field" else {"A": 0.0, "B": 0.0}
    ranks = []
    for order in itertools.product(*orders):
        points = penalty = 0.0
        for index, results in zip("AB", order, strict=True):
            if True in results:
                points += 1
                penalty += minutes[index] + 20 * results.index(True)
        ranks.append(1 + sum((one.points, -one.penalty) > (points, -penalty) for one in contest.field))
    found = place(contest, samples, pace)
    assert math.isclose(found.rank, fmean(ranks), abs_tol=1e-9)
    assert math.isclose(found.rating, rating_among_five(max(fmean(ranks), 1.5)), abs_tol=1e-6)
    assert math.isclose(found.first, ranks.count(1) / len(ranks), abs_tol=1e-9)
    assert math.isclose(sum(distribution(contest, samples, pace).values()), 1, abs_tol=1e-12)


@pytest.mark.parametrize("rating", [1300, 1700, 2100])
def test_a_known_rating_is_recovered_within_thirty_points(rating):
    """20 contests, 13 problems each, 32 samples per problem that pass with the probability of the Elo curve, one of
    them sent: like any contestant of that rating. One contest has a standard deviation of about 222.8 / sqrt(32) = 39,
    the mean of 20 about 9."""
    rng = np.random.default_rng(rating)
    contests = [elo_contest(rng, number) for number in range(20)]
    results = {
        (contest.id, problem.index): Samples(32, int(rng.binomial(32, win_probability(rating, problem.rating))))
        for contest in contests
        for problem in contest.problems
    }
    found = rate(contests, results, "field", attempts=1)
    assert abs(found.estimate.rating - rating) < 30
    assert found.estimate.low < rating < found.estimate.high
    by_problems = rate_problems(contests, results)
    assert abs(by_problems.rating - rating) < 30
    assert by_problems.low < rating < by_problems.high


def test_more_attempts_lift_the_place_but_not_the_estimate_by_problems(contest):
    samples = {(7, "A"): Samples(8, 2), (7, "B"): Samples(8, 1)}
    assert rate([contest], samples, attempts=8).estimate.rating > rate([contest], samples, attempts=1).estimate.rating
    assert rate([contest], samples).estimate.rating == rate([contest], samples, attempts=8).estimate.rating


def test_mean_over_contests_with_its_interval_by_hand(contest):
    """Third and fifth of five: the mean of two ratings, plus or minus t(0.975, 1) * s / sqrt(2) = 12.706 * |d| / 2."""
    other = replace(contest, id=9)
    found = rate([contest, other], {(7, "A"): Samples(1, 1), (9, "A"): Samples(1, 0)})
    third, fifth = rating_among_five(3), rating_among_five(5)
    assert math.isclose(found.estimate.rating, (third + fifth) / 2, abs_tol=1e-6)
    half = 12.706204736 * (third - fifth) / 2
    assert math.isclose(found.estimate.high - found.estimate.rating, half, rel_tol=1e-6)
    assert found.estimate.bound == ""


def test_a_bound_leaves_its_side_of_the_interval_open(contest):
    """First in one of two contests: the mean is a lower bound, and has no upper end."""
    results = {(7, "A"): Samples(1, 1), (7, "B"): Samples(1, 1), (9, "A"): Samples(1, 1)}
    found = rate([contest, replace(contest, id=9)], results).estimate
    assert (found.bound, found.high) == ("lower", math.inf)
    assert math.isclose(found.rating, (rating_among_five(1.5) + rating_among_five(3)) / 2, abs_tol=1e-6)
    assert -math.inf < found.low < found.rating


def test_one_contest_has_no_finite_interval_and_none_no_rating(contest):
    found = rate([contest], {(7, "A"): Samples(1, 1)}).estimate
    assert (found.low, found.high) == (-math.inf, math.inf)
    with pytest.raises(DataError, match="no contest"):
        rate([contest], {(7, "A"): Samples(0, 0)})


def test_missing_problems_are_bounded_from_both_sides(contest):
    """B was not graded: not solved, the model is third; solved at once, it is first."""
    found = rate([contest], {(7, "A"): Samples(1, 1)})
    assert found.contests[0].missing == ("B",)
    assert math.isclose(found.estimate.rating, rating_among_five(3), abs_tol=1e-6)
    assert math.isclose(found.if_missing_solved, rating_among_five(1.5), abs_tol=1e-6)
