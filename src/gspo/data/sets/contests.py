"""6 made-up contests in the form of the Codeforces API: standings with problem results, and rating changes.

Each contestant has a true rating and solves a problem of known rating with the probability of the Elo curve, after a
few wrong attempts. Points and penalty follow the ICPC rules (20 minutes per rejected attempt on a solved problem); rank
is one plus the number of those who are strictly better. The ratings before the contest are the true ones.
"""

from __future__ import annotations

import random
from typing import Any

from gspo.seeding import derive_seed

NUM_CONTESTS = 6
NUM_CONTESTANTS = 60
DURATION_S = 7200
PENALTY_MINUTES = 20
_LETTERS = "ABCDEFG"


def make(seed: int, num_contestants: int = NUM_CONTESTANTS, num_contests: int = NUM_CONTESTS) -> list[dict[str, Any]]:
    """Rows with ``contest``, ``problems``, ``rows`` (standings) and ``ratingChanges``, named as in the API."""
    return [_contest(seed, number, num_contestants) for number in range(1, num_contests + 1)]


def solve_probability(rating: float, problem_rating: float) -> float:
    """The Elo curve.

    >>> solve_probability(1500, 1500)
    0.5
    """
    return float(1 / (1 + 10 ** ((problem_rating - rating) / 400)))


def _contest(seed: int, number: int, num_contestants: int) -> dict[str, Any]:
    rng = random.Random(derive_seed(seed, "contests", number))
    problems = _problems(rng, number)
    ratings = [max(400, round(rng.gauss(1500, 350))) for _ in range(num_contestants)]
    handles = [f"contestant{number}_{index}" for index in range(num_contestants)]
    rows = [_row(rng, handle, rating, problems) for handle, rating in zip(handles, ratings, strict=True)]
    for row in rows:
        row["rank"] = 1 + sum((-other["points"], other["penalty"]) < (-row["points"], row["penalty"]) for other in rows)
    rows.sort(key=lambda row: (row["rank"], row["party"]["members"][0]["handle"]))
    old = dict(zip(handles, ratings, strict=True))
    return {
        "contest": {
            "id": 9000 + number,
            "name": f"Made-up Round {number}",
            "type": "ICPC",
            "phase": "FINISHED",
            "durationSeconds": DURATION_S,
            "startTimeSeconds": 1_704_067_200 + number * 30 * 86_400,  # from January 2024 on, monthly
        },
        "problems": problems,
        "rows": rows,
        "ratingChanges": _rating_changes(9000 + number, rows, old),
    }


def _problems(rng: random.Random, number: int) -> list[dict[str, Any]]:
    ratings = sorted(rng.randrange(800, 2900, 100) for _ in _LETTERS)
    return [
        {"contestId": 9000 + number, "index": letter, "name": f"Problem {letter}", "rating": rating}
        for letter, rating in zip(_LETTERS, ratings, strict=True)
    ]


def _row(rng: random.Random, handle: str, rating: int, problems: list[dict[str, Any]]) -> dict[str, Any]:
    clock, results, penalty = 0, [], 0
    for problem in problems:
        chance = solve_probability(rating, problem["rating"])
        solved = rng.random() < chance and clock < DURATION_S - 60
        rejected = min(rng.randrange(10), _geometric(rng, 0.4 + 0.5 * chance))
        result: dict[str, Any] = {"points": float(solved), "rejectedAttemptCount": rejected, "type": "FINAL"}
        if solved:
            clock = min(DURATION_S - 1, clock + 120 + rng.randrange(60, 900) + 60 * rejected)
            result["bestSubmissionTimeSeconds"] = clock
            penalty += clock // 60 + PENALTY_MINUTES * rejected
        results.append(result)
    return {
        "party": {"participantType": "CONTESTANT", "members": [{"handle": handle}], "ghost": False},
        "points": sum(result["points"] for result in results),
        "penalty": penalty,
        "problemResults": results,
    }


def _geometric(rng: random.Random, chance: float) -> int:
    """Failures before the first success."""
    count = 0
    while rng.random() > chance:
        count += 1
    return count


def _rating_changes(contest_id: int, rows: list[dict[str, Any]], old: dict[str, int]) -> list[dict[str, Any]]:
    """Half the way to the rating at which the expected rank is the geometric mean of rank and expected rank."""
    changes = []
    for row in rows:
        handle = row["party"]["members"][0]["handle"]
        others = [rating for name, rating in old.items() if name != handle]
        target = (row["rank"] * expected_rank(old[handle], others)) ** 0.5
        new = old[handle] + round((_rating_of_rank(target, others) - old[handle]) / 2)
        change = {"contestId": contest_id, "handle": handle, "rank": row["rank"]}
        changes.append({**change, "oldRating": old[handle], "newRating": new})
    return changes


def expected_rank(rating: float, others: list[int]) -> float:
    """One plus the expected number of others who do better."""
    return 1 + sum(solve_probability(other, rating) for other in others)


def _rating_of_rank(rank: float, others: list[int]) -> float:
    low, high = -4000.0, 8000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_rank(middle, others) > rank else (low, middle)
    return low
