"""The embedded engine against the trainer, against a naive loop, and against itself in other company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.errors import DataError, NumericalError
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.logprobs import sequence_logprobs
from gspo.rollout.base import GenerationRequest, SamplingParams, pad_completions
from gspo.rollout.embedded import EmbeddedEngine, engine
from gspo.types import Completion, Sequences, StopReason
from tests.policy.models import small_policy

KINDS = ["qwen3", "qwen3_moe"]
STOPS = frozenset(range(3, 13))  # a tenth of the vocabulary: responses of many lengths


def some_requests(number: int = 5, samples: int = 4) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"p{i}", tuple(range(20 + i, 21 + 4 * i)), tuple(100 * i + s for s in range(samples)))
        for i in range(number)
    ]


def ids(results: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in row] for row in results]


def trainer_logprobs(
    policy: CausalPolicy, requests: Sequence[GenerationRequest], results: list[list[Completion]], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs (N, T) that the trainer gives, and those that the engine returned."""
    padded = pad_completions([completion for row in results for completion in row])
    index = torch.tensor([i for i, row in enumerate(results) for _ in row])
    prompts = tuple(torch.tensor(request.token_ids) for request in requests)
    sequences = Sequences(prompts, index, padded.token_ids, padded.lengths)
    with torch.no_grad():
        return sequence_logprobs(policy, sequences, temperature).logprobs, padded.logprobs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_logprobs_are_the_trainers(kind: str, temperature: float) -> None:
    policy, requests = small_policy(kind), some_requests()
    results = EmbeddedEngine(policy, max_slots=6).generate(requests, SamplingParams(20, temperature, STOPS))
    ours, engines = trainer_logprobs(policy, requests, results, temperature)
    torch.testing.assert_close(engines, ours, atol=1e-5, rtol=0)
    lengths = [len(c.token_ids) for row in results for c in row]
    assert len(set(lengths)) > 5  # the test is about rows that come and go


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_a_naive_loop_of_whole_forwards(kind: str) -> None:
    policy, requests = small_policy(kind), some_requests(3, 1)
    params = SamplingParams(12, 0.0, STOPS)
    results = EmbeddedEngine(policy).generate(requests, params)
    for request, (completion,) in zip(requests, results, strict=True):
        tokens = list(request.token_ids)
        for _ in range(12):
            with torch.no_grad():
                tokens.append(int(policy.model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in STOPS:
                break
        assert completion.token_ids.tolist() == tokens[len(request.token_ids) :]
    ours, engines = trainer_logprobs(policy, requests, results, 1.0)  # greedy reports temperature 1
    torch.testing.assert_close(engines, ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_depends_on_its_seed_and_not_on_its_company(kind: str) -> None:
    policy, requests = small_policy(kind), some_requests()
    params = SamplingParams(15, 1.0, STOPS)
    together = EmbeddedEngine(policy, max_slots=64).generate(requests, params)
    for slots in (1, 2, 3, 7):
        assert ids(EmbeddedEngine(policy, max_slots=slots).generate(requests, params)) == ids(together)
    for request, row in zip(requests, together, strict=True):
        for sample, completion in enumerate(row):
            alone = GenerationRequest(request.prompt_id, request.token_ids, (request.seeds[sample],))
            assert ids(EmbeddedEngine(policy).generate([alone], params)) == [[completion.token_ids.tolist()]]
    backwards = EmbeddedEngine(policy, max_slots=3).generate(requests[::-1], params)
    assert ids(backwards) == ids(together)[::-1]


def test_the_same_call_twice_is_bit_for_bit_the_same() -> None:
    policy, requests = small_policy(), some_requests()
    params = SamplingParams(15, 1.0, STOPS)
    one, two = (EmbeddedEngine(policy, max_slots=5).generate(requests, params) for _ in range(2))
    for a, b in zip((c for row in one for c in row), (c for row in two for c in row), strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.logprobs, b.logprobs)


def test_samples_follow_the_policys_distribution() -> None:
    """4,000 one-token responses against the softmax of the plain model."""
    policy, number = small_policy(), 4000
    prompt = (30, 31, 32)
    request = GenerationRequest("p", prompt, tuple(range(number)))
    (row,) = EmbeddedEngine(policy, max_slots=1000).generate([request], SamplingParams(1, 0.8))
    counts = torch.bincount(torch.cat([c.token_ids for c in row]), minlength=100).double()
    with torch.no_grad():
        wanted = (policy.model(torch.tensor([prompt])).logits[0, -1].double() / 0.8).softmax(-1) * number
    used = wanted > 5
    statistic = float(((counts - wanted)[used] ** 2 / wanted[used]).sum())
    freedom = int(used.sum())
    assert statistic < freedom + 3.5 * (2 * freedom) ** 0.5  # mean + 3.5 standard deviations of chi-square


def test_weights_changed_in_place_are_used_by_the_next_call() -> None:
    policy, requests = small_policy(), some_requests()
    sampler = EmbeddedEngine(policy)
    params = SamplingParams(10)
    before = sampler.generate(requests, params)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    sampler.policy_version = 3
    after = sampler.generate(requests, params)
    assert ids(after) != ids(before)
    ours, engines = trainer_logprobs(policy, requests, after, 1.0)
    torch.testing.assert_close(engines, ours, atol=1e-5, rtol=0)
    assert {c.policy_version for row in before for c in row} == {0}
    assert {c.policy_version for row in after for c in row} == {3}
    assert sampler.exact


def test_a_group_computes_its_prompt_once_and_every_response_token_once() -> None:
    policy = small_policy()
    seen: list[tuple[int, ...]] = []
    hook = policy.base.embed_tokens.register_forward_hook(lambda _, args, out: seen.append(tuple(args[0].shape)))
    request = GenerationRequest("p", tuple(range(10, 40)), tuple(range(8)))
    EmbeddedEngine(policy, max_slots=3).generate([request], SamplingParams(5))
    hook.remove()
    # The prompt of 30 once although 8 samples pass through 3 slots; the fifth token is never fed back.
    assert [shape for shape in seen if shape[0] == 1 and shape[1] > 1] == [(1, 30)]
    assert sum(rows * width for rows, width in seen) == 30 + 8 * 4


def test_cost_follows_the_rows_that_still_run() -> None:
    """Slots stay full while requests wait; afterwards the batch shrinks. No step computes a finished row."""
    policy = small_policy()
    rows: list[int] = []
    hook = policy.base.embed_tokens.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[0]))
    requests = some_requests(6, 4)
    results = EmbeddedEngine(policy, max_slots=4).generate(requests, SamplingParams(20, 1.0, STOPS))
    hook.remove()
    fed_back = sum(len(c.token_ids) - 1 for row in results for c in row)
    steps = rows[1:]  # without the prefill
    assert sum(steps) == fed_back
    last_start = max(i for i, n in enumerate(steps) if n == 4)
    assert sum(steps[:last_start]) >= 0.9 * 4 * last_start


def test_slots_stay_busy_while_samples_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 responses of 8 to 512 tokens in 16 slots, the lengths of w6: a long one holds nobody up."""
    lengths = torch.tensor([round(8 * 64 ** ((i * 37 % 192) / 191)) for i in range(192)])
    # For random numbers a mark at the last token of the seed's response, for sampling the stop id there.
    monkeypatch.setattr(engine, "uniforms", lambda seeds, places: (places + 1 == lengths[seeds]).double())
    monkeypatch.setattr(engine, "choose", lambda logits, _, mark: (torch.where(mark > 0, 3, 20), logits[:, 0].float()))
    policy = small_policy(hidden_size=16, intermediate_size=16, num_hidden_layers=1, max_position_embeddings=1024)
    requests = [GenerationRequest(str(i), (20, 21 + i % 50), tuple(range(4 * i, 4 * i + 4))) for i in range(48)]
    sampler = EmbeddedEngine(policy, max_slots=16)
    assert sampler.slot_use.share == 1.0
    results = sampler.generate(requests, SamplingParams(512, 1.0, STOPS))
    assert [len(c.token_ids) for row in results for c in row] == lengths.tolist()
    assert (int(lengths.min()), int(lengths.max())) == (8, 512)
    assert sampler.slot_use.share >= 0.9
    # What is counted is real: once the last sample has a slot, at most 16 rows of at most 511 steps are left.
    fed_back = int((lengths - 1).sum())
    assert fed_back - 16 * 511 <= sampler.slot_use.busy <= fed_back


def test_stop_reasons() -> None:
    policy = small_policy()
    request = GenerationRequest("p", (20, 21), tuple(range(40)))
    (row,) = EmbeddedEngine(policy).generate([request], SamplingParams(6, 1.0, STOPS))
    reasons = {c.stop_reason for c in row}
    assert reasons == {StopReason.EOS, StopReason.LENGTH}
    for completion in row:
        tokens = completion.token_ids.tolist()
        assert all(token not in STOPS for token in tokens[:-1])
        assert (completion.stop_reason is StopReason.EOS) == (tokens[-1] in STOPS)
        assert completion.stop_reason is StopReason.EOS or len(tokens) == 6
    ends = {c.token_ids[-1].item() for c in row if c.stop_reason is StopReason.EOS}
    assert len(ends) > 1  # several stop ids, each of them stops


def test_stop_strings_end_a_response_and_stay_in_it() -> None:
    policy = small_policy()
    request = GenerationRequest("p", (20, 21), tuple(range(30)))
    params = SamplingParams(12, 1.0, frozenset(), ("a", "Zq", "9"))
    (free,) = EmbeddedEngine(policy).generate([request], SamplingParams(12))
    (row,) = EmbeddedEngine(policy, max_slots=7).generate([request], params)
    assert {c.stop_reason for c in row} == {StopReason.STOP_STRING, StopReason.LENGTH}
    for completion, unbounded in zip(row, free, strict=True):
        whole = unbounded.token_ids.tolist()
        texts = [policy.tokenizer.decode(whole[:i]) for i in range(13)]
        found = [i for i, text in enumerate(texts) if any(s in text for s in params.stop_strings)]
        assert completion.token_ids.tolist() == whole[: found[0] if found else 12]
        assert (completion.stop_reason is StopReason.STOP_STRING) == bool(found)


def test_on_finished_hears_of_every_completion_once() -> None:
    policy, requests = small_policy(), some_requests()
    heard: dict[tuple[int, int], Completion] = {}

    def listen(request: int, sample: int, completion: Completion) -> None:
        assert (request, sample) not in heard
        heard[request, sample] = completion

    results = EmbeddedEngine(policy, max_slots=3).generate(requests, SamplingParams(8, 1.0, STOPS), listen)
    assert heard == {(i, j): c for i, row in enumerate(results) for j, c in enumerate(row)}


def test_empty_calls() -> None:
    sampler = EmbeddedEngine(small_policy())
    assert sampler.generate([], SamplingParams(4)) == []
    assert sampler.generate([GenerationRequest("p", (5,), ())], SamplingParams(4)) == [[]]
    with pytest.raises(ValueError, match="max_slots is 0"):
        EmbeddedEngine(sampler.policy, max_slots=0)


def test_prompts_that_cannot_be_continued_are_refused_before_sampling() -> None:
    sampler = EmbeddedEngine(small_policy(max_position_embeddings=32))
    good = GenerationRequest("good", (5,), (1,))
    with pytest.raises(DataError, match=r"'long' has 30 tokens; .* needs 33 positions, and the model's context is 32"):
        sampler.generate([good, GenerationRequest("long", (5,) * 30, (1,))], SamplingParams(3))
    with pytest.raises(DataError, match="'empty' has no tokens"):
        sampler.generate([GenerationRequest("empty", (), (1,))], SamplingParams(3))
    # Exactly the context is allowed.
    assert len(sampler.generate([GenerationRequest("fits", (5,) * 29, (1,))], SamplingParams(3))[0][0].token_ids) == 3


def test_logits_that_are_not_finite_are_named() -> None:
    policy = small_policy()
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="prompt 'p0', sample 0, response token 0"):
        EmbeddedEngine(policy).generate(some_requests(), SamplingParams(3))


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_restored_and_no_gradient_is_kept(training: bool) -> None:
    policy = small_policy()
    policy.model.train(training)
    results = EmbeddedEngine(policy).generate(some_requests(1), SamplingParams(3))
    assert policy.model.training is training
    assert not results[0][0].logprobs.requires_grad
    assert not results[0][0].logprobs.is_inference()


def test_long_prompts_are_computed_in_several_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, requests = small_policy(), some_requests()
    params = SamplingParams(10, 1.0, STOPS)
    expected = EmbeddedEngine(policy, max_slots=3).generate(requests, params)
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 9)
    assert ids(EmbeddedEngine(policy, max_slots=3).generate(requests, params)) == ids(expected)


def test_the_cache_grows_without_losing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo.rollout.embedded import slots

    policy, requests = small_policy(), some_requests()
    params = SamplingParams(30, 1.0)
    expected = EmbeddedEngine(policy).generate(requests, params)
    monkeypatch.setattr(slots, "GROWTH", 1)
    results: Any = EmbeddedEngine(policy).generate(requests, params)
    assert ids(results) == ids(expected)
