"""The journal: what was sampled and judged comes back bit for bit, and nothing damaged does."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import EngineFailure, RunError
from gspo.rewards.base import RewardSet, Unscored, WeightedReward
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.retrying import Failure, FailureLog, RetryingEngine
from gspo.train.journal import (
    Journal,
    JournaledEngine,
    JournaledRewards,
    decode_completion,
    decode_score,
    encode_completion,
    encode_score,
    generation_key,
    read_journal,
)
from gspo.types import Completion, Prompt, Score, StopReason

from ..rollout.faulty import FaultyEngine, SeededEngine, failing

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7, stop_token_ids=frozenset({2, 3}))


class CountingEngine:
    """Samples what the seed says, and counts how often it was asked."""

    exact = True

    def __init__(self) -> None:
        self.policy_version = 0
        self.calls = 0

    def generate(self, requests: Any, params: Any, on_finished: Any = None) -> list[list[Completion]]:
        self.calls += 1
        groups = [[self._completion(seed) for seed in request.seeds] for request in requests]
        for index, group in enumerate(groups):
            for sample, completion in enumerate(group):
                if on_finished is not None:
                    on_finished(index, sample, completion)
        return groups

    def _completion(self, seed: int) -> Completion:
        ids = torch.arange(seed % 5)
        logprobs = -ids.float() / 3
        return Completion(ids, logprobs, StopReason.EOS if len(ids) else StopReason.EMPTY, self.policy_version)


def requests(*seeds: int) -> list[GenerationRequest]:
    return [GenerationRequest("p/0", (5, 6), seeds[:2]), GenerationRequest("p/1", (7,), seeds[2:])]


def same(one: Completion, other: Completion) -> bool:
    bits = [c.logprobs.view(torch.int32) for c in (one, other)]
    return (
        torch.equal(one.token_ids, other.token_ids)
        and torch.equal(*bits)
        and (one.stop_reason, one.policy_version) == (other.stop_reason, other.policy_version)
    )


def engine(folder: Path, inner: CountingEngine, step: int = 1, check: Any = lambda: None) -> JournaledEngine:
    return JournaledEngine(inner, Journal(folder), lambda: step, check)


def test_a_finished_call_is_answered_from_the_journal_by_another_process(tmp_path: Path) -> None:
    inner = CountingEngine()
    first = engine(tmp_path, inner).generate(requests(1, 2, 3, 14), PARAMS)
    finished: list[tuple[int, int]] = []
    again = engine(tmp_path, inner).generate(requests(1, 2, 3, 14), PARAMS, lambda i, j, c: finished.append((i, j)))
    assert inner.calls == 1
    assert all(same(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    assert finished == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    "other",
    [
        (requests(1, 2, 3, 15), PARAMS, 0),
        (requests(1, 2, 3, 4)[:1], PARAMS, 0),
        (requests(1, 2, 3, 4), dataclasses.replace(PARAMS, temperature=0.8), 0),
        (requests(1, 2, 3, 4), dataclasses.replace(PARAMS, stop_strings=("x",)), 0),
        (requests(1, 2, 3, 4), PARAMS, 1),
    ],
    ids=["seed", "prompts", "temperature", "stop strings", "weights"],
)
def test_anything_that_decides_what_is_sampled_makes_another_call(tmp_path: Path, other: Any) -> None:
    asked, params, version = other
    assert generation_key(asked, params, version) != generation_key(requests(1, 2, 3, 4), PARAMS, 0)


def test_a_call_that_is_broken_off_leaves_no_record_and_is_made_again(tmp_path: Path) -> None:
    inner = CountingEngine()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine(tmp_path, inner, check=stop).generate(requests(1, 2, 3, 4), PARAMS)
    engine(tmp_path, inner).generate(requests(1, 2, 3, 4), PARAMS)
    assert inner.calls == 2


def three(*seeds: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"p/{i}", (5, i), (seed, seed + 1)) for i, seed in enumerate(seeds)]


def stopping_after(number: int) -> Any:
    left = iter(range(number))

    def stop() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return stop


def test_a_round_that_breaks_off_keeps_its_finished_calls(tmp_path: Path) -> None:
    inner, again = SeededEngine(), SeededEngine()
    whole = SeededEngine().generate(three(7, 8, 9), PARAMS)
    with pytest.raises(KeyboardInterrupt):  # within the second call of one prompt
        JournaledEngine(inner, Journal(tmp_path), lambda: 1, stopping_after(2), prompts_per_call=1).generate(
            three(7, 8, 9), PARAMS
        )
    assert [len(call) for call in inner.calls] == [2, 2]
    told: list[tuple[int, int]] = []
    journaled = JournaledEngine(again, Journal(tmp_path), lambda: 1, lambda: None, prompts_per_call=1)
    groups = journaled.generate(three(7, 8, 9), PARAMS, lambda i, j, c: told.append((i, j)))
    assert [call[0][0] for call in again.calls] == ["p/1", "p/2"]  # p/0 was finished
    assert all(same(a, b) for one, two in zip(groups, whole, strict=True) for a, b in zip(one, two, strict=True))
    assert sorted(told) == [(i, j) for i in range(3) for j in range(2)]


@pytest.mark.parametrize(("number", "asked"), [(1, [0, 1, 2]), (2, [1, 2]), (3, [1, 2]), (5, [2]), (6, [])])
def test_of_an_independent_engine_every_finished_group_is_kept(tmp_path: Path, number: int, asked: list[int]) -> None:
    """Broken off at response ``number`` of six: groups of two are finished with every second of them."""
    whole = SeededEngine().generate(three(7, 8, 9), PARAMS)
    with pytest.raises(KeyboardInterrupt):
        JournaledEngine(
            SeededEngine(independent=True), Journal(tmp_path), lambda: 1, stopping_after(number - 1)
        ).generate(three(7, 8, 9) + three(100), PARAMS)
    again = SeededEngine(independent=True)
    groups = JournaledEngine(again, Journal(tmp_path), lambda: 1, lambda: None).generate(three(7, 8, 9), PARAMS)
    assert [name for call in again.calls for name, _ in call[::2]] == [f"p/{index}" for index in asked]
    assert all(same(a, b) for one, two in zip(groups, whole, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("independent", [False, True])
def test_failures_are_kept_with_what_came_of_the_call_and_told_again(tmp_path: Path, independent: bool) -> None:
    def journaled(engine: Any) -> tuple[JournaledEngine, list[Failure]]:
        told: list[Failure] = []
        log = FailureLog(told.append)
        retrying = RetryingEngine(engine, log, max_retries=1, keep=False)
        return JournaledEngine(retrying, Journal(tmp_path), lambda: 1, lambda: None, failures=log), told

    engine, told = journaled(FaultyEngine((1, failing(EngineFailure.CRASHED, "gone")), independent=independent))
    first = engine.generate(three(7, 8), PARAMS)
    again, told_again = journaled(
        FaultyEngine((0, failing(EngineFailure.OTHER, "never asked")), independent=independent)
    )
    second = again.generate(three(7, 8), PARAMS)
    assert told == told_again == [Failure(EngineFailure.CRASHED, "gone", True)]
    assert all(same(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_the_version_of_the_weights_is_the_inner_engines(tmp_path: Path) -> None:
    inner = CountingEngine()
    journaled = engine(tmp_path, inner)
    journaled.policy_version = 7
    assert inner.policy_version == journaled.policy_version == 7
    assert journaled.exact


def test_verdicts_are_not_asked_for_again_and_their_timeouts_still_count(tmp_path: Path) -> None:
    class Pool:
        """One for each process; its time-outs are counted."""

        def __init__(self) -> None:
            self.counters: dict[str, int] = {}

        def close(self) -> None: ...

    calls = []

    def rewards() -> JournaledRewards:
        pool = Pool()

        def judge(completions: list[str]) -> list[Any]:
            calls.append(len(completions))
            pool.counters = {"timeouts": 2}
            return [0.5, Unscored("late"), float("nan")]

        return JournaledRewards(RewardSet([WeightedReward("judge", judge)], [pool]), Journal(tmp_path), lambda: 2)

    prompts = [Prompt(f"p/{i}", "?", (1,)) for i in range(3)]
    first_set = rewards()
    first = first_set.score(prompts, ["a", "b", "c"], [[1], [2], [3]])
    second_set = rewards()
    assert second_set.score(prompts, ["a", "b", "c"], [[1], [2], [3]]) == first
    assert first[1] == Score(None, {"judge": None}, "judge: late")
    assert first_set.counters == second_set.counters == {"timeouts": 2}
    assert calls == [3]
    second_set.score(prompts, ["a", "b", "d"], [[1], [2], [4]])
    assert calls == [3, 3]


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**62), max_size=6),
    data=st.data(),
    reason=st.sampled_from(StopReason),
    version=st.integers(0, 2**40),
)
def test_any_completion_comes_back_bit_for_bit(ids: list[int], data: Any, reason: StopReason, version: int) -> None:
    floats = st.floats(width=32)  # infinities and not-a-numbers included
    logprobs = data.draw(st.lists(floats, min_size=len(ids), max_size=len(ids)))
    completion = Completion(
        torch.tensor(ids, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float32), reason, version
    )
    assert same(decode_completion(encode_completion(completion)), completion)


@given(value=st.none() | st.floats(allow_nan=False, allow_infinity=False), failure=st.none() | st.text())
def test_any_score_comes_back(value: float | None, failure: str | None) -> None:
    score = Score(value, {"a": value, "b": None}, failure)
    assert decode_score(encode_score(score)) == score


def test_every_field_of_what_is_kept_is_kept() -> None:
    """A new field of these types must be written down too."""
    routes = torch.arange(12, dtype=torch.int16).reshape(3, 2, 2)
    completion = Completion(torch.tensor([1, 2]), torch.tensor([-0.5, -1.0]), StopReason.LENGTH, 4, routes)
    back = decode_completion(encode_completion(completion))
    for field in dataclasses.fields(Completion):
        one, other = getattr(completion, field.name), getattr(back, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one, other), field.name
        else:
            assert one == other, field.name
    assert {f.name for f in dataclasses.fields(Score)} == {"value", "components", "failure"}


def filled(folder: Path, number: int = 4) -> Path:
    journal = Journal(folder)
    for index in range(number):
        journal.write(3, "scores", f"key-{index}", scores=[index])
    journal.close()
    return folder / "step-000003.jsonl"


def test_a_file_cut_anywhere_keeps_every_whole_record_and_can_be_written_on(tmp_path: Path) -> None:
    whole = filled(tmp_path).read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(0, len(whole) + 1, 7):
        (tmp_path / "step-000003.jsonl").write_bytes(whole[:cut])
        warnings: list[str] = []
        journal = Journal(tmp_path, warnings.append)
        num_whole = sum(end <= cut for end in ends)
        assert [journal.find(3, "scores", f"key-{i}") is not None for i in range(4)] == [
            i < num_whole for i in range(4)
        ]
        journal.write(3, "scores", "new", scores=[])
        journal.close()
        records, _, fault = read_journal(tmp_path / "step-000003.jsonl")
        assert fault is None
        assert len(records) == num_whole + 1
        assert warnings == []


def test_a_changed_record_and_what_follows_is_not_used_and_said_so(tmp_path: Path) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    place = whole.index(b"key-1") + 4
    path.write_bytes(whole[:place] + b"7" + whole[place + 1 :])
    warnings: list[str] = []
    journal = Journal(tmp_path, warnings.append)
    assert journal.find(3, "scores", "key-0") is not None
    assert journal.find(3, "scores", "key-7") is None
    assert journal.find(3, "scores", "key-2") is None
    assert warnings == [f"{path}:2: damaged; it and what follows is sampled and scored again"]


def test_old_steps_are_forgotten_and_others_files_left_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (0, 1, 2, 5):
        journal.write(step, "scores", "key", scores=[])
    (tmp_path / "notes.txt").write_text("mine")
    journal.forget(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000005.jsonl"]
    assert journal.find(5, "scores", "key") is not None
    Journal(tmp_path / "nothing").forget(2)


def test_a_full_disk_leaves_the_records_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    path = filled(tmp_path)
    before = path.read_bytes()
    write = os.write
    journal = Journal(tmp_path)

    def full(descriptor: int, data: Any) -> int:
        if len(data) > 20:
            return write(descriptor, bytes(data)[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunError, match=r"step-000003\.jsonl: cannot be written \(No space left.*--resume"):
            journal.write(3, "scores", "big", scores=[0.0] * 3)
    assert path.read_bytes() == before
    journal.write(3, "scores", "big", scores=[math.pi])
    assert Journal(tmp_path).find(3, "scores", "big") == {"kind": "scores", "key": "big", "scores": [math.pi]}
