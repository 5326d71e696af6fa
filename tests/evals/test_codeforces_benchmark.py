"""``gspo eval --benchmark codeforces`` from files to a rating, with scripted solvers."""

import json

import numpy as np
import pytest

from gspo.cli import main
from gspo.data.sets import load_set, set_path
from gspo.errors import InputError
from gspo.evals.benchmark import Answer, Grade, ProblemResult
from gspo.evals.codeforces import CODEFORCES, OWN_CONTESTS
from gspo.evals.codeforces.benchmark import VerdictGrader, finish, samples_of
from gspo.evals.elo import win_probability
from gspo.sandbox import open_sandbox

from .contests import five
from .live_rows import write

VERDICTS = {"judge": "verdicts"}


def solver(rating, seed, num_samples=8):
    """Verdicts of one who passes each problem of the own contests with the probability of the Elo curve."""
    rng = np.random.default_rng(seed)
    rows = []
    for contest in load_set("contests"):
        for problem in contest["problems"]:
            passed = rng.random(num_samples) < win_probability(rating, problem["rating"])
            words = ["OK" if one else "WRONG_ANSWER" for one in passed]
            rows.append({"id": f"{problem['contestId']}/{problem['index']}", "responses": words})
    return rows


def evaluate(tmp_path, rows, *words):
    """The result of ``gspo eval`` on the own contests, with these verdicts."""
    samples = write(tmp_path / "samples.jsonl", rows)
    command = ["eval", "--benchmark", "codeforces", "--data", str(set_path("contests")), "--option", "judge=verdicts"]
    assert main([*command, "--samples", str(samples), "--out", str(tmp_path / "out"), *words]) == 0
    return json.loads((tmp_path / "out" / "evaluation.json").read_text())


def test_six_contests_end_to_end(tmp_path, capsys):
    result = evaluate(tmp_path, solver(1500, 3))
    metrics = result["metrics"]
    assert metrics["elo/num_contests"] == 6
    assert metrics["elo/low"] < metrics["elo"] < metrics["elo/high"]
    assert metrics["elo"] == metrics["elo/instant_pace"] > metrics["elo/field_pace"]
    assert metrics["elo_by_problems/low"] < 1500 < metrics["elo_by_problems/high"]
    table = next(table for table in result["tables"] if table["title"] == "Contests")
    assert len(table["rows"]) == 6
    said = capsys.readouterr().out
    assert "Elo" in said
    assert f"{metrics['elo']:.0f}" in said


def test_a_stronger_solver_has_a_higher_rating():
    """Also with one attempt, where several samples are no advantage."""
    imported = CODEFORCES.load([set_path("contests")], VERDICTS)
    found = {}
    for rating in (900, 1500, 2100):
        words = {row["id"]: row["responses"] for row in solver(rating, rating)}
        for attempts in ("1", "8"):
            results = judged(imported, words)
            found[rating, attempts] = finish(results, imported, {**VERDICTS, "attempts": attempts}).metrics["elo"]
    for attempts in ("1", "8"):
        assert found[900, attempts] < found[1500, attempts] < found[2100, attempts]
    assert found[1500, "1"] < found[1500, "8"]


def judged(imported, words):
    grader = VerdictGrader()
    results = []
    for problem in imported.problems:
        answers = tuple(Answer(word) for word in words.get(problem.id, ()))
        results.append(ProblemResult(problem, answers, tuple(grader.grade([problem] * len(answers), answers))))
    return results


def test_solving_all_is_a_lower_bound_and_nothing_an_upper_one():
    imported = CODEFORCES.load([set_path("contests")], VERDICTS)
    bounds = {}
    for word in ("OK", "WRONG_ANSWER"):
        results = judged(imported, {problem.id: [word] * 2 for problem in imported.problems})
        findings = finish(results, imported, VERDICTS)
        bounds[word] = findings.metrics["elo_by_problems/bound"]
        if word == "OK":
            assert findings.metrics["elo/bound"] == "lower"
            assert findings.metrics["elo/first"] == 1
            assert findings.figures[0].text.startswith("≥ ")
            assert any("half a place" in note for note in findings.notes)
    assert bounds == {"OK": "lower", "WRONG_ANSWER": "upper"}


def test_verdicts_of_the_api():
    words = ["OK", "WRONG_ANSWER", " RUNTIME_ERROR\n", "TESTING", "print(1)"]
    grades = VerdictGrader().grade([None] * 5, [Answer(word) for word in words])
    assert [grade.value for grade in grades] == [1.0, 0.0, 0.0, None, None]
    assert not grades[4].answered


def test_a_sample_without_a_verdict_is_no_sample(tmp_path):
    data = tmp_path / "five.json"
    standings, changes = five()
    data.write_text(json.dumps({**standings, "ratingChanges": changes}))
    imported = CODEFORCES.load([data], VERDICTS)
    grades = (Grade(1.0), Grade(None), Grade(0.0))
    found = samples_of([ProblemResult(imported.problems[0], (Answer(""),) * 3, grades)])
    assert (found[7, "A"].num_samples, found[7, "A"].num_passed) == (2, 1)
    nothing = finish(judged(imported, {}), imported, VERDICTS)
    assert "no rating" in nothing.notes[0]


def test_missing_problems_are_said_and_bounded(tmp_path):
    """A third of the answers is missing."""
    result = evaluate(tmp_path, solver(1500, 3)[::3] + solver(1500, 3)[1::3])
    metrics = result["metrics"]
    assert metrics["elo"] < metrics["elo/if_missing_solved"]
    assert metrics["missing_fraction"] == pytest.approx(1 / 3)
    assert any("no graded sample and count as not solved" in note for note in result["notes"])


def test_the_own_contests_run_programs(tmp_path):
    """Three problems of the first contest: a right program, a wrong one, and no program; the rest is missing."""
    try:
        open_sandbox()
    except InputError as error:
        pytest.skip(str(error))
    imported = OWN_CONTESTS.load([], {})
    assert len(imported.problems) == 42
    solutions = {row["prompt"]: row["solution"] for row in load_set("programs")}
    first, second, third = imported.problems[:3]
    answers = [f"```python\n{solutions[first.prompt]}```", "```python\nprint('no')\n```", "```cpp\n```"]
    grader = OWN_CONTESTS.make_grader({}, imported)
    grades = grader.grade([first, second, third], [Answer(text) for text in answers])
    assert [grade.value for grade in grades] == [1.0, 0.0, 0.0]
    results = [
        ProblemResult(problem, (Answer(""),), (grade,))
        for problem, grade in zip((first, second, third), grades, strict=True)
    ]
    findings = finish(results, imported, {})
    assert findings.metrics["elo/num_contests"] == 1
    assert any("4 problems have no graded sample" in note for note in findings.notes)
