import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.data.arithmetic import generate, score_answer, split_of, worked_solution
from gspo.errors import DataError


def operands(row):
    return tuple(map(int, row["prompt"].rstrip("=").split("+")))


def test_the_worked_example():
    assert worked_solution((47, 38)) == "7+8=15,4+3+1=8;85"
    assert worked_solution((10, 20)) == "0+0=0,1+2=3;30"
    assert worked_solution((99, 99)) == "9+9=18,9+9+1=19;198"


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=5))
def test_every_step_of_a_solution_is_true_and_its_answer_scores(numbers):
    steps, _, answer = worked_solution(numbers).partition(";")
    assert int(answer) == sum(numbers)
    for step in steps.split(","):
        left, right = step.split("=")
        assert sum(map(int, left.split("+"))) == int(right)
    assert score_answer(worked_solution(numbers), str(sum(numbers))) == 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("7+8=15,4+3+1=8;85", 1.0),
        ("nonsense;85", 1.0),  # the answer is judged, not the way
        ("; 85\n", 1.0),
        ("85", 0.0),
        (";84;85 86", 0.0),
        (";84,85", 0.0),
        (";085", 0.0),
        (";85;84", 0.0),
        (";85;", 0.0),
        ("", 0.0),
    ],
)
def test_score(text, score):
    assert score_answer(text, "85") == score


@pytest.mark.parametrize("options", [{}, {"digits": 3}, {"terms": 3}, {"digits": 6, "terms": 2}])
def test_train_and_eval_are_disjoint_whatever_the_seeds(options):
    train = {tuple(sorted(operands(r))) for s in (0, 1) for r in generate("addition", options, seed=s, num=400)}
    held_out = {
        tuple(sorted(operands(r))) for s in (0, 1) for r in generate("addition", options, seed=s, split="eval", num=400)
    }
    assert train.isdisjoint(held_out)
    assert len(train) > 300


def test_rows_are_stable_distinct_and_of_the_right_size():
    rows = generate("addition", seed=3, num=200)
    assert rows == generate("addition", seed=3, num=200)
    assert rows != generate("addition", seed=4, num=200)
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == len(rows) == 200
    assert all(10 <= number <= 99 for row in rows for number in operands(row))
    assert rows[7]["id"] == "arithmetic:addition/train/3/7"
    assert all(row["answer"] == str(sum(operands(row))) and row["task_args"] == [row["answer"]] for row in rows)


def test_asking_for_more_than_there_are_gives_all():
    train, held_out = (generate("addition", {"digits": 1}, split=split, num=1000) for split in ("train", "eval"))
    assert len(train) + len(held_out) == 10 * 10
    assert len(train) == sum(split_of((a, b)) == "train" for a in range(10) for b in range(10))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sums", {}, "no task 'arithmetic:sums'; there is arithmetic:addition"),
        ("addition", {"digit": 2}, "no option 'digit'.*did you mean 'digits'"),
        ("addition", {"digits": 0}, "digits of arithmetic is 0; it must be a whole number 1 to 9"),
        ("addition", {"terms": 2.0}, "terms of arithmetic is 2.0"),
    ],
)
def test_wrong_settings_are_named(name, options, message):
    with pytest.raises(DataError, match=message):
        generate(name, options)
