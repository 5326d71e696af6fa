"""What a model's samples are worth in a contest: points and penalty by its rules, over all orders of the samples.

A model sends its samples to a problem one after the other until one is accepted. In which order is chance, and all
orders are equally likely; problems are independent. So points and penalty of the whole contest have a distribution,
which is computed exactly: per problem from ``failures_before_success``, over the problems by convolution.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gspo.evals.codeforces.contest import REJECTED_POINTS, Contest, ContestProblem, Solve
from gspo.evals.elo import Bound, Floats, failures_before_success, ratings_of_ranks

#: When the accepted sample arrives: at the start of the contest, or when the median of those who solved it did.
Pace = Literal["instant", "field"]
PACES: tuple[Pace, ...] = ("instant", "field")
_DIGITS = 6  # points beyond are rounding
_ROUNDING = 1e-12
#: (points, penalty) of a whole contest, with its probability.
Totals = dict[tuple[float, float], float]


@dataclass(frozen=True)
class Samples:
    """How many of the graded samples of one problem passed."""

    num_samples: int
    num_passed: int


@dataclass(frozen=True)
class Place:
    """What a model's samples are worth in one contest, expected over the order of the samples."""

    rating: float  # whose expected rank is ``rank``
    rank: float  # 1 plus the number of contestants strictly better
    solved: float  # problems
    points: float
    penalty: float
    first: float  # share of orders that come first
    last: float  # share of orders that come last
    bound: Bound  # "lower": within half a place of the first, where the rating is a lower bound; "upper": of the last


def bound_of(first: bool, last: bool) -> Bound:
    return "both" if first and last else "lower" if first else "upper" if last else ""


def place(
    contest: Contest, samples: Mapping[str, Samples], pace: Pace = "instant", attempts: int | None = None
) -> Place:
    """Rank and rating in ``contest`` of who sends these samples (by problem index), expected over their order.

    The rank is averaged, not the rating: the seed equation speaks of expected ranks, and a mean of ratings leans
    outwards near both ends of the field, where a place more or less is worth more and more.

    Problems without samples count as not solved. ``attempts`` is the most that are sent to one problem; default all.
    """
    totals = distribution(contest, samples, pace, attempts)
    chances, results = np.array(list(totals.values())), np.array(list(totals))
    ranks = ranks_of(contest, list(totals))
    rank, last = float(chances @ ranks), len(contest.field) + 1
    solved = sum(sum(failures_before_success(s.num_samples, s.num_passed)[:attempts]) for s in samples.values())
    return Place(
        rating=float(ratings_of_ranks([min(max(rank, 1.0), last)], [one.rating for one in contest.field])[0]),
        rank=rank,
        solved=float(solved),
        points=float(chances @ results[:, 0]),
        penalty=float(chances @ results[:, 1]),
        first=float(chances[ranks == 1].sum()),
        last=float(chances[ranks == last].sum()),
        bound=bound_of(rank < 1.5, rank > last - 0.5),
    )


def ranks_of(contest: Contest, results: Sequence[tuple[float, float]]) -> Floats:
    """One plus the number of contestants strictly better than each (points, penalty)."""
    field = sorted((-one.points, one.penalty) for one in contest.field)
    return np.array([1.0 + bisect_left(field, (-points, penalty)) for points, penalty in results])


def distribution(
    contest: Contest, samples: Mapping[str, Samples], pace: Pace = "instant", attempts: int | None = None
) -> Totals:
    """Points and penalty of the whole contest, over all orders of the samples of every problem."""
    totals: Totals = {(0.0, 0.0): 1.0}
    for problem in contest.problems:
        one = samples.get(problem.index, Samples(0, 0))
        chances = failures_before_success(one.num_samples, one.num_passed)[:attempts]
        if chances:
            worths = list(zip(worth(contest, problem, len(chances), pace), chances, strict=True))
            unsolved = 1 - sum(chances) if attempts is not None else 0.0
            if unsolved > _ROUNDING:  # the first success would come after the last attempt
                worths.append(((0.0, 0.0), unsolved))
            totals = _convolve(totals, worths)
    return totals


def worth(contest: Contest, problem: ContestProblem, num_ranks: int, pace: Pace) -> list[tuple[float, float]]:
    """(points, penalty) of ``problem`` solved after 0, 1, ... rejected attempts.

    ICPC: one point; the minute of the accepted attempt plus the contest's minutes per rejected one. CF: the points that
    the problem still gives, less 50 per rejected attempt, and never less than 30 % of its full points.
    """
    solves = [one.solves[problem.index] for one in contest.field if problem.index in one.solves]
    if contest.scoring == "ICPC":
        minute = _minute(contest, solves) if pace == "field" else 0.0
        return [(1.0, minute + contest.penalty_minutes * k) for k in range(num_ranks)]
    price = _price(problem, solves) if pace == "field" else problem.points
    floor = 3 * problem.points / 10
    return [(max(floor, price - REJECTED_POINTS * k), 0.0) for k in range(num_ranks)]


def _minute(contest: Contest, solves: Sequence[Solve]) -> float:
    """When the median of the solvers had solved it; the end of the contest if nobody did."""
    return statistics.median(solve.minute for solve in solves) if solves else contest.duration_minutes


def _price(problem: ContestProblem, solves: Sequence[Solve]) -> float:
    """What the problem gave without rejected attempts when the median of its solvers solved it; 0 if nobody did."""
    if not solves:
        return 0.0
    return min(problem.points, statistics.median(solve.points + REJECTED_POINTS * solve.rejected for solve in solves))


def _convolve(totals: Totals, worths: Sequence[tuple[tuple[float, float], float]]) -> Totals:
    found: defaultdict[tuple[float, float], float] = defaultdict(float)
    for (points, penalty), chance in totals.items():
        for (more, minutes), share in worths:
            found[round(points + more, _DIGITS), round(penalty + minutes, _DIGITS)] += chance * share
    return dict(found)
