import pytest

from gspo.envs.tasks import make_task
from gspo.errors import DataError
from gspo.rewards.builtin import build_rewards
from gspo.types import Prompt


@pytest.mark.parametrize("name", ["arithmetic:addition", "reasoning_gym:chain_sum"])
def test_rows_and_scores(name):
    task = make_task(name, num=4, split="eval")
    assert len(task.rows) == 4
    for row in task.rows:
        assert {"id", "task", "prompt", "answer", "task_args"} <= set(row)
        assert task.score(row.get("response", row["answer"]), row) == 1.0
        assert task.score("", row) < 1.0


def test_the_scorer_runs_in_the_verifier_processes():
    task = make_task("reasoning_gym:chain_sum", num=3)
    prompts = [Prompt(row["id"], row["prompt"], (1,), task.name, dict(row)) for row in task.rows]
    with build_rewards([], num_workers=1, timeout_s=20, task=task) as rewards:
        scores = rewards.score(prompts, [row["answer"] for row in task.rows], [[1]] * 3)
    assert [score.value for score in scores] == [1.0] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("addition", "there is no task 'addition'"),
        ("arithmetics:addition", "did you mean 'arithmetic:addition'"),
        ("reasoning_gym:", "there is no task 'reasoning_gym:'"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(DataError, match=message):
        make_task(name)
