import asyncio
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import RewardError
from gspo.rewards.base import RewardSet, Unscored, WeightedReward, gold_answers
from gspo.types import Prompt

TEXT = Prompt("a", "2+2=", (1, 2), columns={"answer": "4", "level": 1})
CHAT = Prompt("b", ({"role": "user", "content": "3+3="},), (3,), columns={"answer": "6"})


def score(*functions, prompts=(TEXT, CHAT), texts=("four", "six"), weights=None):
    weights = weights or [1.0] * len(functions)
    rewards = [WeightedReward(f"f{i}", f, w) for i, (f, w) in enumerate(zip(functions, weights, strict=True))]
    return RewardSet(rewards).score(prompts, texts, [[7, 8], [9]])


def values(scores):
    return [s.value for s in scores]


class TestCall:
    def test_arguments_are_as_the_data_had_them(self):
        seen = {}

        def reward(prompts, completions, completion_ids, **columns):
            seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            return [0.0, 0.0]

        score(reward)
        assert seen["prompts"] == ["2+2=", [{"role": "user", "content": "3+3="}]]
        assert seen["completions"] == ["four", [{"role": "assistant", "content": "six"}]]
        assert seen["completion_ids"] == [[7, 8], [9]]
        assert seen["answer"] == ["4", "6"]
        assert seen["level"] == [1, None]

    def test_a_function_gets_only_what_it_names(self):
        assert values(score(lambda completions, answer: [float(len(a)) for a in answer])) == [1.0, 1.0]

    def test_options_are_keyword_arguments(self):
        def reward(completions, factor):
            return [factor] * len(completions)

        reward_set = RewardSet([WeightedReward("r", reward, 2.0, {"factor": 3.0})])
        assert values(reward_set.score([TEXT], ["x"], [[1]])) == [6.0]

    def test_an_option_without_effect_is_refused(self):
        reward_set = RewardSet([WeightedReward("r", lambda completions, factor=1: [1.0], 1.0, {"facto": 3.0})])
        with pytest.raises(RewardError, match="no argument 'facto'; did you mean 'factor'"):
            reward_set.score([TEXT], ["x"], [[1]])

    def test_a_missing_column_is_named_with_the_nearest(self):
        with pytest.raises(RewardError, match=r"'f0' needs 'answers'.*did you mean 'answer'"):
            score(lambda completions, answers: [0.0, 0.0])

    def test_no_responses(self):
        assert RewardSet([WeightedReward("r", lambda completions: [])]).score([], [], []) == []


class TestSum:
    def test_weights(self):
        scores = score(lambda completions: [1.0, 2.0], lambda completions: [10.0, 20.0], weights=[0.5, -1.0])
        assert values(scores) == [0.5 * 1 - 10, 0.5 * 2 - 20]
        assert scores[0].components == {"f0": 1.0, "f1": 10.0}

    def test_none_does_not_apply(self):
        scores = score(lambda completions: [1.0, None], lambda completions: [None, None])
        assert values(scores) == [1.0, None]
        assert scores[0].failure is None
        assert scores[1].failure == "no reward applied"

    @pytest.mark.parametrize("bad", [float("nan"), Unscored("returned nan")])
    def test_a_row_that_could_not_be_scored_has_no_value_at_all(self, bad):
        scores = score(lambda completions: [1.0, 1.0], lambda completions: [bad, 1.0])
        assert values(scores) == [None, 2.0]
        assert scores[0].failure == "f1: returned nan"
        assert scores[0].components == {"f0": 1.0, "f1": None}

    @pytest.mark.parametrize(
        "result",
        [(1, 0), [True, False], np.array([1.0, 0.0]), torch.tensor([1.0, 0.0]), [np.float32(1), torch.tensor(0)]],
    )
    def test_numbers_of_any_kind(self, result):
        assert values(score(lambda completions: result)) == [1.0, 0.0]

    @given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=2, max_size=5))
    def test_the_sum_is_over_what_applies(self, components):
        functions = [lambda completions, v=v: [v, 0.0] for v in components]
        applied = [v for v in components if v is not None]
        value = score(*functions)[0].value
        assert value == (pytest.approx(sum(applied)) if applied else None)


class TestRefusals:
    def test_wrong_number_of_values(self):
        with pytest.raises(RewardError, match="reward 'f0' returned 3 values for 2 completions"):
            score(lambda completions: [1.0] * 3)

    @pytest.mark.parametrize("result", [None, 1.0, "ab", {"a": 1, "b": 2}])
    def test_not_a_list(self, result):
        with pytest.raises(RewardError, match=f"'f0' returned {type(result).__name__} instead of a list of 2"):
            score(lambda completions: result)

    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), "1", [1.0], 1j])
    def test_not_a_finite_number(self, value):
        with pytest.raises(RewardError, match=r"'f0' returned .* for completion 1; a finite number or None"):
            score(lambda completions: [0.0, value])

    def test_an_exception_is_named_and_chained(self):
        def reward(completions):
            raise KeyError("gold")

        with pytest.raises(RewardError, match="reward 'f0' raised KeyError: 'gold'") as caught:
            score(reward)
        assert isinstance(caught.value.__cause__, KeyError)

    def test_names_must_differ(self):
        with pytest.raises(RewardError, match="named twice"):
            RewardSet([WeightedReward("r", len), WeightedReward("r", len)])

    def test_at_least_one_function(self):
        with pytest.raises(RewardError, match="no reward function"):
            RewardSet([])


class TestAsync:
    def test_async_functions_run_at_the_same_time(self):
        both = []

        async def reward(completions):
            both.append(1)
            for _ in range(1000):
                if len(both) == 2:
                    return [1.0, 2.0]
                await asyncio.sleep(0.001)
            return [0.0, 0.0]

        async def other(completions):
            return await reward(completions)

        assert values(score(reward, other)) == [2.0, 4.0]

    def test_inside_a_running_loop_and_in_a_thread(self):
        async def reward(completions):
            await asyncio.sleep(0)
            return [1.0, 2.0]

        async def main():
            return values(score(reward))

        assert asyncio.run(main()) == [1.0, 2.0]
        results = []
        thread = threading.Thread(target=lambda: results.append(values(score(reward))))
        thread.start()
        thread.join(10)
        assert results == [[1.0, 2.0]]

    def test_an_exception_is_named(self):
        async def reward(completions):
            raise ValueError("late")

        with pytest.raises(RewardError, match="reward 'f0' raised ValueError: late"):
            score(reward)


def test_gold_answers_of_verl_files():
    models = [{"style": "rule", "ground_truth": "4"}, {"style": "rule", "ground_truth": "6"}]
    assert gold_answers({"reward_model": models}, "answer") == ["4", "6"]
    with pytest.raises(RewardError, match="no column 'answer' with gold answers; did you mean 'answers'"):
        gold_answers({"answers": []}, "answer")
