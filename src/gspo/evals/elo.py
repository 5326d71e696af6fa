"""Elo ratings from places in contests and from problems solved; pure maths.

The win probability of ratings a against b is ``1 / (1 + 10^((b - a) / 400))``. The expected rank of a rating among a
field is one plus the sum of the others' win probabilities against it (the "seed" of the rating system of Codeforces,
M. Mirzayanov, 2015). The rating of a place is the rating whose expected rank is that place, solved on the reals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gspo.errors import DataError
from gspo.evals.statistics import t_quantile

Floats = NDArray[np.float64]
Bound = Literal["", "lower", "upper", "both"]
#: Rating points per unit of log odds.
SCALE = 400 / math.log(10)
_GRID = 8.0  # rating points; between two of them the seed is almost a straight line
_NEWTON_STEPS = 5  # each squares the error, which is below a tenth of a point after interpolation
_HALVINGS = 100


def win_probability(rating: ArrayLike, other: ArrayLike) -> Floats:
    """How likely ``rating`` is to place above ``other``.

    >>> float(win_probability(1900, 1500).round(4)), float(win_probability(1500, 1500))
    (0.9091, 0.5)
    """
    gap = (np.asarray(other, dtype=np.float64) - np.asarray(rating, dtype=np.float64)) / SCALE
    return np.asarray(1 / (1 + np.exp(np.clip(gap, -700.0, 700.0))), dtype=np.float64)


def expected_ranks(ratings: ArrayLike, field: ArrayLike) -> Floats:
    """The expected rank of each rating (R,) among the others in ``field`` (F,): between 1 and F + 1."""
    return _seed(np.atleast_1d(np.asarray(ratings, dtype=np.float64)), np.asarray(field, dtype=np.float64))[0]


def ratings_of_ranks(ranks: Sequence[float] | Floats, field: ArrayLike) -> Floats:
    """The rating whose expected rank among ``field`` (F,) is each of ``ranks`` (R,): the seed equation on the reals.

    No finite rating is expected to come first (rank 1) or last (rank F + 1). There the equation is solved half a place
    inside, and what comes out is a bound: a lower one for the first place, an upper one for the last.

    Raises:
        DataError: an empty field, or a rank outside 1 .. F + 1.
    """
    others = np.asarray(field, dtype=np.float64)
    wanted = np.asarray(ranks, dtype=np.float64)
    if not others.size:
        raise DataError("a rank among nobody says nothing of a rating; the field is empty")
    if np.any((wanted < 1) | (wanted > others.size + 1)):
        raise DataError(f"the ranks {wanted.tolist()[:5]} do not all lie between 1 and {others.size + 1}")
    inside, place = np.unique(np.clip(wanted, 1.5, others.size + 0.5), return_inverse=True)
    reach = SCALE * math.log(4 * others.size)  # beyond it even a field of equals leaves less than half a place
    num_points = int((others.max() - others.min() + 2 * reach) / _GRID) + 2
    grid = np.linspace(others.max() + reach, others.min() - reach, num_points)
    ratings = np.interp(inside, expected_ranks(grid, others), grid)
    for _ in range(_NEWTON_STEPS):
        values, slopes = _seed(ratings, others)
        ratings = ratings - np.clip((values - inside) / slopes, -_GRID, _GRID)
    return np.asarray(ratings[place.reshape(wanted.shape)], dtype=np.float64)


def _seed(ratings: Floats, field: Floats) -> tuple[Floats, Floats]:
    """The expected ranks of ratings (R,), and how they change per rating point (below 0)."""
    values, counts = np.unique(field, return_counts=True)
    chance = win_probability(values[None, :], ratings[:, None])
    return 1 + chance @ counts, -(chance * (1 - chance)) @ counts / SCALE


def failures_before_success(num_samples: int, num_passed: int) -> list[float]:
    """P(k samples fail before the first that passes), k = 0 .. n - c, over all orders of the n samples.

    ``C(n - k - 1, c - 1) / C(n, c)``: with the first success in place k, the other c - 1 lie anywhere behind it. An
    empty list if none passed.

    >>> failures_before_success(4, 2)
    [0.5, 0.3333333333333333, 0.16666666666666666]

    Raises:
        DataError: fewer samples than successes, or a negative number.
    """
    if not 0 <= num_passed <= num_samples:
        raise DataError(f"{num_passed} of {num_samples} samples cannot have passed")
    if not num_passed:
        return []
    orders = math.comb(num_samples, num_passed)
    last = num_samples - num_passed
    return [math.comb(num_samples - k - 1, num_passed - 1) / orders for k in range(last + 1)]


@dataclass(frozen=True)
class RatingEstimate:
    """A rating with its interval. With a bound, ``rating`` is that bound and the open side is infinite."""

    rating: float
    low: float
    high: float
    bound: Bound = ""
    confidence: float = 0.95


def rating_of_problems(counts: Sequence[tuple[float, int, int]], confidence: float = 0.95) -> RatingEstimate:
    """Maximum likelihood rating of who passed c of n samples on problems of known rating.

    Each sample passes with the win probability against its problem. The likelihood has one free number, so the score
    equation ``sum(c) = sum(n p)`` has one root. The interval takes the problem as the unit that was drawn (sandwich
    variance: samples of one problem resemble each other). If all samples passed, or none did, there is no root: the
    rating is then the one-sided bound at which that outcome has probability ``1 - confidence``.

    Args:
        counts: (problem rating, samples, passed), one per problem; problems without a sample do not count.

    Raises:
        DataError: no sample, or numbers that cannot be.
    """
    table = np.asarray([row for row in counts if row[1]], dtype=np.float64).reshape(-1, 3)
    if not len(table):
        raise DataError("no problem has both a rating and a sample; there is nothing to estimate a rating from")
    difficulty, drawn, passed = table.T
    if np.any((passed < 0) | (passed > drawn)) or not np.isfinite(difficulty).all():
        raise DataError("a problem has more passes than samples, or no finite rating")
    if passed.sum() == drawn.sum():
        rating = _root(
            lambda r: float((drawn * np.log(win_probability(r, difficulty))).sum()) - math.log(1 - confidence)
        )
        return RatingEstimate(rating, rating, math.inf, "lower", confidence)
    if not passed.sum():
        rating = _root(
            lambda r: math.log(1 - confidence) - float((drawn * np.log(win_probability(difficulty, r))).sum())
        )
        return RatingEstimate(rating, -math.inf, rating, "upper", confidence)
    rating = _root(lambda r: float((drawn * win_probability(r, difficulty)).sum() - passed.sum()))
    chance = win_probability(rating, difficulty)
    information = float((drawn * chance * (1 - chance)).sum())
    half = _half_width(passed - drawn * chance, information, confidence)
    return RatingEstimate(rating, rating - half, rating + half, "", confidence)


def _half_width(scores: Floats, information: float, confidence: float) -> float:
    """Half the interval from the problems' scores: t with P - 1 degrees of freedom; infinite for one problem."""
    count = len(scores)
    if count < 2:
        return math.inf
    variance = float((scores**2).sum()) * count / (count - 1) / information**2
    return SCALE * math.sqrt(variance) * t_quantile((1 + confidence) / 2, count - 1)


def _root(increasing: Callable[[float], float]) -> float:
    """Where an increasing function of a rating crosses zero."""
    low, high = -1000.0, 5000.0
    while increasing(low) > 0:
        low -= 2000
    while increasing(high) < 0:
        high += 2000
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return (low + high) / 2
