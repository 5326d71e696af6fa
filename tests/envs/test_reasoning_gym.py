import pytest

from gspo.envs import reasoning_gym
from gspo.errors import DataError, InputError

pytest.importorskip("reasoning_gym")
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def rows(seed=0, split="train", num=60, options=SMALL):
    return reasoning_gym.generate("chain_sum", options, seed=seed, split=split, num=num)


def test_train_and_eval_share_no_question_whatever_the_seeds():
    train = {row["prompt"] for seed in (0, 1) for row in rows(seed)}
    held_out = {row["prompt"] for seed in (0, 1) for row in rows(seed, "eval")}
    assert train.isdisjoint(held_out)


def test_neighbouring_seeds_are_other_problems():
    assert len({r["prompt"] for r in rows(0)} & {r["prompt"] for r in rows(1)}) < 30


def test_rows_are_stable_and_distinct():
    made = rows(seed=5)
    assert made == rows(seed=5)
    assert len({row["prompt"] for row in made}) == len({row["id"] for row in made}) == 60


def test_the_gold_answer_scores_1_and_others_less():
    for row in rows(num=10):
        assert reasoning_gym.score(row["answer"], *row["task_args"]) == 1.0
        assert reasoning_gym.score(str(int(row["answer"]) + 1), *row["task_args"]) < 1.0
        assert reasoning_gym.score(f"<think>hm</think><answer> {row['answer']}</answer>", *row["task_args"]) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 12\n", "12"),
        ("<think>11</think>12", "12"),
        ("so <answer>1</answer> no <answer>2</answer>!", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<think><answer>3</answer>", ""),
        ("<answer>open", "<answer>open"),
    ],
)
def test_extraction(text, answer):
    assert reasoning_gym.extract_answer(text) == answer


def test_wrong_names_and_options():
    with pytest.raises(DataError, match="no task 'chain_sums'; the nearest are chain_sum"):
        reasoning_gym.generate("chain_sums")
    with pytest.raises(DataError, match=r"no option 'max_term' .*did you mean 'max_terms'"):
        rows(options={"max_term": 2})
    with pytest.raises(DataError, match=r"refuses the options .*max_terms must be >= min_terms"):
        rows(options={"min_terms": 5, "max_terms": 2})


def test_without_the_extra(monkeypatch):
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(InputError, match=r"pip install 'gspo\[tasks\]'"):
        rows()
