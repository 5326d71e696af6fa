"""Small contests for tests, in the form of the Codeforces API."""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo.evals.codeforces.contest import Contest, Contestant, ContestProblem, Solve
from gspo.evals.elo import win_probability

#: Handle: solves of A and B as (minute, rejected attempts), or None.
FIVE: dict[str, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
    "ann": ((10, 0), (40, 0)),  # 2 points, penalty 10 + 40 = 50
    "bob": ((20, 1), (50, 0)),  # 2 points, penalty 20 + 20 + 50 = 90
    "cem": ((30, 0), None),  # 1 point, penalty 30
    "dee": ((40, 1), None),  # 1 point, penalty 40 + 20 = 60
    "eve": (None, None),
}
PENALTY = {"ann": 50, "bob": 90, "cem": 30, "dee": 60, "eve": 0}


def five() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Standings and rating changes of five people of 1500 under ICPC rules, 20 minutes per rejected attempt."""
    rows = [
        {
            "party": {"participantType": "CONTESTANT", "members": [{"handle": handle}], "ghost": False},
            "rank": rank,
            "points": float(sum(solve is not None for solve in solves)),
            "penalty": PENALTY[handle],
            "problemResults": [_result(solve) for solve in solves],
        }
        for rank, (handle, solves) in enumerate(FIVE.items(), 1)
    ]
    standings = {
        "contest": {"id": 7, "name": "Five", "type": "ICPC", "phase": "FINISHED", "durationSeconds": 7200},
        "problems": [{"contestId": 7, "index": "A", "rating": 1200}, {"contestId": 7, "index": "B", "rating": 1800}],
        "rows": rows,
    }
    changes = [{"contestId": 7, "handle": handle, "oldRating": 1500, "newRating": 1500} for handle in FIVE]
    return standings, changes


def _result(solve: tuple[int, int] | None) -> dict[str, Any]:
    if solve is None:
        return {"points": 0.0, "rejectedAttemptCount": 0, "type": "FINAL"}
    minute, rejected = solve
    seconds = 60 * minute + 17  # the penalty counts whole minutes
    return {
        "points": 1.0,
        "rejectedAttemptCount": rejected,
        "type": "FINAL",
        "bestSubmissionTimeSeconds": seconds,
    }


def elo_contest(rng: np.random.Generator, number: int, num_contestants: int = 250) -> Contest:
    """A contest whose outcome follows the Elo curve, almost.

    Each of a ladder of problems is solved with the curve's probability. Around a rating the points then have the
    variance 173.7 / s for a spacing s (the integral of p (1 - p) over the ladder), and 1/12 more from time, which
    orders equal points at random; they grow by 1 / s per rating point. So a contestant's form has a standard deviation
    of s sqrt(173.7 / s + 1/12) rating points. Two places are ordered as the Elo curve says if it is that of a Gumbel
    variable of scale 173.7, which is 173.7 pi / sqrt(6) = 222.8: a spacing of 255.
    """
    spacing = 255
    ladder = np.arange(200, 3300, spacing) + rng.integers(0, spacing)
    problems = tuple(ContestProblem(chr(65 + k), 1.0, int(rating)) for k, rating in enumerate(ladder))
    field = []
    for index, rating in enumerate(np.clip(rng.normal(1600, 350, num_contestants), 500, 2900).round().astype(int)):
        solved = np.flatnonzero(rng.random(len(ladder)) < win_probability(rating, ladder))
        solves = {problems[k].index: Solve(int(rng.integers(1, 120)), 0, 1.0) for k in solved}
        penalty = sum(solve.minute for solve in solves.values())
        field.append(Contestant(f"c{index}", int(rating), float(len(solved)), penalty, solves))
    return Contest(number, f"Made-up {number}", "ICPC", 120, 20, problems, tuple(field))
