"""A rollout round that breaks off keeps what is finished; an engine that fails is asked again, within a whole run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo import launch
from gspo.cli import main
from gspo.config import Recipe
from gspo.errors import EngineError, EngineFailure
from gspo.events import read_events
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.scripted import ScriptedEngine
from gspo.train.journal import generation_key

from .disk import watching, write_state
from .runs import DENSE, make_recipe, outcome
from .test_sweep import failures

COMMAND = ["gspo", "train"]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="gspo-rounds-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


class Asked:
    """What the inner engine was really asked for: a key for each call."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type) -> None:
        self.keys: list[str] = []
        generate = kind.generate

        def watched(engine: Any, requests: Any, params: Any, on_finished: Any = None) -> Any:
            self.keys += [generation_key([request], params, engine.policy_version) for request in requests]
            return generate(engine, requests, params, on_finished)

        patch.setattr(kind, "generate", watched)


def script(folder: Path) -> Path:
    """Three responses to each of the seven prompts of ``make_recipe``."""
    path = folder / "script.jsonl"
    names = [f"{name}.jsonl:{line}" for name, number in (("train", 5), ("held_out", 2))
             for line in range(1, number + 1)]  # fmt: skip
    rows = [{"prompt_id": name, "completions": [{"token_ids": [5 + i, 9, 2 + j]} for j in range(3)]}
            for i, name in enumerate(names)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scripted(folder: Path) -> Recipe:
    make_recipe(folder)
    words = ["--rollout.engine", "scripted", "--rollout.script", str(script(folder))]
    return make_recipe(folder, DENSE, *words, "--train.old_logprobs", "recompute")


@pytest.mark.parametrize("kind", [ScriptedEngine, EmbeddedEngine], ids=["by group", "by call"])
def test_finished_work_of_a_round_is_not_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Killed before every write to a journal: the groups whose records are there are not asked for again."""
    place = folder / kind.__name__
    if kind is ScriptedEngine:
        recipe = scripted(place)
    else:
        recipe = make_recipe(place, DENSE, "--rollout.prompts_per_call", "1")
    run = place / "run"
    asked = Asked(monkeypatch, kind)
    with pytest.MonkeyPatch.context() as patch, watching(run, patch) as disk:
        launch.train(recipe, run_dir=run, command=COMMAND)
    order, expected = list(asked.keys), outcome(run)
    # An evaluation of 2 prompts, steps of 3, refills: each prompt a record of its own.
    assert len(set(order)) == len(order) >= 2 + 3 + 2 + 3 + 2
    points = [p for p in disk.points if p.accident == "killed" and p.operation.startswith("write journal")]
    assert len(points) >= len(order)
    for point in points[:: len(points) // 4]:
        write_state(run, point.state)
        asked.keys.clear()
        launch.resume(run, command=COMMAND)
        assert outcome(run) == expected, point.name
        recorded = keys(point.state)
        assert not recorded & set(asked.keys), point.name
        # Everything from the first group that has no record on, and nothing else.
        done = len(order) - len(asked.keys)
        assert asked.keys == order[done:], point.name
        assert not recorded or done == 1 + max(order.index(key) for key in recorded), point.name


def keys(state: Any) -> set[str]:
    """Of the groups whose records a state has."""
    lines = [line for name, text in state.items() if name.startswith("journal/") and text for line in text.splitlines()]
    records = [json.loads(line[17:]) for line in lines]  # after the digest
    return {record["key"] for record in records if record["kind"] == "completions"}


def test_killed_within_a_round_of_several_calls_it_ends_with_the_same_bits(folder: Path) -> None:
    recipe, run = make_recipe(folder / "calls", DENSE, "--rollout.prompts_per_call", "2"), folder / "calls" / "run"
    with pytest.MonkeyPatch.context() as patch, watching(run, patch) as disk:
        launch.train(recipe, run_dir=run, command=COMMAND)
    expected = outcome(run)
    points = [p for p in disk.points if "step-00000" in p.operation and "jsonl" in p.operation]
    assert failures(recipe, run, points[::40], expected) == {}


# Engines that fail.


def failing(patch: pytest.MonkeyPatch, call: int, kind: EngineFailure, times: int = 1) -> None:
    """The engine breaks off in the given call (from 1) and those after it, each time with one response finished."""
    generate, calls = EmbeddedEngine.generate, iter(range(1, 999))

    def broken(engine: Any, requests: Any, params: Any, on_finished: Any = None) -> Any:
        number, finished = next(calls), []

        def told(*arguments: Any) -> None:
            if call <= number < call + times and finished:
                raise EngineError("the engine is gone", kind)
            finished.append(arguments)
            on_finished(*arguments)

        return generate(engine, requests, params, told)

    patch.setattr(EmbeddedEngine, "generate", broken)


def of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["type"] == kind]


def without_failures(found: dict[str, Any]) -> dict[str, Any]:
    """An outcome as it would be had the engine not failed."""
    events = []
    for event in found["events"]:
        if event["type"] == "warning" and "engine" in event:
            continue
        metrics = event.get("metrics", {})
        for name in ("engine/failures", "engine/retries"):
            if name in metrics:
                metrics[name] = 0.0
        events.append(event)
    return {**found, "events": events}


def test_a_call_that_fails_and_is_made_again_changes_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(folder / "quiet")
    launch.train(recipe, run_dir=folder / "quiet" / "run", command=COMMAND)
    expected, run = outcome(folder / "quiet" / "run"), folder / "failing" / "run"
    with monkeypatch.context() as patch:  # the first call is the evaluation, the second the first round
        failing(patch, 2, EngineFailure.CRASHED, times=2)
        launch.train(recipe, run_dir=run, command=COMMAND)
    steps = [event["metrics"] for event in of(run, "step")]
    assert [(m["engine/failures"], m["engine/retries"], m["engine/aborted"]) for m in steps] == [(2, 2, 0), (0, 0, 0)]
    told = [event for event in of(run, "warning") if event.get("engine") == "crashed"]
    assert [event["message"] for event in told] == [
        "the engine failed (crashed): the engine is gone; the call is made again"
    ] * 2
    found, there = without_failures(outcome(run)), without_failures(expected)
    assert {**found, "summary": None} == {**there, "summary": None}


def test_failures_are_counted_once_however_often_the_run_is_continued(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = make_recipe(folder / "counted"), folder / "counted" / "run"
    with monkeypatch.context() as patch:
        failing(patch, 2, EngineFailure.TIMEOUT)
        with watching(run, patch) as disk:
            launch.train(recipe, run_dir=run, command=COMMAND)
    expected = outcome(run)
    updates = [p for p in disk.points if p.operation == "optimizer step" and p.accident == "killed"]
    assert failures(recipe, run, updates[:2], expected) == {}
    assert [event["metrics"]["engine/failures"] for event in of(run, "step")] == [1, 0]


def test_in_the_end_the_run_stops_and_can_be_continued(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = make_recipe(folder / "stops", DENSE, "--rollout.max_retries", "1"), folder / "stops" / "run"
    with monkeypatch.context() as patch:
        failing(patch, 2, EngineFailure.OUT_OF_MEMORY, times=9)
        with pytest.raises(EngineError, match=r"failed 2 times \(out_of_memory\): the engine is gone; lower rollout"):
            launch.train(recipe, run_dir=run, command=COMMAND)
    assert main(["doctor", str(run)]) == 1
    text = capsys.readouterr().out
    assert "the run failed: the sampling engine ran out of memory" in text
    assert "calls of the sampling engine failed: out of memory\n  evidence: 2 times" in text
    launch.resume(run, command=COMMAND)
    assert len(of(run, "step")) == 2


def test_what_is_finished_goes_on_without_the_rest_where_the_recipe_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--rollout.max_retries", "0", "--rollout.engine_failure", "keep", "--train.groups_without_signal", "keep"]
    recipe = make_recipe(folder / "keeps", DENSE, *words, "--train.max_refills", "none")
    run = folder / "keeps" / "run"
    with monkeypatch.context() as patch, watching(run, patch) as disk:
        failing(patch, 3, EngineFailure.TIMEOUT)  # evaluation, step 1, evaluation, step 2: the second evaluation
        failing(patch, 4, EngineFailure.TIMEOUT)  # and step 2
        launch.train(recipe, run_dir=run, command=COMMAND)
    first, second = (event["metrics"] for event in of(run, "step"))
    assert (first["engine/aborted"], first["reward/unscored"]) == (0, 0)
    # Of three groups of two one response was finished.
    assert (second["engine/aborted"], second["reward/unscored"], second["engine/failures"]) == (5, 5, 1)
    assert sum(event["metrics"].get("num_sequences", 0) for event in of(run, "update") if event["step"] == 2) == 1
    evaluations = of(run, "evaluation")
    assert [event["metrics"]["unscored_fraction"] for event in evaluations] == [0, 0.75, 0]  # 3 of 2 prompts x 2
    points = [p for p in disk.points if p.operation == "optimizer step" and p.accident == "killed"]
    assert failures(recipe, run, points[-1:], outcome(run)) == {}
