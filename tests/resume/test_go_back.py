"""A run that goes back to an earlier checkpoint: what is changed, what is left, and that it can be killed anywhere."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo import launch
from gspo.cli import main
from gspo.config import Recipe, load_recipe
from gspo.errors import ConfigError
from gspo.events import read_events
from gspo.train import guard
from gspo.train.guard import CollapseError

from .disk import Point, watching
from .runs import DENSE, make_recipe, outcome
from .test_sweep import failures

COMMAND = ["gspo", "train"]
RATE = 0.01
STEPS = ["--train.num_steps", "5", "--checkpoint.every", "1", "--eval.every", "2"]
GO_BACK = [
    *STEPS, "--guard.reactions.unlucky", "go_back",
    *("--guard.go_back.learning_rate_factor", "0.5", "--guard.go_back.bounds_factor", "0.5"),
    *("--guard.go_back.num_mini_batches", "3", "--objective.clip", "explicit", "--objective.calibration_steps", "none"),
    *("--objective.clip_low", "0.02", "--objective.clip_high", "0.04"),
]  # fmt: skip


def unlucky(rows: Sequence[guard.Row]) -> str | None:
    """Fires at the fourth step while the learning rate is the first one."""
    if len(rows) < 4 or rows[-1]["learning_rate"] < RATE * 0.9:
        return None
    return f"four steps at {rows[-1]['learning_rate']:g}"


@pytest.fixture(autouse=True, scope="module")
def detector() -> Iterator[None]:
    rule = guard.Detector("unlucky", "the fourth step at the first learning rate", "none", unlucky, reach=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "DETECTORS", (rule,))
        patch.setattr("gspo.config.guard.BY_NAME", {"unlucky": rule})
        yield


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="gspo-go-back-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


def train(recipe: Recipe, run: Path) -> list[dict[str, Any]]:
    launch.train(recipe, run_dir=run, command=COMMAND)
    return read_events(run / "events.jsonl")


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


@pytest.fixture(scope="module")
def recorded(folder: Path) -> tuple[Recipe, Path, list[Point], dict[str, Any]]:
    """A run that goes back once, every state that it could have been stopped in, and what it came to."""
    recipe, run = make_recipe(folder / "recipe", DENSE, *GO_BACK), folder / "run"
    with pytest.MonkeyPatch.context() as patch, watching(run, patch) as disk:
        launch.train(recipe, run_dir=run, command=COMMAND)
    return recipe, run, disk.points, {**outcome(run), **left(run)}


def left(run: Path) -> dict[str, Any]:
    """What going back leaves beside the outcome: the file of attempts, and the events of the abandoned stretch."""
    attempts = run / "attempts.json"
    return {
        "attempts": json.loads(attempts.read_text()) if attempts.exists() else None,
        **{
            path.name: [{k: v for k, v in event.items() if k not in ("time", "seconds")} for event in read_events(path)]
            for path in sorted(run.glob("abandoned/*"))
        },
    }


def test_it_goes_back_to_the_last_checkpoint_from_before_and_says_so(recorded: Any) -> None:
    _, _, _, found = recorded
    events = found["events"]
    # The rule is about steps 3 and 4, so step 2 is good; 3, 4 and 5 come (again) with the changed settings.
    assert [event["step"] for event in of(events, "step")] == [1, 2, 3, 4, 5]
    (back,) = of(events, "go_back")
    assert (back["step"], back["from_step"], back["attempt"]) == (2, 4, 1)
    assert back["alarms"] == ["unlucky: four steps at 0.01"]
    assert (back["learning_rate"], back["num_mini_batches"]) == (RATE * 0.5, 3)
    before, after = (next(e["metrics"] for e in of(events, "step") if e["step"] == step) for step in (2, 3))
    assert after["learning_rate"] == pytest.approx(before["learning_rate"] * 0.5)
    assert (before["clip_low"], before["clip_high"]) == (0.02, 0.04)
    assert (back["clip_low"], back["clip_high"]) == (0.01, 0.02)
    assert (after["clip_low"], after["clip_high"]) == (back["clip_low"], back["clip_high"])
    assert [[e["step"] for e in of(events, "update")].count(step) for step in range(1, 6)] == [2, 2, 3, 3, 3]
    assert found["summary"]["num_updates"] == sum(e["num_updates"] for e in of(events, "step"))
    assert any("went back from step 4 to step 2 (attempt 1)" in e["message"] for e in of(events, "warning"))


def test_what_was_left_is_kept_apart_and_not_used_again(recorded: Any) -> None:
    _, _, _, found = recorded
    abandoned = found["attempt-1.jsonl"]
    assert [event["step"] for event in of(abandoned, "step")] == [3, 4]
    assert [event["detector"] for event in of(abandoned, "warning")] == ["unlucky"]
    assert found["attempts"] == [
        {"number": 1, "step": 2, "num_updates": 4, "from_step": 4, "alarms": ["unlucky: four steps at 0.01"],
         "abandoned": "abandoned/attempt-1.jsonl"}
    ]  # fmt: skip
    # The same prompts, since each is to come once an epoch, and other samples: the attempt is in the seeds.
    for step in (3, 4):
        old, new = (
            next(e["samples"] for e in of(events, "samples") if e["step"] == step)
            for events in (abandoned, found["events"])
        )
        assert old != new
    # keep_last is 1; a detector that fires at step 6 could want any of them.
    assert found["checkpoints"] == [f"step-00000{step}" for step in range(1, 6)]


def test_killed_anywhere_it_goes_back_to_the_same_bits(recorded: Any) -> None:
    recipe, run, points, expected = recorded
    words = ("attempts.json", "attempt-1", "abandoned", ".step-000003", ".step-000004", "step-000004.jsonl")
    around = [p for p in points if any(word in p.operation for word in words)]
    assert {"write attempts.json.tmp", "rename attempts.json"} <= {p.operation for p in around}
    rest = random.Random(0).sample([p for p in points if p not in around], 6)
    own = {name: value for name, value in expected.items() if not name.startswith("attempt")}
    assert failures(recipe, run, around[::14] + rest, own) == {}


def test_what_the_last_resume_of_such_a_run_left_is_the_same_too(recorded: Any) -> None:
    recipe, run, points, expected = recorded
    last = next(p for p in points if p.operation == "rename attempts.json" and p.accident == "killed")
    after = points[points.index(last) + 4 :]
    for point in [p for p in after if p.accident == "killed"][:24:12]:
        assert failures(recipe, run, [point], {k: v for k, v in expected.items() if not k.startswith("attempt")}) == {}
        assert left(run) == left_of(expected)


def left_of(expected: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in expected.items() if name.startswith("attempt")}


def test_after_the_last_time_it_stops(tmp_path: Path) -> None:
    words = [*STEPS, "--guard.reaction", "go_back", "--guard.go_back.max_times", "2"]
    steady = make_recipe(tmp_path / "recipe", DENSE, *words, "--guard.go_back.learning_rate_factor", "1.0")
    with pytest.raises(CollapseError, match=r"after step 4.*The run went back 2 times, guard\.go_back\.max_times"):
        train(steady, tmp_path / "run")
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event["attempt"] for event in of(events, "go_back")] == [2]  # the first is in the stretch that it left
    assert of(read_events(tmp_path / "run" / "abandoned" / "attempt-2.jsonl"), "go_back")[0]["attempt"] == 1
    assert events[-1]["status"] == "failed"
    # With a factor of 1 and the bounds as they were only the seeds differ: three draws of step 3 of the same weights.
    draws = [read_events(path) for path in sorted((tmp_path / "run" / "abandoned").iterdir())] + [events]
    rewards = [next(e["metrics"] for e in of(found, "step") if e["step"] == 3) for found in draws]
    assert len({metrics["loss"] for metrics in rewards}) == 3
    assert len({metrics["learning_rate"] for metrics in rewards}) == 1


def test_without_a_checkpoint_from_before_it_stops_and_leaves_one(tmp_path: Path) -> None:
    words = [*STEPS[:2], "--checkpoint.every", "4", "--guard.reaction", "go_back"]
    with pytest.raises(CollapseError, match=r"No checkpoint from before step 3 is there to go back to"):
        train(make_recipe(tmp_path / "recipe", DENSE, *words), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000004"]


def test_a_rule_that_stops_comes_before_one_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = guard.Detector("other", "the fourth step", "none", lambda rows: "four" if len(rows) >= 4 else None)
    monkeypatch.setattr(guard, "DETECTORS", (*guard.DETECTORS, other))
    monkeypatch.setattr("gspo.config.guard.BY_NAME", {"unlucky": other, "other": other})
    words = [*GO_BACK, "--guard.reactions.other", "stop"]
    with pytest.raises(CollapseError, match=r"stopped after step 4: unlucky.*; other: four\. Its reaction"):
        train(make_recipe(tmp_path / "recipe", DENSE, *words), tmp_path / "run")


def test_a_rule_that_is_off_says_nothing(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe", DENSE, *STEPS, "--guard.reactions.unlucky", "off")
    assert of(train(recipe, tmp_path / "run"), "warning") == []


def test_the_doctor_tells_that_it_went_back(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, run, _, _ = recorded
    assert main(["doctor", str(run)]) == 1
    text = capsys.readouterr().out
    assert "finished after 5 of 5 steps" in text
    assert ", went back 1 times" in text
    assert "it went back from step 4 to step 2 (attempt 1)\n  evidence: unlucky: four steps at 0.01" in text
    assert "abandoned/attempt-1.jsonl" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--guard.reactions.unluky", "stop"], r'guard.reactions.*no detector "unluky"; did you mean "unlucky"'),
        (["--guard.reactions.unlucky", "stopp"], r'unlucky = "stopp" must be one of "off", "warn", "stop", "go_back"'),
        (["--guard.go_back.max_times", "3"], r"guard.go_back.max_times: 3 has no effect unless guard.reaction"),
        (["--guard.reaction", "go_back", "--checkpoint.every", "0", "--checkpoint.keep_last", "none"],
         r"checkpoint.every.*nothing to go back to"),
        (["--guard.reaction", "go_back", "--guard.go_back.clip_low", "0.1"], r"go_back.clip_high.*bounds come in"),
        (["--guard.reaction", "go_back", "--guard.go_back.num_mini_batches", "9"], r"guard.go_back.num_mini_batches"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_the_run(tmp_path: Path, words: list[str], sentence: str) -> None:
    make_recipe(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        load_recipe(tmp_path / "recipe.toml", words)
