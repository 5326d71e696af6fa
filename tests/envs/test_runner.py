from dataclasses import replace

import pytest
import torch

from gspo.envs.runner import collect, make_requests
from gspo.errors import EngineError
from gspo.rewards.base import RewardSet, WeightedReward
from gspo.rollout.base import SamplingParams
from gspo.seeding import derive_seed
from gspo.types import Completion, Prompt, StopReason

PROMPTS = [Prompt("a", "A", (1, 2)), Prompt("b", "B", (3,)), Prompt("a", "A", (1, 2))]


class CountingEngine:
    """Response i of a request has i tokens, each of them the request's index + 5."""

    exact = True
    policy_version = 7

    def __init__(self, short=0):
        self.short = short
        self.calls = []

    def generate(self, requests, params, on_finished=None):
        self.calls.append((list(requests), params))
        return [[self.complete(r, n) for n in range(q.num_samples - self.short)] for r, q in enumerate(requests)]

    def complete(self, request, length):
        reason = StopReason.EOS if length else StopReason.EMPTY
        ids = torch.full((length,), request + 5, dtype=torch.int64)
        return Completion(ids, torch.full((length,), -0.5), reason, self.policy_version)


def length_reward(calls):
    def reward(completions, completion_ids):
        calls.append(list(completions))
        return [float(len(ids)) for ids in completion_ids]

    return RewardSet([WeightedReward("length", reward)])


def decode(ids):
    return "".join(chr(60 + i) for i in ids)


def run(engine, reward_set, **more):
    settings = {"step": 3, "seed": 11, "group_size": 3, "decode": decode, **more}
    return collect(PROMPTS, engine, SamplingParams(max_new_tokens=4), reward_set, **settings)


def test_groups_in_order_scored_in_one_call():
    calls = []
    groups, seconds = run(CountingEngine(), length_reward(calls))
    assert [group.prompt.id for group in groups] == ["a", "b", "a"]
    assert [[r.score.value for r in group.rollouts] for group in groups] == [[0.0, 1.0, 2.0]] * 3
    assert [[r.text for r in group.rollouts] for group in groups] == [["", c, c * 2] for c in "ABC"]
    assert calls == [["", "A", "AA", "", "B", "BB", "", "C", "CC"]]
    assert set(seconds) == {"rollout", "reward"}
    assert all(value >= 0 for value in seconds.values())


def test_a_rollout_carries_what_the_engine_did():
    groups, _ = run(CountingEngine(), length_reward([]))
    empty, _, two = groups[1].rollouts
    assert empty.stop_reason is StopReason.EMPTY
    assert empty.token_ids.numel() == empty.response_mask.numel() == 0
    assert two.token_ids.tolist() == [6, 6]
    assert two.response_mask.tolist() == [True, True]
    assert two.rollout_logprobs.tolist() == [-0.5, -0.5]
    assert two.policy_version == 7


def test_seeds_are_named_and_differ_between_two_draws_of_a_prompt():
    engine = CountingEngine()
    run(engine, length_reward([]))
    requests, params = engine.calls[0]
    assert requests[0].seeds == tuple(derive_seed(11, "sample", 3, "a", 0, i) for i in range(3))
    assert requests[2].seeds == tuple(derive_seed(11, "sample", 3, "a", 1, i) for i in range(3))
    assert requests[0].token_ids == (1, 2)
    assert params.max_new_tokens == 4
    every = [seed for request in requests for seed in request.seeds]
    assert len(set(every)) == 9


def test_a_prompts_seeds_do_not_depend_on_its_neighbours():
    alone = make_requests(PROMPTS[1:2], seed=11, step=3, group_size=3)[0]
    assert alone == make_requests(PROMPTS, seed=11, step=3, group_size=3)[1]
    later = make_requests(PROMPTS[1:2], seed=11, step=3, group_size=3, first_draw=1)[0]
    assert set(later.seeds).isdisjoint(alone.seeds)


def test_an_engine_that_loses_a_completion_is_found():
    with pytest.raises(EngineError, match=r"gave \[2, 2, 2\] completions for requests of \[3, 3, 3\]"):
        run(CountingEngine(short=1), length_reward([]))


def test_a_response_that_the_engine_broke_off_is_not_judged_and_has_no_score():
    class Breaking(CountingEngine):
        def complete(self, request, length):
            done = super().complete(request, length)
            aborted = request == 1 and length == 2
            return replace(done, stop_reason=StopReason.ABORTED) if aborted else done

    calls = []
    groups, _ = run(Breaking(), length_reward(calls))
    assert calls == [["", "A", "AA", "", "B", "", "C", "CC"]]
    assert [[r.score.value for r in group.rollouts] for group in groups] == [
        [0.0, 1.0, 2.0],
        [0.0, 1.0, None],
        [0.0, 1.0, 2.0],
    ]
    broken = groups[1].rollouts[2]
    assert broken.score.failure == "the engine broke it off"
    assert broken.text == "BB"
    assert broken.stop_reason is StopReason.ABORTED
