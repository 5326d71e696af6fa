"""User rewards in killable processes: one that does anything wrong costs its own response the score, and no more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.rewards import pool, user_call
from gspo.rewards.base import RewardSet
from gspo.rewards.builtin import build_rewards
from gspo.types import Prompt, Score


def reward_set(function: str, **settings: Any) -> RewardSet:
    entry = SimpleNamespace(
        name=function, weight=1.0, kind=settings.pop("kind", "trl"), options=settings.pop("options", {})
    )
    return build_rewards(
        [entry], isolate=True, **{"timeout_s": 1.0, "num_workers": 2, "memory_limit_mb": 512, **settings}
    )


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[RewardSet]:
    with reward_set("tests.rewards.misbehaving:behave") as rewards:
        yield rewards


def score(rewards: RewardSet, *texts: str) -> list[Score]:
    prompts = [Prompt(f"p/{i}", "2+2=", (1,), columns={"answer": "4"}) for i in range(len(texts))]
    return rewards.score(prompts, list(texts), [[1, 2]] * len(texts))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "ran into the limit of 1 s"),
        ("hang in C", "ran into the limit of 1 s"),
        ("crash", "crashed (signal 11)"),
        ("leave", "crashed (exit status 0)"),
        ("eat", "ran into the memory limit"),
        ("raise", "KeyError: 'column'"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("text", "returned 'good', which is no number"),
        ("too many", "returned 2 values for one completion"),
        ("bare", "returned float for one completion"),
    ],
)
def test_whatever_it_does_its_response_is_unscored_and_the_others_are_scored(
    misbehaving: RewardSet, text: str, reason: str
) -> None:
    start = time.monotonic()
    first, bad, last = score(misbehaving, "4", text, "5")
    assert (first.value, last.value) == (1.0, 0.5)
    assert bad.value is None
    assert bad.failure is not None
    assert reason in bad.failure
    assert time.monotonic() - start < 20  # a limit of one second, and new processes on a busy machine


def test_a_process_that_somebody_killed_is_replaced_and_asked_again(misbehaving: RewardSet, tmp_path: Any) -> None:
    assert [s.value for s in score(misbehaving, "4", f"crash once {tmp_path}/mark", "4")] == [1.0, 0.5, 1.0]


def test_a_process_that_is_killed_while_it_starts_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    greet, started = pool._Worker._greet, []

    def killed_twice(worker: Any) -> None:
        started.append(worker.process.pid)
        if len(started) < 3:
            worker.process.kill()
        greet(worker)

    monkeypatch.setattr(pool._Worker, "_greet", killed_twice)
    with reward_set("tests.rewards.misbehaving:behave", num_workers=1) as rewards:
        assert [s.value for s in score(rewards, "4")] == [1.0]
    assert len(started) == 3


def test_what_it_prints_goes_nowhere(misbehaving: RewardSet, capfd: pytest.CaptureFixture[str]) -> None:
    (printed,) = score(misbehaving, "print")
    assert printed.value == 0.5
    assert capfd.readouterr() == ("", "")


def test_none_is_a_row_that_it_does_not_apply_to(misbehaving: RewardSet) -> None:
    (none,) = score(misbehaving, "none")
    assert none == Score(None, {"tests.rewards.misbehaving:behave": None}, "no reward applied")


def test_the_limits_are_counted(misbehaving: RewardSet) -> None:
    before = misbehaving.counters
    score(misbehaving, "hang", "raise")
    after = misbehaving.counters
    assert after["timeouts"] - before["timeouts"] == 1
    assert after["errors"] - before["errors"] == 1


def test_async_functions_options_files_and_verls_signature_work(tmp_path: Any) -> None:
    with reward_set("tests.rewards.misbehaving:later", options={"factor": 2.0}) as rewards:
        assert [s.value for s in score(rewards, "abc")] == [6.0]
    with reward_set("tests.rewards.misbehaving:verl", kind="verl") as rewards:
        assert [s.value for s in score(rewards, "4", "5")] == [1.0, 0.0]
    path = tmp_path / "mine.py"
    path.write_text("def reward(completions, **columns):\n    return [float(columns['answer'][0])]\n")
    with reward_set(f"{path}:reward") as rewards:
        assert [s.value for s in score(rewards, "x")] == [4.0]


def test_the_function_does_not_run_in_this_process() -> None:
    with reward_set("os:getpid") as rewards:
        (failed,) = score(rewards, "x")
    assert failed.failure is not None
    assert "returned int for one completion" in failed.failure
    assert user_call.call("os:getpid", "verl", {}) == (float(os.getpid()), "")
