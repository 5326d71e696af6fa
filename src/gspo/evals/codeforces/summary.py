"""From graded samples to ratings: one place per contest, their mean with an interval, and what may be missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gspo.errors import DataError
from gspo.evals.codeforces.contest import Contest
from gspo.evals.codeforces.scoring import Pace, Place, Samples, bound_of, place
from gspo.evals.elo import RatingEstimate, rating_of_problems
from gspo.evals.statistics import t_quantile

#: Samples by (contest id, problem index).
Results = Mapping[tuple[int, str], Samples]


@dataclass(frozen=True)
class ContestResult:
    """A model in one contest."""

    contest: Contest
    place: Place
    missing: tuple[str, ...] = ()  # problems without a graded sample; they count as not solved
    best: Place | None = None  # had the missing problems been solved at the first attempt


@dataclass(frozen=True)
class Rating:
    """The mean rating over contests.

    The interval is Student's t over the contests: contests are what was drawn. It is infinite for one contest. With a
    ``bound`` the model came first or last in a contest, where no finite rating fits; that side of it is open.
    """

    estimate: RatingEstimate
    contests: tuple[ContestResult, ...]
    if_missing_solved: float  # the mean, had the missing problems been solved; else the same as the estimate

    @property
    def first(self) -> float:
        """Share of contests (and orders of samples in them) in which the model comes first."""
        return fmean(result.place.first for result in self.contests)

    @property
    def last(self) -> float:
        return fmean(result.place.last for result in self.contests)


def rate(
    contests: Sequence[Contest],
    results: Results,
    pace: Pace = "instant",
    attempts: int | None = None,
    confidence: float = 0.95,
) -> Rating:
    """The rating of who drew these samples.

    Raises:
        DataError: no contest has a graded sample.
    """
    taken = [found for contest in contests if (found := _in_contest(contest, results, pace, attempts)) is not None]
    if not taken:
        raise DataError("no contest has a graded sample; there is no place to rate")
    ratings = [one.place.rating for one in taken]
    mean = fmean(ratings)
    half = math.inf
    if len(taken) > 1:
        half = t_quantile((1 + confidence) / 2, len(taken) - 1) * stdev(ratings) / math.sqrt(len(taken))
    bounds = {one.place.bound for one in taken}
    bound = bound_of("lower" in bounds, "upper" in bounds)
    low = -math.inf if bound in ("upper", "both") else mean - half  # nobody knows how far beyond its bound a place is
    high = math.inf if bound in ("lower", "both") else mean + half
    best = fmean((one.best or one.place).rating for one in taken)
    return Rating(RatingEstimate(mean, low, high, bound, confidence), tuple(taken), best)


def _in_contest(contest: Contest, results: Results, pace: Pace, attempts: int | None) -> ContestResult | None:
    """None where nothing of a contest was graded: it was not taken part in."""
    samples = {
        problem.index: found
        for problem in contest.problems
        if (found := results.get((contest.id, problem.index), Samples(0, 0))).num_samples
    }
    if not samples:
        return None
    missing = tuple(problem.index for problem in contest.problems if problem.index not in samples)
    best = place(contest, {**samples, **dict.fromkeys(missing, Samples(1, 1))}, pace, attempts) if missing else None
    return ContestResult(contest, place(contest, samples, pace, attempts), missing, best)


def rate_problems(contests: Sequence[Contest], results: Results, confidence: float = 0.95) -> RatingEstimate | None:
    """The second estimate: maximum likelihood from the ratings of the problems alone; None if none has a rating.

    It asks how often one sample passes, so more attempts at a problem do not help as they do in a contest.
    """
    counts = [
        (float(problem.rating), found.num_samples, found.num_passed)
        for contest in contests
        for problem in contest.problems
        if problem.rating is not None and (found := results.get((contest.id, problem.index))) and found.num_samples
    ]
    return rating_of_problems(counts, confidence) if counts else None
