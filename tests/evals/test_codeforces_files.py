"""Contests from the answers of the API: what is read, what is left out, what is refused and where."""

import copy
import json

import pytest

from gspo.errors import ConfigError, DataError
from gspo.evals.codeforces import CODEFORCES
from gspo.evals.codeforces.contest import read_contest
from gspo.evals.codeforces.files import documents, read_files

from .contests import five


def parts():
    return tuple(copy.deepcopy(part) for part in five())


def test_a_contest_is_read():
    contest = read_contest(*parts(), "five.json")
    assert (contest.id, contest.scoring, contest.duration_minutes, contest.penalty_minutes) == (7, "ICPC", 120, 20)
    assert [problem.rating for problem in contest.problems] == [1200, 1800]
    assert [one.handle for one in contest.field] == ["ann", "bob", "cem", "dee", "eve"]
    assert contest.field[1].solves["A"].rejected == 1
    assert contest.notes == ()


def test_the_envelope_of_the_api_is_opened():
    standings, changes = parts()
    assert read_contest(
        {"status": "OK", "result": standings}, {"status": "OK", "result": changes}, "x"
    ) == read_contest(*parts(), "x")
    with pytest.raises(DataError, match="contestId: Contest with id 1 not found"):
        read_contest({"status": "FAILED", "comment": "contestId: Contest with id 1 not found"}, changes, "x")


def test_who_is_out_of_competition_is_left_out():
    """A virtual row has a rank of its own counting; the field is the same without it."""
    standings, changes = parts()
    for kind, ghost in (("OUT_OF_COMPETITION", False), ("VIRTUAL", False), ("PRACTICE", False), ("CONTESTANT", True)):
        row = copy.deepcopy(standings["rows"][0])
        row["party"] |= {"participantType": kind, "ghost": ghost, "members": [{"handle": f"{kind}{ghost}"}]}
        standings["rows"].insert(0, row | {"rank": 0})
    contest = read_contest(standings, changes, "x")
    assert len(contest.field) == 5
    assert contest.notes == ("4 rows out of competition left out",)


def test_who_is_not_rated_is_left_out_and_newcomers_get_a_rating():
    standings, changes = parts()
    changes[1]["oldRating"] = 0
    contest = read_contest(standings, changes[:4], "x")
    assert [one.rating for one in contest.field] == [1500, 1400, 1500, 1500]
    assert contest.notes == ("1 unrated contestants left out", "1 newcomers taken as 1400")
    assert read_contest(standings, changes, "x", newcomer_rating=1000).field[1].rating == 1000


def test_without_rejected_attempts_the_penalty_is_the_usual_one():
    standings, changes = parts()
    for row in standings["rows"]:
        for result in row["problemResults"]:
            row["penalty"] -= 20 * result["rejectedAttemptCount"]
            result["rejectedAttemptCount"] = 0
    contest = read_contest(standings, changes, "x")
    assert contest.penalty_minutes == 10
    assert "10 minutes taken" in contest.notes[0]


def edit(path, value):
    """Changes one place of (standings, changes)."""

    def apply(standings, changes):
        target = {"standings": standings, "changes": changes}
        for key in path[:-1]:
            target = target[key]
        if value is KeyError:
            del target[path[-1]]
        else:
            target[path[-1]] = value

    return apply


ROW, RESULT = ("standings", "rows", 1), ("standings", "rows", 1, "problemResults", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("standings", "contest"), KeyError, "there is no 'contest'"),
        (("standings", "contest", "phase"), "SYSTEM_TEST", "only a finished one"),
        (("standings", "contest", "type"), "IOI", "scoring 'IOI'"),
        (("standings", "contest", "durationSeconds"), KeyError, "no 'durationSeconds'"),
        (("standings", "rows"), [], "'rows' is empty"),
        (("standings", "problems"), {}, "'problems' is dict"),
        (("standings", "problems", 1, "index"), "A", "two problems have the index 'A'"),
        (("standings", "problems", 1, "points"), 0, "problem 2: points is 0"),
        (("standings", "problems", 1, "rating"), "hard", "problem 2: rating is 'hard'"),
        ((*ROW, "rank"), 3, "row 2: 'bob' has rank 3, but 1 rows are strictly better"),
        ((*ROW, "points"), "2", "row 2: points is '2'"),
        ((*ROW, "points"), float("nan"), "row 2: points is nan"),
        ((*ROW, "penalty"), None, "row 2: penalty is None"),
        ((*ROW, "penalty"), True, "row 2: penalty is True"),
        ((*ROW, "party", "members"), [{"handle": "bob"}, {"handle": "bea"}], "a team of 2"),
        ((*ROW, "party", "members"), [{"handle": "ann"}], "'ann' has two rows"),
        ((*ROW, "problemResults"), [{"points": 0.0}], "1 problem results and there are 2 problems"),
        ((*RESULT, "type"), "PRELIMINARY", "row 2, problem A: .*system tests are not over"),
        ((*RESULT, "rejectedAttemptCount"), -1, "cannot be negative"),
        ((*RESULT, "bestSubmissionTimeSeconds"), KeyError, "row 2, problem A: there is no 'bestSubmissionTimeSeconds'"),
        (("changes", 1, "handle"), "ann", "rating change 2: 'ann' has two rating changes"),
        (("changes", 1, "oldRating"), 1500.5, "rating change 2: oldRating is 1500.5"),
        (("changes", 1, "contestId"), 8, "rating change 2: is of contest 8"),
        (("changes", 1, "handle"), "zoe", "1 of 5 rated contestants have no row .'zoe' first."),
        (("changes",), [], "not rated"),
        (("changes",), "none", "ratingChanges is str"),
    ],
)
def test_answers_that_cannot_be_are_refused_and_say_where(path, value, message):
    both = dict(zip(("standings", "changes"), parts(), strict=True))
    if path == ("changes",):
        both["changes"] = value
    else:
        edit(path, value)(both["standings"], both["changes"])
    with pytest.raises(DataError, match=f"^five.json.*{message}"):
        read_contest(both["standings"], both["changes"], "five.json")


def test_a_first_page_of_the_standings_is_refused():
    """Its ranks are right, but rated people are missing."""
    standings, changes = parts()
    standings["rows"] = standings["rows"][:3]
    with pytest.raises(
        DataError, match=r"2 of 5 rated contestants have no row \('dee' first\); the standings are a part"
    ):
        read_contest(standings, changes, "x")


def test_a_later_page_of_the_standings_is_refused():
    standings, changes = parts()
    standings["rows"] = standings["rows"][2:]
    with pytest.raises(DataError, match="'cem' has rank 3, but 0 rows are strictly better"):
        read_contest(standings, changes, "x")


def test_penalties_that_follow_no_rule_are_refused():
    standings, changes = parts()
    standings["rows"][3]["penalty"] += 7  # 27 minutes for dee, 20 for bob
    with pytest.raises(DataError, match="penalties do not follow"):
        read_contest(standings, changes, "x")


def test_a_field_of_one_is_refused():
    standings, changes = parts()
    with pytest.raises(DataError, match="at least two"):
        read_contest(standings, changes[:1], "x")


TASK = {"contestId": 7, "index": "A", "prompt": "Add.", "tests": [["1 2\n", "3"]]}


def save(path, value):
    path.write_text(json.dumps(value))
    return path


def test_answers_in_separate_files_are_put_together(tmp_path):
    standings, changes = parts()
    save(tmp_path / "7-standings.json", {"status": "OK", "result": standings})
    save(tmp_path / "7-ratings.json", {"status": "OK", "result": changes})
    save(tmp_path / "tasks.jsonl", TASK)
    found = read_files([tmp_path])
    assert [contest.id for contest in found.contests] == [7]
    assert (
        found.contests == read_files([save(tmp_path / "both.json", {**standings, "ratingChanges": changes})]).contests
    )
    assert [(task.index, task.prompt) for task in found.tasks] == [("A", "Add.")]
    assert found.tasks[0].answer == {"tests": [["1 2\n", "3"]]}


def test_a_problem_may_bring_its_answer_column(tmp_path):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    answer = json.dumps({"tests": [["1\n", "1"]], "cpu_s": 2})
    task = save(tmp_path / "t.jsonl", {"contestId": 7, "index": "B", "prompt": "Echo.", "answer": answer})
    assert read_files([both, task]).tasks[0].answer["cpu_s"] == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"a": 1,\n  "b" 2}', r"a.json, line 2, column 7: is not JSON"),
        ("a.jsonl", '{"contestId": 7}\n{"x"\n', r"neither standings"),
        ("a.jsonl", "\n\n{", r"a.jsonl, line 3, column 2: is not JSON"),
        ("a.json", "<html>", r"line 1, column 1: is not JSON .*starts with '<html>'"),
        ("a.json", '{"status": "FAILED", "comment": "Call limit exceeded"}', "Call limit exceeded"),
        ("a.json", '{"status": "OK"}', "'OK'"),
        ("a.json", '{"rows": [], "contest": 7}', "a.json: says of no contest"),
        ("a.json", "[1]", "a list of 1 is neither"),
        ("a.json", json.dumps(TASK), "no standings"),
        ("a.json", json.dumps(five()[0]), "contest 7 has no rating changes"),
    ],
)
def test_documents_that_are_none_of_it_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_files([path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": "Z"}, "t.jsonl, line 1: problem 7/Z belongs to no contest"),
        ({"prompt": " "}, "problem 7/A has no 'prompt'"),
        ({"tests": []}, "problem 7/A: the problem has no tests"),
        ({"tests": [[1, 2]]}, "problem 7/A: a test has int"),
        ({"tets": []}, "did you mean 'tests'"),
        ({"contestId": "7"}, "contestId is '7'"),
    ],
)
def test_problems_that_cannot_be_are_refused(tmp_path, change, message):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    with pytest.raises(DataError, match=message):
        read_files([both, save(tmp_path / "t.jsonl", {**TASK, **change})])


def open_r1(index="A", **changes):
    """A row as in open-r1/codeforces."""
    values = {
        "id": f"7/{index}",
        "contest_id": "7",
        "index": index,
        "title": "Sum",
        "description": "Add two numbers.",
        "input_format": "Two numbers.",
        "output_format": "Their sum.",
        "interaction_format": None,
        "note": None,
        "examples": [{"input": "1 2", "output": "3"}],
        "time_limit": 2.0,
        "memory_limit": 256.0,
        "official_tests": [{"input": "1 2\n", "output": "3\n"}],
        "official_tests_complete": True,
        "input_mode": "stdio",
        "generated_checker": None,
    }
    return {**values, **changes}


def test_problems_of_open_r1_are_read_and_the_unfit_are_counted(tmp_path):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    rows = [open_r1(), open_r1("B", generated_checker="def check(): ..."), open_r1(contest_id="8")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_files([both, path])
    assert [(task.contest_id, task.index) for task in found.tasks] == [(7, "A")]
    assert found.tasks[0].answer == {"tests": [["1 2\n", "3\n"]], "cpu_s": 2.0, "memory_mb": 256.0}
    assert "within 2 seconds and 256 megabytes" in found.tasks[0].prompt
    assert "## Example 1\nInput:\n1 2\nOutput:\n3" in found.tasks[0].prompt
    note = "1 problems with their official tests; 1 not taken (a checker of its own); 1 of other contests"
    assert found.notes == (f"open-r1/codeforces: {note}",)


def test_open_r1_is_read_from_parquet(tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    standings, changes = parts()
    save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    pq.write_table(pa.Table.from_pylist([open_r1(), open_r1("B")]), tmp_path / "rows.parquet")
    assert [task.index for task in read_files([tmp_path]).tasks] == ["A", "B"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"input_mode": "file"}, "reads files"),
        ({"interaction_format": "Ask."}, "interactive"),
        ({"official_tests_complete": False}, "incomplete tests"),
        ({"official_tests": []}, "incomplete tests"),
    ],
)
def test_problems_of_open_r1_that_cannot_be_judged_say_why(tmp_path, change, why):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    found = read_files([both, save(tmp_path / "r.jsonl", open_r1(**change))])
    assert found.tasks == ()
    assert f"1 not taken ({why})" in found.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time_limit": -1.0}, "column 'time_limit': -1.0"),
        ({"official_tests": [{"input": "1"}]}, "column 'official_tests'"),
    ],
)
def test_damaged_rows_of_open_r1_are_refused(tmp_path, change, message):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    with pytest.raises(DataError, match=message):
        read_files([both, save(tmp_path / "r.jsonl", open_r1(**change))])


def test_doubles_are_refused(tmp_path):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    with pytest.raises(DataError, match=r"both\.json: standings of contest 7, which both.json has too"):
        read_files([both, both])
    task = save(tmp_path / "t.jsonl", TASK)
    with pytest.raises(DataError, match=r"problem 7/A stands in t\.jsonl, line 1 too"):
        read_files([both, task, task])
    with pytest.raises(DataError, match="contest 7 has no standings"):
        read_files([save(tmp_path / "s.json", {**standings, "contest": {"id": 8}}), save(tmp_path / "c.json", changes)])


def test_files_that_cannot_be_opened_are_refused(tmp_path):
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "no.json", "read"),
        (tmp_path / "latin.json", "UTF-8"),
        (tmp_path / "empty", "has no"),
    ):
        with pytest.raises(DataError, match=message):
            list(documents(path))


@pytest.mark.parametrize(
    "options", [{"judge": "me"}, {"pace": "slow"}, {"attempts": "0"}, {"newcomers": "x"}, {"speed": "1"}]
)
def test_options_that_cannot_be_are_refused(tmp_path, options):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    with pytest.raises(ConfigError):
        CODEFORCES.load([both], options)


def test_contests_without_tests_need_verdicts(tmp_path):
    standings, changes = parts()
    both = save(tmp_path / "both.json", {**standings, "ratingChanges": changes})
    with pytest.raises(DataError, match="judge=verdicts"):
        CODEFORCES.load([both], {})
    found = CODEFORCES.load([both], {"judge": "verdicts"})
    assert [problem.id for problem in found.problems] == ["7/A", "7/B"]
    assert found.facts["contests"][0]["num_rated"] == 5
