"""A run is stopped before every write, sync, rename, deletion and optimizer step, and continued from what is left."""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo import launch
from gspo.config import Recipe
from gspo.errors import GspoError, RunDirectoryError
from gspo.launch import checkpoints, parts
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.train import checkpoint, journal, manifest

from .disk import Disk, Point, State, watching, write_state
from .runs import DENSE, MOE, make_recipe, outcome

COMMAND = ["gspo", "train"]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On a disk in memory where there is one: thousands of syncs are made."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="gspo-resume-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


@dataclass(frozen=True)
class Recorded:
    """An undisturbed run: its recipe and place, all accidents it could have had, and what it came to."""

    recipe: Recipe
    run_dir: Path
    disk: Disk
    expected: dict[str, Any]
    engine_calls: list[str]

    def points(self, *accidents: str, num_checkpoints: tuple[int, ...] = (0, 1, 2)) -> list[Point]:
        return [p for p in self.disk.points if p.accident in accidents and p.num_checkpoints in num_checkpoints]


def recorded(folder: Path, model: str) -> Recorded:
    recipe, run_dir = make_recipe(folder / "recipe", model), folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        sampled = Sampled(patch)
        disk = record(recipe, run_dir, patch)
    return Recorded(recipe, run_dir, disk, outcome(run_dir), sampled.keys)


@pytest.fixture(scope="module")
def dense(folder: Path) -> Recorded:
    return recorded(folder / "dense", DENSE)


@pytest.fixture(scope="module")
def moe(folder: Path) -> Recorded:
    return recorded(folder / "moe", MOE)


class Sampled:
    """The keys of the engine calls that really sampled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        generate = EmbeddedEngine.generate

        def watched(engine: EmbeddedEngine, requests: Any, params: Any, on_finished: Any = None) -> Any:
            self.keys.append(journal.generation_key(requests, params, engine.policy_version))
            return generate(engine, requests, params, on_finished)

        monkeypatch.setattr(EmbeddedEngine, "generate", watched)


def record(recipe: Recipe, run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, honest: bool = True) -> Disk:
    """One undisturbed run and every state that it could have been stopped in."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with watching(run_dir, monkeypatch, honest=honest) as disk:
        launch.train(recipe, run_dir=run_dir, command=COMMAND)
    return disk


def go_on(recipe: Recipe, run_dir: Path, state: State) -> dict[str, Any]:
    """Continues from a state as a user would: where no run is there yet, it is started."""
    write_state(run_dir, state)
    try:
        launch.resume(run_dir, command=COMMAND)
    except RunDirectoryError as error:
        if "holds no run" not in str(error):
            raise
        launch.train(recipe, run_dir=run_dir, command=COMMAND)
    return outcome(run_dir)


def digest(state: State) -> str:
    return hashlib.blake2b(repr(sorted(state.items(), key=lambda item: item[0])).encode()).hexdigest()


def failures(recipe: Recipe, run_dir: Path, points: list[Point], expected: dict[str, Any]) -> dict[str, str]:
    """What goes wrong after which accident; points that left the same bytes are continued from once."""
    known: dict[str, str | None] = {}
    for point in points:
        key = digest(point.state)
        if key not in known:
            known[key] = _fault(recipe, run_dir, point, expected)
    return {point.name: fault for point in points if (fault := known[digest(point.state)]) is not None}


def _fault(recipe: Recipe, run_dir: Path, point: Point, expected: dict[str, Any]) -> str | None:
    try:
        got = go_on(recipe, run_dir, point.state)
    except GspoError as error:
        return f"{type(error).__name__}: {error}"
    different = [name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name)]
    return f"differs in {different}" if different else None


def test_a_run_stopped_anywhere_ends_with_the_same_bits(dense: Recorded) -> None:
    kinds = {event["type"] for event in dense.expected["events"]}
    assert {"evaluation", "step", "update", "calibration", "checkpoint"} <= kinds
    assert len(dense.disk.points) >= 400
    assert {point.accident for point in dense.disk.points} == {"killed", "torn", "lost", "names"}
    assert failures(dense.recipe, dense.run_dir, dense.disk.points, dense.expected) == {}


def test_a_mixture_of_experts_stopped_anywhere_ends_with_the_same_bits(moe: Recorded) -> None:
    assert failures(moe.recipe, moe.run_dir, moe.disk.points[::7], moe.expected) == {}


def test_a_resume_that_is_stopped_is_resumed_again(dense: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    middle = [p for p in dense.points("killed") if p.operation == "optimizer step"][2]
    write_state(dense.run_dir, middle.state)
    with watching(dense.run_dir, monkeypatch) as second:
        launch.resume(dense.run_dir, command=COMMAND)
    points = [p for p in second.points if p.accident in ("killed", "torn")][::3]
    assert len(points) > 20
    assert failures(dense.recipe, dense.run_dir, points, dense.expected) == {}


def test_what_was_finished_is_not_done_again(dense: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the engine whose record was written is not made again, whatever the accident."""
    sampled = Sampled(monkeypatch)
    order = dense.engine_calls
    assert len(set(order)) == len(order) > 4
    for point in dense.points("lost", "names")[::9]:
        write_state(dense.run_dir, point.state)
        if not (dense.run_dir / "run.json").exists():
            continue
        sampled.keys.clear()
        launch.resume(dense.run_dir, command=COMMAND)
        # Two records a call: its completions, then its scores.
        done = (point.num_records + 1) // 2
        assert not set(order[:done]) & set(sampled.keys), point.name


# Controls: products that break a promise must be found out by the same comparison.


def test_control_a_position_that_is_not_restored_is_found(dense: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.data.prompts.PromptCursor.restore", lambda self, state: None)
    points = dense.points("killed", num_checkpoints=(1,))[::8]
    assert failures(dense.recipe, dense.run_dir, points, dense.expected)


def test_control_an_optimizer_that_starts_anew_is_found(dense: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        parts, "restore_optimizer", lambda policy, optimizer, state, num: setattr(optimizer, "update", num)
    )
    points = dense.points("killed", num_checkpoints=(1,))[::8]
    assert failures(dense.recipe, dense.run_dir, points, dense.expected)


def test_control_random_streams_by_call_order_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that are drawn from a generator whose state no checkpoint has."""
    generator = random.Random(0)
    monkeypatch.setattr("gspo.envs.runner.derive_seed", lambda *names: generator.getrandbits(62))
    recipe, run_dir = make_recipe(folder / "recipe"), folder / "control"
    disk = record(recipe, run_dir, monkeypatch)
    expected = outcome(run_dir)
    points = [p for p in disk.points if p.accident == "killed" and p.num_checkpoints == 1][::8]
    assert failures(recipe, run_dir, points, expected)


def test_control_syncs_that_do_nothing_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run_dir = make_recipe(folder / "recipe"), folder / "control"
    disk = record(recipe, run_dir, monkeypatch, honest=False)
    expected = outcome(run_dir)
    points = [p for p in disk.points if p.accident == "names" and p.num_checkpoints >= 1][::8]
    assert failures(recipe, run_dir, points, expected)


def test_control_a_checkpoint_written_in_place_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(policy: Any, directory: Path, trainer: Any = None, facts: Any = None) -> Path:
        for old in checkpoint.checkpoints(directory.parent):  # the newest is always written over the one before
            shutil.rmtree(old / "trainer")
            old.rename(directory)
        policy.save(directory)
        checkpoint._write_trainer(directory, trainer)
        manifest.write_manifest(directory, facts)
        return directory

    recipe, run_dir = make_recipe(folder / "recipe"), folder / "control"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_checkpoint", in_place)
        disk = record(recipe, run_dir, patch)
    expected = outcome(run_dir)
    points = [p for p in disk.points if p.num_checkpoints == 1 and p.accident == "killed"][::8]
    assert failures(recipe, run_dir, points, expected)
