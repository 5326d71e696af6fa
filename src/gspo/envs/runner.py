"""From prompts to scored groups: sample, decode, score."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from gspo.errors import EngineError
from gspo.rewards.base import RewardSet
from gspo.rollout.base import Engine, GenerationRequest, OnFinished, SamplingParams
from gspo.seeding import derive_seed
from gspo.types import Completion, Prompt, Rollout, RolloutGroup, Score, StopReason

#: The score of a response that the engine did not bring to its end.
_UNFINISHED = Score(None, failure="the engine broke it off")
#: Ids of one response to its text, special tokens left out.
Decode = Callable[[Sequence[int]], str]


def make_requests(
    prompts: Sequence[Prompt], *, seed: int, step: int, group_size: int, purpose: str = "sample", first_draw: int = 0
) -> list[GenerationRequest]:
    """One request per prompt; the seed of a response is named by run, purpose, step, prompt, draw and sample.

    A prompt that is drawn twice in a step (``first_draw`` tells later rounds apart) gets other seeds the second time.
    """
    draws: Counter[str] = Counter()
    requests = []
    for prompt in prompts:
        draw = first_draw + draws[prompt.id]
        draws[prompt.id] += 1
        seeds = tuple(derive_seed(seed, purpose, step, prompt.id, draw, sample) for sample in range(group_size))
        requests.append(GenerationRequest(prompt.id, prompt.token_ids, seeds))
    return requests


def collect(
    prompts: Sequence[Prompt],
    engine: Engine,
    params: SamplingParams,
    reward_set: RewardSet,
    *,
    step: int,
    seed: int,
    group_size: int,
    decode: Decode,
    purpose: str = "sample",
    first_draw: int = 0,
    on_finished: OnFinished | None = None,
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """The scored groups of the prompts, in their order, and the seconds of ``"rollout"`` and ``"reward"``.

    Args:
        decode: response ids to text, special tokens left out.
        purpose: names the random streams, e.g. ``"sample"`` or ``"eval"``.
        first_draw: how often these prompts were drawn before in this step.

    Raises:
        EngineError: the engine failed or gave another number of completions.
        RewardError: a reward function failed.
    """
    start = time.perf_counter()
    requests = make_requests(
        prompts, seed=seed, step=step, group_size=group_size, purpose=purpose, first_draw=first_draw
    )
    completions = engine.generate(requests, params, on_finished)
    _check_counts(requests, completions)
    sampled = time.perf_counter()
    texts = [[_text(completion, decode) for completion in group] for group in completions]
    scores = _score(prompts, texts, completions, reward_set, shaping=purpose == "sample")
    groups = [
        RolloutGroup(prompt, tuple(map(_rollout, group, group_texts, group_scores)))
        for prompt, group, group_texts, group_scores in zip(prompts, completions, texts, scores, strict=True)
    ]
    return groups, {"rollout": sampled - start, "reward": time.perf_counter() - sampled}


def _check_counts(requests: Sequence[GenerationRequest], completions: Sequence[Sequence[Completion]]) -> None:
    wanted = [request.num_samples for request in requests]
    given = [len(group) for group in completions]
    if wanted != given:
        raise EngineError(f"the engine gave {given} completions for requests of {wanted}")


def _text(completion: Completion, decode: Decode) -> str:
    ids = completion.token_ids.tolist()
    return decode(ids) if ids else ""


def _score(
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[str]],
    completions: Sequence[Sequence[Completion]],
    reward_set: RewardSet,
    shaping: bool,
) -> list[list[Score]]:
    """All responses in one call of the reward, then cut into groups again. An aborted one is no answer to judge."""
    answers = [
        (prompt, text, completion.token_ids.tolist(), completion.stop_reason)
        for prompt, group_texts, group in zip(prompts, texts, completions, strict=True)
        for text, completion in zip(group_texts, group, strict=True)
        if completion.stop_reason is not StopReason.ABORTED
    ]
    found = reward_set.score(
        [answer[0] for answer in answers],
        [answer[1] for answer in answers],
        [answer[2] for answer in answers],
        [answer[3] for answer in answers],
        shaping=shaping,
    )
    scores = iter(found)
    return [
        [_UNFINISHED if completion.stop_reason is StopReason.ABORTED else next(scores) for completion in group]
        for group in completions
    ]


def _rollout(completion: Completion, text: str, score: Score) -> Rollout:
    return Rollout(
        token_ids=completion.token_ids,
        response_mask=torch.ones_like(completion.token_ids, dtype=torch.bool),
        rollout_logprobs=completion.logprobs,
        text=text,
        stop_reason=completion.stop_reason,
        policy_version=completion.policy_version,
        score=score,
        routing=completion.routing,
    )
