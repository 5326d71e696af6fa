"""Numbers that are not finite, put in at each place where they can arise: found there, named, counted or the end."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from gspo import launch
from gspo.config import Recipe
from gspo.errors import NumericalError, RewardError
from gspo.events import read_events
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.train import updates
from gspo.types import Completion

from ..resume.runs import DENSE, make_recipe

PLAIN = [
    *("--objective.kl_coefficient", "0.0", "--train.groups_without_signal", "keep"),
    *("--train.max_refills", "none", "--objective.clip", "explicit", "--objective.calibration_steps", "none"),
    *("--objective.clip_low", "0.9", "--objective.clip_high", "9.0"),
]


def spread(completions: Any, completion_ids: Any) -> list[float]:
    """Signal in every group."""
    return [(sum(ids) % 97) / 97 for ids in completion_ids]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    monkeypatch.setattr("tests.resume.runs.reward", spread)

    def load(*words: str) -> Recipe:
        return make_recipe(tmp_path / "recipe", DENSE, *PLAIN, *words)

    return load


def train(recipe: Recipe, tmp_path: Path) -> list[dict[str, Any]]:
    launch.train(recipe, run_dir=tmp_path / "run", command=["gspo", "train"])
    return read_events(tmp_path / "run" / "events.jsonl")


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:06d}" / "model.safetensors").read_bytes()


# The engine's log-probs.


@pytest.fixture
def engine_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, one log-prob of the engine is not a number."""
    generate = EmbeddedEngine.generate

    def broken(engine: EmbeddedEngine, requests: Any, params: Any, on_finished: Any = None) -> Any:
        groups = generate(engine, requests, params, on_finished)
        if engine.policy_version:
            old = groups[0][1]
            logprobs = old.logprobs.clone()
            logprobs[2] = math.nan
            groups[0][1] = Completion(old.token_ids, logprobs, old.stop_reason, old.policy_version)
        return groups

    monkeypatch.setattr(EmbeddedEngine, "generate", broken)


@pytest.mark.usefixtures("engine_with_nan")
def test_a_response_with_a_bad_old_logprob_is_left_out_named_and_counted(recipe, tmp_path):
    events = train(recipe("--train.old_logprobs", "engine"), tmp_path)
    assert [e["metrics"]["rows/non_finite"] for e in of(events, "step")] == [0, 1]
    (warning,) = of(events, "warning")
    assert warning["message"].startswith("step 2: the old log-prob of prompt ")
    assert "sample 1 (row 1), response token 2, is nan; the response is left out" in warning["message"]
    # Three prompts of two responses, and one response is left out.
    assert sum(e["metrics"]["num_sequences"] for e in of(events, "update") if e["step"] == 2) == 5


@pytest.mark.usefixtures("engine_with_nan")
def test_it_ends_the_run_if_the_recipe_says_so(recipe, tmp_path):
    strict = recipe("--train.old_logprobs", "engine", "--guard.non_finite", "stop")
    with pytest.raises(NumericalError, match=r"step 2: the old log-prob of prompt .*token 2, is nan"):
        train(strict, tmp_path)


@pytest.mark.usefixtures("engine_with_nan")
def test_auto_takes_the_trainers_logprobs_instead_and_says_that_they_differ(recipe, tmp_path):
    events = train(recipe(), tmp_path)
    steps = of(events, "step")
    assert [e["metrics"]["rows/non_finite"] for e in steps] == [0, 0]
    assert steps[1]["non_finite"]["metrics.mismatch/mean_abs"] == "nan"


# The policy's log-probs and the gradient, in the updates that a test chooses.


def breaking(monkeypatch: pytest.MonkeyPatch, chosen: set[int], where: str) -> None:
    """Makes the updates with these numbers (from 0) non-finite at one place."""
    update = updates.update
    numbers = iter(range(1000))

    def broken(policy: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        if next(numbers) not in chosen:
            return update(policy, optimizer, *arguments, **options)
        parameter = policy.model.get_parameter("model.norm.weight")
        with spoiled(parameter, where):
            return update(policy, optimizer, *arguments, **options)

    monkeypatch.setattr(updates, "update", broken)


class spoiled:  # noqa: N801 - reads as a function
    """A parameter that is nan, or whose gradient is infinite, for a while."""

    def __init__(self, parameter: torch.nn.Parameter, where: str) -> None:
        self.parameter, self.where = parameter, where

    def __enter__(self) -> None:
        self.before = self.parameter.detach().clone()
        if self.where == "weight":
            self.parameter.data[0] = math.nan
        else:
            self.hook = self.parameter.register_hook(lambda gradient: gradient * math.inf)

    def __exit__(self, *_: object) -> None:
        if self.where == "weight":
            self.parameter.data.copy_(self.before)
        else:
            self.hook.remove()


@pytest.mark.parametrize(
    ("where", "words"),
    [("weight", "logprobs is nan at row 0, token 0"), ("gradient", r"gradient norm is inf.*model\.norm\.weight")],
)
def test_an_update_with_a_bad_number_is_skipped_named_and_counted(recipe, tmp_path, monkeypatch, where, words):
    breaking(monkeypatch, {0, 1}, where)  # both updates of the first step
    short = recipe("--checkpoint.keep_last", "2")
    events = train(short, tmp_path)
    steps = of(events, "step")
    assert [e["metrics"]["skipped_updates/non_finite"] for e in steps] == [2, 0]
    assert [e["num_updates"] for e in steps] == [0, 2]
    messages = [e["message"] for e in of(events, "warning")]
    assert len(messages) == 2
    assert all(re.search(words, message) for message in messages)
    assert [message.split(":")[0] for message in messages] == ["step 1, mini-batch 0", "step 1, mini-batch 1"]
    # The first step left the weights as they were at the start; the second moved them.
    start = launch.build(short).policy.model.state_dict()
    saved = load(weights(tmp_path / "run", 1))
    assert all(torch.equal(saved[name], start[name]) for name in saved)
    assert weights(tmp_path / "run", 2) != weights(tmp_path / "run", 1)


def test_too_many_in_a_row_are_the_end_and_others_between_them_are_not(recipe, tmp_path, monkeypatch):
    breaking(monkeypatch, {0, 2}, "gradient")
    events = train(recipe("--guard.max_non_finite", "2"), tmp_path)
    assert [e["metrics"]["skipped_updates/non_finite"] for e in of(events, "step")] == [1, 1]
    breaking(monkeypatch, {1, 2}, "gradient")
    with pytest.raises(NumericalError, match=r"step 2, mini-batch 0: .*number 2 in a row, guard\.max_non_finite"):
        launch.train(recipe("--guard.max_non_finite", "2"), run_dir=tmp_path / "b", command=["gspo", "train"])
    # Nothing of step 2 was applied, so the checkpoint of step 1 is the one to go on from.
    assert [p.name for p in (tmp_path / "b" / "checkpoints").iterdir()] == ["step-000001"]


def test_the_first_one_is_the_end_if_the_recipe_says_so(recipe, tmp_path, monkeypatch):
    breaking(monkeypatch, {1}, "gradient")
    strict = recipe("--guard.non_finite", "stop", "--checkpoint.every", "0", "--checkpoint.keep_last", "none")
    with pytest.raises(NumericalError, match="step 1, mini-batch 1: the gradient norm is inf"):
        train(strict, tmp_path)
    # One update of the step was applied: its weights are there to look at, but not to go on from.
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001-partial"]
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert events[-1]["status"] == "failed"


# Rewards.


@pytest.fixture
def values(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the reward gives to the first response of each call from the second step on."""
    chosen: list[float] = []
    calls = iter(range(1000))

    def reward(completions: Any, completion_ids: Any) -> list[float]:
        scores = spread(completions, completion_ids)
        if next(calls) >= 1:
            scores[0] = chosen[0]
        return scores

    monkeypatch.setattr("tests.resume.runs.reward", reward)
    return chosen


def test_a_reward_that_is_not_a_number_leaves_its_response_unscored(recipe, tmp_path, values):
    values.append(math.nan)
    events = train(recipe(), tmp_path)
    assert [e["metrics"]["reward/unscored"] for e in of(events, "step")] == [1, 1]


def test_an_infinite_reward_is_refused_by_name(recipe, tmp_path, values):
    values.append(math.inf)
    with pytest.raises(RewardError, match=r"returned inf for completion 0"):
        train(recipe(), tmp_path)
