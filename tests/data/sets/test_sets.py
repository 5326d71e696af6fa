import io
import json
import math
import random
import sys
from contextlib import redirect_stderr
from unittest.mock import patch

import pytest

from gspo.data.sets import NAMES, SEED, load_set, make_set, set_path
from gspo.data.sets import programs as programs_module
from gspo.data.sets.contests import expected_rank, make, solve_probability
from gspo.data.sets.integers import TEMPLATES
from gspo.data.sets.programs import load_problems, make_input, run_trusted
from gspo.errors import DataError, InputError
from gspo.rewards.code import judge
from gspo.rewards.math import verify
from gspo.rewards.output import same_value, text_difference
from gspo.rewards.problems import read_problem
from gspo.sandbox import open_sandbox

PROBLEMS = load_problems()


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_file_is_what_the_seed_gives(name):
    assert load_set(name) == make_set(name)
    assert make_set(name, SEED + 1) != make_set(name)
    assert set_path(name).is_file()


def test_an_unknown_set_is_named():
    with pytest.raises(DataError, match=r"no set 'integer'; there are .*did you mean 'integers'"):
        load_set("integer")


class TestIntegers:
    def test_sizes(self):
        rows = load_set("integers")
        assert len(rows) == 60
        assert len({row["template"] for row in rows}) == len(TEMPLATES) >= 12
        assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 60

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_formula_and_search_agree_for_other_seeds_too(self, name):
        rng = random.Random(f"other {name}")
        for _ in range(4):
            draft = TEMPLATES[name](rng)
            assert draft.search() == draft.formula

    def test_keys_are_integers_that_the_verifier_accepts(self):
        for row in load_set("integers"):
            assert str(int(row["answer"])) == row["answer"]
            assert verify(row["answer"], f"So \\boxed{{{row['answer']}}}.").correct is True
            assert verify(row["answer"], f"So \\boxed{{{int(row['answer']) + 1}}}.").correct is False


def passes(problem, source, given, expected):
    """Whether a program passes one test, judged without a box."""
    try:
        said = run_trusted(source, problem.function, given)
    except Exception:
        return False
    if problem.checker:
        return accepts(problem.checker, given, said, expected)
    if problem.function:
        return same_value(expected, said)
    return text_difference(expected.encode(), said.encode()) == ""


def accepts(checker, given, said, expected):
    files = {"given": given, "said": said, "answer": expected}

    def opened(name):
        return io.StringIO(files[name])

    try:
        with patch.object(sys, "argv", ["checker", *files]), redirect_stderr(io.StringIO()):
            exec(checker, {"open": opened})
    except SystemExit as stop:
        return not stop.code
    return True


class TestPrograms:
    def test_sizes(self):
        rows = load_set("programs")
        assert len(rows) == len(PROBLEMS) == 24
        assert sum(bool(problem.function) for problem in PROBLEMS) == 8
        assert sum(bool(problem.checker) for problem in PROBLEMS) == 4
        assert [row["date"] for row in rows] == sorted({row["date"] for row in rows})
        for row in rows:
            problem = read_problem(row["answer"])
            assert len(problem.tests) == programs_module.NUM_TESTS

    @pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
    def test_the_reference_agrees_with_the_slow_solution(self, problem):
        """On 30 small inputs; where several answers are right, each accepts the other's by the checker."""
        rng = random.Random(problem.name)
        for _ in range(30):
            given = make_input(problem, rng, 0)
            fast, slow = (run_trusted(source, problem.function, given) for source in (problem.reference, problem.brute))
            assert passes(problem, problem.reference, given, slow), (given, fast, slow)
            assert passes(problem, problem.brute, given, fast), (given, fast, slow)

    @pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
    def test_the_reference_passes_and_every_wrong_program_fails(self, problem):
        [row] = [row for row in load_set("programs") if row["id"] == f"programs/{problem.name}"]
        tests = json.loads(row["answer"])["tests"]
        assert all(passes(problem, problem.reference, *test) for test in tests)
        assert len(problem.wrong) >= 2
        for name, source in problem.wrong.items():
            assert not all(passes(problem, source, *test) for test in tests), name

    def test_wrong_programs_are_wrong_by_their_answers(self):
        """None of them merely crashes on everything: each gives some answer on some test."""
        for problem, row in zip(PROBLEMS, load_set("programs"), strict=True):
            tests = json.loads(row["answer"])["tests"]
            for source in problem.wrong.values():
                assert any(answers(source, problem.function, given) for given, _ in tests)

    @pytest.mark.parametrize("name", ["max-subarray", "two-colours", "merge-intervals"])
    def test_in_the_sandbox(self, name):
        try:
            sandbox = open_sandbox(num_slots=2)
        except InputError as error:
            pytest.skip(str(error))
        [row] = [row for row in load_set("programs") if row["id"] == f"programs/{name}"]
        tests = json.loads(row["answer"])
        few = read_problem({**tests, "tests": tests["tests"][:3], "wall_s": 20})
        assert judge(row["solution"], few, sandbox).correct is True
        assert judge("raise SystemExit(1)", few, sandbox).correct is False


def answers(source, function, given):
    try:
        run_trusted(source, function, given)
    except Exception:
        return False
    return True


class TestContests:
    def test_sizes(self):
        rows = load_set("contests")
        assert len(rows) == 6
        assert all(len(row["rows"]) == len(row["ratingChanges"]) == 60 for row in rows)

    @pytest.mark.parametrize("contest", load_set("contests"), ids=lambda row: str(row["contest"]["id"]))
    def test_points_penalties_and_ranks_follow_the_rules(self, contest):
        standings = contest["rows"]
        for row in standings:
            solved = [result for result in row["problemResults"] if result["points"]]
            assert row["points"] == len(solved)
            minutes = sum(r["bestSubmissionTimeSeconds"] // 60 + 20 * r["rejectedAttemptCount"] for r in solved)
            assert row["penalty"] == minutes
            better = [o for o in standings if (-o["points"], o["penalty"]) < (-row["points"], row["penalty"])]
            assert row["rank"] == 1 + len(better)
            times = [result["bestSubmissionTimeSeconds"] for result in solved]
            assert all(0 < time < contest["contest"]["durationSeconds"] for time in times)
        assert [row["rank"] for row in standings] == sorted(row["rank"] for row in standings)

    def test_the_better_do_better(self):
        """Over all contests rank and rating are strongly opposed (Spearman by hand: 1 - 6 sum d^2 / (n^3 - n))."""
        for contest in load_set("contests"):
            changes = contest["ratingChanges"]
            by_rating = sorted(changes, key=lambda change: -change["oldRating"])
            by_rank = sorted(changes, key=lambda change: change["rank"])
            n = len(changes)
            squares = sum((by_rating.index(change) - by_rank.index(change)) ** 2 for change in changes)
            assert 1 - 6 * squares / (n**3 - n) > 0.4

    def test_rating_changes_move_towards_the_performance(self):
        [contest] = make(SEED, 40, 1)
        changes = contest["ratingChanges"]
        for change in changes:
            others = [c["oldRating"] for c in changes if c is not change]
            seed = expected_rank(change["oldRating"], others)
            moved = change["newRating"] - change["oldRating"]
            assert abs(moved) <= 1 or (moved > 0) is (change["rank"] < seed)

    def test_the_curve(self):
        assert solve_probability(1900, 1500) == pytest.approx(10 / 11)  # 400 points are odds of ten to one
        assert expected_rank(1500, [1500, 1500]) == 2.0
        assert math.isclose(solve_probability(1200, 1700) + solve_probability(1700, 1200), 1)
