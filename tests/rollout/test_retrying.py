"""Failures of an engine: told by their kind, asked again where that is safe, and what was finished is kept."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import DataError, EngineError, EngineFailure, NumericalError, RunError
from gspo.policy.causal_lm import load_policy
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.retrying import Failure, FailureLog, RetryingEngine, failure_kind
from gspo.rollout.scripted import ScriptedEngine
from gspo.types import Completion, StopReason

from .faulty import FaultyEngine, SeededEngine, failing

PARAMS = SamplingParams(max_new_tokens=5)
REQUESTS = [GenerationRequest("a", (3, 4), (11, 12)), GenerationRequest("b", (5,), (13, 14, 15))]
ALL = [("a", 11), ("a", 12), ("b", 13), ("b", 14), ("b", 15)]


def same(one: Completion, other: Completion) -> bool:
    return (
        torch.equal(one.token_ids, other.token_ids)
        and torch.equal(one.logprobs, other.logprobs)
        and (one.stop_reason, one.policy_version) == (other.stop_reason, other.policy_version)
    )


def all_same(one: list[list[Completion]], other: list[list[Completion]]) -> bool:
    return [len(group) for group in one] == [len(group) for group in other] and all(
        same(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


def retrying(engine: Any, max_retries: int = 2, keep: bool = False) -> tuple[RetryingEngine, FailureLog]:
    log = FailureLog()
    return RetryingEngine(engine, log, max_retries=max_retries, keep=keep), log


# The contract of engines (gspo.rollout.base.Engine), with and without failures.


def embedded() -> EmbeddedEngine:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    return EmbeddedEngine(load_policy(tiny="qwen3", tiny_config=sizes, device="cpu"))


ENGINES = {
    "seeded": SeededEngine,
    "embedded": embedded,
    "scripted": lambda: ScriptedEngine(
        {
            "a": [{"token_ids": [1, 2], "logprobs": [-1.0, -2.0], "stop_reason": "eos"}],
            "b": [{"token_ids": [7], "logprobs": [-0.5], "stop_reason": "eos"}],
        }
    ),
    "retried": lambda: retrying(FaultyEngine((3, failing(EngineFailure.CRASHED)), (1, TimeoutError)))[0],
    "retried in part": lambda: retrying(FaultyEngine((3, failing(EngineFailure.TIMEOUT)), independent=True))[0],
    "in halves": lambda: retrying(FaultyEngine((1, MemoryError)))[0],
    "embedded, retried": lambda: retrying(broken_once(embedded()))[0],
}


def broken_once(engine: EmbeddedEngine) -> EmbeddedEngine:
    generate = engine.generate
    calls = iter(range(9))

    def broken(requests: Any, params: Any, on_finished: Any = None) -> Any:
        done = iter(range(99))
        first = next(calls) == 0

        def finished(*arguments: Any) -> None:
            if first and next(done) == 2:
                raise ConnectionResetError("the other side is gone")
            on_finished(*arguments)

        return generate(requests, params, finished)

    engine.generate = broken  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_keeps_the_contract(name: str) -> None:
    engine = ENGINES[name]()
    engine.policy_version = 4
    finished: dict[tuple[int, int], Completion] = {}

    def once(index: int, sample: int, completion: Completion) -> None:
        assert (index, sample) not in finished
        finished[index, sample] = completion

    groups = engine.generate(REQUESTS, PARAMS, once)
    assert [len(group) for group in groups] == [2, 3]
    assert set(finished) == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}
    for (index, sample), completion in finished.items():
        assert torch.equal(groups[index][sample].token_ids, completion.token_ids)
        assert completion.policy_version == 4
        assert 1 <= len(completion.token_ids) <= PARAMS.max_new_tokens
        assert (completion.stop_reason is StopReason.LENGTH) <= (len(completion.token_ids) == PARAMS.max_new_tokens)
    again = engine.generate(REQUESTS, PARAMS)
    assert all(torch.equal(a.token_ids, b.token_ids) for x, y in zip(groups, again, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip


# Kinds.


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("x", EngineFailure.REJECTED), EngineFailure.REJECTED),
        (EngineError("x"), EngineFailure.OTHER),
        (NumericalError("logits are nan"), EngineFailure.BAD_NUMBERS),
        (MemoryError(), EngineFailure.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), EngineFailure.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), EngineFailure.OUT_OF_MEMORY),
        (TimeoutError(), EngineFailure.TIMEOUT),
        (ConnectionRefusedError(), EngineFailure.CRASHED),
        (BrokenPipeError(), EngineFailure.CRASHED),
        (EOFError(), EngineFailure.CRASHED),
        (BrokenProcessPool(), EngineFailure.CRASHED),
        (RuntimeError("mat1 and mat2 shapes"), None),
        (OSError(28, "No space left on device"), None),
        (DataError("the prompt is too long"), None),
        (RunError("stopped"), None),
    ],
)
def test_failures_are_told_by_their_kind(error: BaseException, kind: EngineFailure | None) -> None:
    assert failure_kind(error) is kind


def test_torch_without_memory_on_this_machine_is_out_of_memory() -> None:
    """Four exabytes of float32 fit nowhere: what torch really raises."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert failure_kind(caught.value) is EngineFailure.OUT_OF_MEMORY


def test_what_is_no_failure_of_the_engine_comes_through_at_once() -> None:
    for error in (RunError("stopped by SIGTERM"), OSError(28, "No space left"), DataError("too long"), KeyError("x")):
        engine = FaultyEngine((1, lambda error=error: error))
        wrapped, log = retrying(engine)
        with pytest.raises(type(error)):
            wrapped.generate(REQUESTS, PARAMS)
        assert (len(engine.calls), log.failures) == (1, [])


# Retries.


@pytest.mark.parametrize("kind", ["timeout", "crashed"])
def test_a_whole_call_is_made_again_so_that_every_bit_is_the_same(kind: str) -> None:
    engine = FaultyEngine((3, failing(EngineFailure(kind), "it hangs")), (0, failing(EngineFailure(kind), "again")))
    wrapped, log = retrying(engine)
    assert all_same(wrapped.generate(REQUESTS, PARAMS), SeededEngine().generate(REQUESTS, PARAMS))
    assert engine.calls == [ALL, ALL, ALL]
    assert log.failures == [
        Failure(EngineFailure(kind), "it hangs", True),
        Failure(EngineFailure(kind), "again", True),
    ]
    assert log.counts == {"failures": 2, "retries": 2}


def test_an_independent_engine_is_asked_for_what_is_missing_only() -> None:
    engine = FaultyEngine((3, failing(EngineFailure.CRASHED)), independent=True)
    wrapped, _ = retrying(engine)
    assert all_same(wrapped.generate(REQUESTS, PARAMS), SeededEngine().generate(REQUESTS, PARAMS))
    assert engine.calls == [ALL, [("b", 14), ("b", 15)]]  # three were finished: a 11, a 12, b 13


def test_out_of_memory_is_asked_for_in_halves_and_quarters() -> None:
    four = [GenerationRequest(name, (1,), (i,)) for i, name in enumerate("abcd")]
    engine = FaultyEngine((0, MemoryError), None, (0, MemoryError))
    wrapped, log = retrying(engine)
    assert all_same(wrapped.generate(four, PARAMS), SeededEngine().generate(four, PARAMS))
    sizes = [len(call) for call in engine.calls]
    assert sizes == [4, 2, 2, 1, 1, 1, 1]  # whole; halves, of which the second fails; quarters
    assert log.counts == {"failures": 2, "retries": 2}


@pytest.mark.parametrize("kind", ["rejected", "bad_numbers", "other"])
def test_what_would_come_out_the_same_is_not_tried_again(kind: str) -> None:
    engine = FaultyEngine((2, failing(EngineFailure(kind), "prompt 'b' has 9 tokens")))
    wrapped, log = retrying(engine)
    with pytest.raises(EngineError, match=rf"failed once \({kind}\): prompt 'b' has 9 tokens") as caught:
        wrapped.generate(REQUESTS, PARAMS)
    assert caught.value.kind is EngineFailure(kind)
    assert (len(engine.calls), log.counts) == (1, {"failures": 1, "retries": 0})


def test_numbers_that_are_not_finite_stay_what_they_are() -> None:
    wrapped, log = retrying(FaultyEngine((0, lambda: NumericalError("the policy's logits are nan"))), keep=True)
    with pytest.raises(NumericalError, match="the policy's logits are nan"):
        wrapped.generate(REQUESTS, PARAMS)
    assert log.failures == [Failure(EngineFailure.BAD_NUMBERS, "the policy's logits are nan", False)]


def test_in_the_end_the_failure_is_raised_with_its_remedy() -> None:
    engine = FaultyEngine(*[(0, failing(EngineFailure.OUT_OF_MEMORY, "no room"))] * 3)
    wrapped, log = retrying(engine)
    with pytest.raises(EngineError, match=r"failed 3 times \(out_of_memory\): no room; lower rollout\.max_slots"):
        wrapped.generate(REQUESTS[:1] * 4, PARAMS)
    assert log.counts == {"failures": 3, "retries": 2}


# What is kept.


def test_kept_are_the_finished_the_begun_and_nothing_else() -> None:
    engine = FaultyEngine((3, failing(EngineFailure.TIMEOUT)), (2, failing(EngineFailure.CRASHED)), partial=True)
    wrapped, log = retrying(engine, max_retries=1, keep=True)
    told: list[tuple[int, int]] = []
    groups = wrapped.generate(REQUESTS, PARAMS, lambda index, sample, completion: told.append((index, sample)))
    whole = SeededEngine().generate(REQUESTS, PARAMS)
    # The first attempt finished three, the second two of these; each had begun the next.
    assert [[c.stop_reason is StopReason.ABORTED for c in group] for group in groups] == [
        [False, False], [False, True, True],
    ]  # fmt: skip
    assert all(same(a, b) for a, b in zip(groups[0], whole[0], strict=True))
    assert same(groups[1][0], whole[1][0])
    begun, never = groups[1][1], groups[1][2]
    half = len(whole[1][1].token_ids) // 2
    assert torch.equal(begun.token_ids, whole[1][1].token_ids[:half])
    assert len(never.token_ids) == 0
    assert sorted(told) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert log.counts == {"failures": 2, "retries": 1}


def test_where_routes_are_recorded_what_is_not_finished_has_routes_of_no_token() -> None:
    class Routed(FaultyEngine):
        def _completion(self, prompt: Any, seed: int, params: Any) -> Completion:
            found = super()._completion(prompt, seed, params)
            routes = torch.zeros(len(prompt) + len(found.token_ids) - 1, 2, 3, dtype=torch.uint8)
            return replace(found, routing=routes)

    engine = Routed((3, failing(EngineFailure.TIMEOUT)), partial=True)
    groups = retrying(engine, max_retries=0, keep=True)[0].generate(REQUESTS, PARAMS)
    for completion in groups[1][1:]:
        assert completion.routing is not None
        assert (tuple(completion.routing.shape), len(completion.token_ids)) == ((0, 2, 3), 0)


def test_without_a_single_finished_response_there_is_nothing_to_keep() -> None:
    wrapped, _ = retrying(FaultyEngine((0, TimeoutError), (0, TimeoutError)), max_retries=1, keep=True)
    with pytest.raises(EngineError, match=r"failed 2 times \(timeout\)"):
        wrapped.generate(REQUESTS, PARAMS)


def test_a_rejected_prompt_is_left_out_and_the_others_are_sampled() -> None:
    script = {"a": [{"token_ids": [1], "logprobs": [-1.0]}]}
    wrapped, log = retrying(ScriptedEngine(script), keep=True)
    groups = wrapped.generate(REQUESTS, PARAMS)
    assert [c.token_ids.tolist() for c in groups[0]] == [[1], [1]]
    assert [c.stop_reason for c in groups[1]] == [StopReason.ABORTED] * 3
    assert [(f.kind, "'b'" in f.message) for f in log.failures] == [(EngineFailure.REJECTED, True)]
    with pytest.raises(EngineError, match="'b'"):
        retrying(ScriptedEngine(script))[0].generate(REQUESTS, PARAMS)


def test_an_engine_that_gives_another_number_of_responses_is_not_believed() -> None:
    class Short(SeededEngine):
        def generate(self, *arguments: Any) -> list[list[Completion]]:
            return super().generate(*arguments)[:-1]

    with pytest.raises(EngineError, match=r"gave \[2\] completions for requests of \[2, 3\]"):
        retrying(Short())[0].generate(REQUESTS, PARAMS)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    faults=st.lists(
        st.none() | st.tuples(st.integers(0, 8), st.sampled_from([TimeoutError, MemoryError, EOFError])), max_size=3
    ),
    independent=st.booleans(),
)
def test_whatever_fails_up_to_the_limit_the_same_comes_out(sizes: Any, faults: Any, independent: bool) -> None:
    seeds = iter(range(100))
    asked = [GenerationRequest(str(i), (i,), tuple(next(seeds) for _ in range(n))) for i, n in enumerate(sizes)]
    wrapped, log = retrying(FaultyEngine(*faults, independent=independent), max_retries=3)
    told: list[tuple[int, int]] = []
    found = wrapped.generate(asked, PARAMS, lambda index, sample, completion: told.append((index, sample)))
    assert all_same(found, SeededEngine().generate(asked, PARAMS))
    assert sorted(told) == [(i, j) for i, n in enumerate(sizes) for j in range(n)]
    assert log.counts["failures"] == log.counts["retries"] <= len(faults)
