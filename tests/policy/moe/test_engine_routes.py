"""What the embedded engine records while it samples (R3), against what the trainer records of the same tokens."""

from __future__ import annotations

import pytest
import torch

from gspo.errors import ModelError
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.logprobs import sequence_logprobs
from gspo.policy.moe.capture import RouteCapture
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded import EmbeddedEngine
from gspo.types import Completion, Sequences, StopReason

from ..models import small_policy

PARAMS = SamplingParams(max_new_tokens=12, stop_token_ids=frozenset({3, 17, 40}), record_routing=True)


def requests(number: int = 4, samples: int = 3) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"p{i}", tuple(range(5 + i, 9 + 3 * i)), tuple(100 * i + s for s in range(samples)))
        for i in range(number)
    ]


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def sequences_of(asked: list[GenerationRequest], groups: list[list[Completion]]) -> Sequences:
    rows = [(i, c) for i, group in enumerate(groups) for c in group]
    return Sequences(
        tuple(torch.tensor(r.token_ids) for r in asked),
        torch.tensor([i for i, _ in rows]),
        torch.nn.utils.rnn.pad_sequence([c.token_ids for _, c in rows], batch_first=True),
        torch.tensor([len(c.token_ids) for _, c in rows]),
    )


@pytest.mark.parametrize("slots", [2, 5, 64])
def test_routes_are_those_that_the_trainer_finds_for_the_same_tokens(slots: int) -> None:
    policy, asked = small_policy("qwen3_moe"), requests()
    groups = EmbeddedEngine(policy, max_slots=slots).generate(asked, PARAMS)
    lengths = {len(c.token_ids) for group in groups for c in group}
    assert len(lengths) > 2  # slots are freed and used again
    sequences = sequences_of(asked, groups)
    capture = RouteCapture()
    with torch.no_grad():
        sequence_logprobs(policy, sequences, 1.0, capture=capture)
    rows = [c.routing for group in groups for c in group]
    for engine, trainer in zip(rows, capture.routes, strict=True):
        assert engine is not None
        assert engine.dtype == torch.uint8
        assert torch.equal(engine.sort(-1).values, trainer.sort(-1).values)


def test_recording_changes_no_sample() -> None:
    policy = small_policy("qwen3_moe")
    with_routes, without = (
        EmbeddedEngine(policy, max_slots=5).generate(
            requests(), SamplingParams(12, 1.0, PARAMS.stop_token_ids, record_routing=on)
        )
        for on in (True, False)
    )
    for one, other in zip(flat(with_routes), flat(without), strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.logprobs, other.logprobs)
        assert other.routing is None


def test_engine_routes_forced_in_the_trainer_give_the_engines_logprobs() -> None:
    policy, asked = small_policy("qwen3_moe"), requests()
    groups = EmbeddedEngine(policy).generate(asked, PARAMS)
    sequences = sequences_of(asked, groups)
    routes = [c.routing for group in groups for c in group if c.routing is not None]
    replayed = sequence_logprobs(policy, sequences, 1.0, routing=routes).logprobs
    for row, completion in enumerate(flat(groups)):
        torch.testing.assert_close(replayed[row, : len(completion.logprobs)], completion.logprobs, rtol=0, atol=1e-5)


def test_a_response_of_one_token_has_the_routes_of_its_prompt() -> None:
    policy = small_policy("qwen3_moe")
    [[completion]] = EmbeddedEngine(policy).generate(
        [GenerationRequest("p", (5, 6, 7), (1,))], SamplingParams(1, record_routing=True)
    )
    assert completion.routing is not None
    assert completion.routing.shape == (3, 2, 2)


def test_a_dense_model_has_no_routes_to_record() -> None:
    policy: CausalPolicy = small_policy()
    with pytest.raises(ModelError, match="has no experts"):
        EmbeddedEngine(policy).generate(requests(1), PARAMS)


def test_a_completion_refuses_routes_shorter_than_its_response() -> None:
    ids, logprobs = torch.tensor([5, 6, 7]), torch.zeros(3)
    Completion(ids, logprobs, StopReason.EOS, 0, torch.zeros(2, 2, 2, dtype=torch.uint8))
    for shape in ((1, 2, 2), (5, 2)):
        with pytest.raises(ValueError, match="has routes"):
            Completion(ids, logprobs, StopReason.EOS, 0, torch.zeros(shape, dtype=torch.uint8))
