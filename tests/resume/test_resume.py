"""Going on after what is not a crash of the disk: a cold start, damage, a full disk, a guard that stopped the run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo import launch
from gspo.cli import main
from gspo.cli.verify_resume import differences
from gspo.config import Recipe
from gspo.errors import ConfigError, ModelError, RunDirectoryError, RunError
from gspo.events import read_events
from gspo.launch import checkpoints, runs, stages
from gspo.train.guard import CollapseError

from .runs import DENSE, make_recipe, outcome

COMMAND = ["gspo", "train"]
SFT = '[sft]\npath = "{pairs}"\nnum_steps = 2\nbatch_size = 2\nlearning_rate = 1e-3\n'


class Killed(BaseException):
    """Stands for the end of the process: nobody catches it."""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path / "recipe")


@pytest.fixture
def with_sft(tmp_path: Path) -> Recipe:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(4)))
    return make_recipe(tmp_path / "recipe", DENSE + SFT.format(pairs=pairs))


def train(recipe: Recipe, run: Path) -> dict[str, Any]:
    launch.train(recipe, run_dir=run, command=COMMAND)
    return outcome(run)


def resumed(run: Path) -> dict[str, Any]:
    launch.resume(run, command=[*COMMAND, "--resume", str(run)])
    return outcome(run)


def die(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any], name: str, call: int) -> None:
    """Ends a run before the given call (from 1) of a function of the launch or of the loop."""
    from gspo.train import loop, sft, updates

    module = next(module for module in (runs, stages, updates, sft) if hasattr(module, name))
    function = getattr(module, name)
    calls = iter(range(1, 10_000))

    def killed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return function(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        # What handlers would still write, a killed process does not.
        patch.setattr(loop, "_save_what_there_is", lambda *arguments: None)
        with pytest.raises(Killed):
            run()


@pytest.mark.parametrize(("name", "call"), [("run_sft", 1), ("run", 1), ("update", 1), ("update", 3)])
def test_a_run_with_a_cold_start_goes_on_from_any_stage(
    with_sft: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    expected = train(with_sft, tmp_path / "run")
    assert sum(event["type"] == "sft" for event in expected["events"]) == 2
    assert "checkpoints/sft/model.safetensors" in expected
    shutil.rmtree(tmp_path / "run")
    die(monkeypatch, lambda: train(with_sft, tmp_path / "run"), name, call)
    sft_calls = []
    monkeypatch.setattr(stages, "run_sft", lambda *a, _run=stages.run_sft, **o: sft_calls.append(1) or _run(*a, **o))
    assert resumed(tmp_path / "run") == expected
    assert len(sft_calls) == (name == "run_sft")  # a cold start that was finished is not made again


def test_a_run_dies_and_goes_on_many_times(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    die(monkeypatch, lambda: train(recipe, tmp_path / "run"), "update", 2)
    for _ in range(3):
        die(monkeypatch, lambda: resumed(tmp_path / "run"), "update", 2)
    die(monkeypatch, lambda: resumed(tmp_path / "run"), "update", 4)
    assert resumed(tmp_path / "run") == expected
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]
    assert [note["checkpoint"] for note in notes] == [None, None, None, None, "step-000001"]
    assert notes[0]["ended"].startswith("Killed")


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    recipe = make_recipe(tmp_path / "recipe", DENSE, "--checkpoint.keep_last", "2")
    run = tmp_path / "run"
    expected = train(recipe, run)
    (run / "summary.json").unlink()
    path = run / "checkpoints" / "step-000002" / "model.safetensors"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(whole) // 2
        path.write_bytes(
            whole[:middle] + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if damage == "flip" else b"")
        )
    found = resumed(run)
    (warning,) = [event for event in found["events"] if event["type"] == "warning"]
    assert "step-000002/model.safetensors" in warning["message"]
    assert "going on from the newest good one, step-000001" in warning["message"]
    found["events"].remove(warning)
    assert found == expected


def test_a_damaged_checkpoint_is_not_evaluated(recipe: Recipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe, run)
    path = run / "checkpoints" / "step-000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"step-000002/model\.safetensors.*damaged"):
        launch.evaluate(recipe, model=str(path.parent), output=None)
    (run / "summary.json").unlink()
    with pytest.raises(ModelError, match="no checkpoint of this run is whole"):
        launch.resume(run, command=COMMAND)


def test_a_full_disk_ends_the_run_and_leaves_what_was_there(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second checkpoint does not fit."""
    expected = train(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if ".step-000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunError, match=r"No space left.*needs about .* MB and .* MB are free.*--resume"):
            train(recipe, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    assert read_events(tmp_path / "run" / "events.jsonl")[-1]["status"] == "failed"
    assert resumed(tmp_path / "run") == expected


def test_events_that_do_not_fit_end_the_run_without_half_a_line(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    write = os.write
    room = [6000]

    def full(descriptor: int, data: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("events.jsonl"):
            return write(descriptor, data)
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, bytes(data)[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunError, match=r"events\.jsonl: cannot be written \(No space left"):
            train(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "events.jsonl").read_bytes().endswith(b"\n")
    assert resumed(tmp_path / "run") == expected


def test_a_finished_run_is_left_as_it_is(recipe: Recipe, tmp_path: Path) -> None:
    expected = train(recipe, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert launch.resume(tmp_path / "run", command=COMMAND)["num_steps"] == 2
    assert {
        p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name not in ("run.lock",) and p.is_file()
    } == {path: time for path, time in before.items() if path.name != "run.lock"}
    assert outcome(tmp_path / "run") == expected


def test_what_is_no_run_to_continue_is_said_so(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run to continue"):
        launch.resume(tmp_path / "nothing", command=COMMAND)
    assert not (tmp_path / "nothing").exists()
    train(recipe, tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="continue it with gspo train --resume"):
        train(recipe, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    text = (tmp_path / "run" / "recipe.toml").read_text()
    (tmp_path / "run" / "recipe.toml").write_text(text.replace("learning_rate = 0.01", "learning_rate = 0.02"))
    with pytest.raises(ConfigError, match=r"is not the recipe that .* was trained with"):
        launch.resume(tmp_path / "run", command=COMMAND)
    assert main(["train"]) == 2
    assert main(["train", "--resume", str(tmp_path / "run"), "--train.num_steps", "9"]) == 2
    error = capsys.readouterr().err
    assert "needs RECIPE.toml, or --resume RUN_DIR" in error
    assert "continues a run with its own recipe" in error


def test_other_versions_are_said_so(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(recipe, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    versions = checkpoints.package_versions()
    monkeypatch.setattr(checkpoints, "package_versions", lambda: {**versions, "torch": "99.0"})
    found = resumed(tmp_path / "run")
    (warning,) = [event for event in found["events"] if event["type"] == "warning"]
    assert f"with torch {versions['torch']}, now 99.0" in warning["message"]
    found["events"].remove(warning)
    assert found == expected


def test_events_shorter_than_the_checkpoint_knows_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    path = tmp_path / "run" / "events.jsonl"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(RunDirectoryError, match=r"events\.jsonl: has 500 bytes .* the file was changed or damaged"):
        launch.resume(tmp_path / "run", command=COMMAND)


def test_a_damaged_journal_is_not_believed(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    die(monkeypatch, lambda: train(recipe, tmp_path / "run"), "update", 1)
    path = tmp_path / "run" / "journal" / "step-000001.jsonl"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    found = resumed(tmp_path / "run")
    warnings = [event for event in found["events"] if event["type"] == "warning"]
    assert ["journal/step-000001.jsonl:1: damaged" in event["message"] for event in warnings] == [True]
    found["events"].remove(warnings[0])
    assert found == expected


def test_a_guard_that_stops_leaves_a_checkpoint_of_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo.train import guard

    always = guard.Detector(
        "always", "every step", "none", lambda rows: f"{len(rows)} steps" if len(rows) == 1 else None
    )
    monkeypatch.setattr(guard, "DETECTORS", (always,))
    warned = train(make_recipe(tmp_path / "recipe"), tmp_path / "warned")
    (warning,) = [event for event in warned["events"] if event["type"] == "warning"]
    assert (warning["message"], warning["detector"], warning["step"]) == ("always: 1 steps", "always", 1)
    stopping = make_recipe(tmp_path / "recipe", DENSE, "--guard.reaction", "stop")
    with pytest.raises(CollapseError, match=r"stopped after step 1: always: 1 steps. Its reaction in \[guard\] is"):
        train(stopping, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    # Whoever goes on nevertheless gets the rest of the run.
    assert resumed(tmp_path / "run")["events"] == warned["events"]
    off = make_recipe(tmp_path / "recipe", DENSE, "--guard.reaction", "off")
    assert not [event for event in train(off, tmp_path / "off")["events"] if event["type"] == "warning"]


def test_two_runs_that_differ_are_told_apart(recipe: Recipe, tmp_path: Path) -> None:
    """The comparison of gspo verify-resume."""
    train(recipe, tmp_path / "a")
    train(recipe, tmp_path / "b")
    assert differences(tmp_path / "a", tmp_path / "b") == []
    other = make_recipe(tmp_path / "recipe", DENSE, "--train.learning_rate", "0.02")
    train(other, tmp_path / "c")
    found = differences(tmp_path / "a", tmp_path / "c")
    assert "events.jsonl" in found
    assert {f"checkpoints/step-000002/{name}" for name in ("model.safetensors", "trainer/optimizer.safetensors",
                                                          "trainer/state.json")} <= set(found)  # fmt: skip
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000002" / "trainer")
    assert any("only one has it" in name for name in differences(tmp_path / "a", tmp_path / "b"))
