"""A cold start that is stopped goes on from its own checkpoints, alone and within a run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo import launch
from gspo.cli import main
from gspo.config import Recipe, load_recipe
from gspo.errors import RunDirectoryError
from gspo.events import read_events
from gspo.launch import StopSignal, stages
from gspo.train import sft
from gspo.train.loop import StoppedError

from .disk import Point, watching, write_state
from .runs import DENSE, make_recipe

SFT = """[sft]
path = "{pairs}"
num_steps = 7
batch_size = 2
learning_rate = 1e-2
checkpoint_every = 2
"""
#: Of this seed no evaluation ends the cold start before its last update.
SEED = ("--run.seed", "0")
EVALUATED = "stop_at_pass = 1.0\neval_every = 2\n"
Kind = tuple[str, Callable[[Recipe, Path], Any]]


def alone(recipe: Recipe, run: Path) -> None:
    launch.sft(recipe, run_dir=run, command=["gspo", "sft"])


def within(recipe: Recipe, run: Path) -> None:
    launch.train(recipe, run_dir=run, command=["gspo", "train"])


def resume(run: Path) -> None:
    launch.resume(run, command=["gspo", "sft", "--resume", str(run)])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="gspo-cold-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Recipe:
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(5)))
    return make_recipe(folder / "recipe", DENSE + SFT.format(pairs=pairs) + EVALUATED, "--train.num_steps", "1", *SEED)


def left(run: Path) -> dict[str, Any]:
    """Events without times, and the bytes of every tensor of every checkpoint."""
    found: dict[str, Any] = {
        "events": [
            {k: v for k, v in event.items() if k not in ("time", "seconds")}
            for event in read_events(run / "events.jsonl")
        ],
        "num_updates": json.loads((run / "summary.json").read_text())["num_updates"],
    }
    for path in sorted((run / "checkpoints").rglob("*.safetensors")):
        found[path.relative_to(run).as_posix()] = path.read_bytes()
    return found


class Recorded:
    """A run that was left alone, and every state in which it could have been stopped."""

    def __init__(self, recipe: Recipe, run: Path, begin: Callable[[Recipe, Path], None]) -> None:
        self.recipe, self.run, self.begin = recipe, run, begin
        with pytest.MonkeyPatch.context() as patch, watching(run, patch) as disk:
            begin(recipe, run)
        self.points, self.expected = disk.points, left(run)

    def go_on(self, point: Point) -> dict[str, Any]:
        write_state(self.run, point.state)
        try:
            resume(self.run)
        except RunDirectoryError as error:
            if "holds no run" not in str(error):
                raise
            self.begin(self.recipe, self.run)
        return left(self.run)


@pytest.fixture(scope="module")
def lone(folder: Path, recipe: Recipe) -> Recorded:
    return Recorded(recipe, folder / "alone", alone)


@pytest.fixture(scope="module")
def first(folder: Path, recipe: Recipe) -> Recorded:
    return Recorded(recipe, folder / "within", within)


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def test_it_leaves_its_end_and_tells_of_what_it_kept_on_the_way(lone: Recorded) -> None:
    assert [event["update"] for event in of(lone.expected["events"], "sft")] == list(range(1, 8))
    assert [event["path"] for event in of(lone.expected["events"], "checkpoint")] == [
        "checkpoints/sft-000002", "checkpoints/sft-000004", "checkpoints/sft-000006", "checkpoints/sft",
    ]  # fmt: skip
    assert [event["step"] for event in of(lone.expected["events"], "evaluation")] == [2, 4, 6]
    write_state(lone.run, lone.points[-1].state)
    assert [path.name for path in (lone.run / "checkpoints").iterdir()] == ["sft"]


@pytest.mark.parametrize("name", ["lone", "first"])
def test_stopped_anywhere_it_ends_with_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    recorded: Recorded = request.getfixturevalue(name)
    points = recorded.points
    cold = points[: 1 + max(i for i, p in enumerate(points) if "sft" in p.operation)]
    different = {}
    for point in cold[:: len(cold) // 7]:
        got = recorded.go_on(point)
        if got != recorded.expected:
            different[point.name] = [key for key in got if got[key] != recorded.expected.get(key)]
    assert different == {}


def num_made(recorded: Recorded, point: Point, monkeypatch: pytest.MonkeyPatch) -> int:
    """Updates of the cold start that going on from there makes."""
    made = []
    update = sft._sft_update
    with monkeypatch.context() as patch:
        patch.setattr(sft, "_sft_update", lambda *arguments: made.append(1) or update(*arguments))
        recorded.go_on(point)
    return len(made)


def test_updates_behind_a_checkpoint_are_not_made_again(lone: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the optimizer steps 1, 3, 5 and 7 there are checkpoints of 0, 2, 4 and 6 updates."""
    steps = [p for p in lone.points if p.operation == "optimizer step" and p.accident == "lost"]
    assert [num_made(lone, steps[i], monkeypatch) for i in (0, 2, 3, 4, 6)] == [7, 5, 5, 3, 1]


def test_a_control_an_optimizer_that_is_not_restored_is_found(lone: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "restore_optimizer", lambda policy, optimizer, state, num: None)
    point = [p for p in lone.points if p.operation == "optimizer step" and p.accident == "killed"][3]
    assert lone.go_on(point) != lone.expected


def test_a_damaged_place_is_named_and_the_one_before_is_taken(lone: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    point = [p for p in lone.points if p.operation == "optimizer step" and p.accident == "killed"][6]
    name = "checkpoints/sft-000006/model.safetensors"
    content = point.state[name]
    assert content is not None
    damaged = {**point.state, name: content[:-1] + bytes([content[-1] ^ 1])}
    broken = Point(0, "damage", "killed", damaged, 0, 0)
    assert num_made(lone, broken, monkeypatch) == 3
    found = left(lone.run)
    (warning,) = of(found["events"], "warning")
    assert "sft-000006/model.safetensors" in warning["message"]
    assert "going on from the newest good one, sft-000004" in warning["message"]
    found["events"].remove(warning)
    assert found == lone.expected


def test_a_signal_leaves_a_checkpoint_of_that_update(lone: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(lone.run)
    checks = iter(range(1, 99))
    check = StopSignal.check

    def third(self: StopSignal) -> None:
        if next(checks) == 4:
            self.received = "SIGTERM"
        check(self)

    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "check", third)
        with pytest.raises(StoppedError, match="stopped by SIGTERM; continue with"):
            alone(lone.recipe, lone.run)
    assert sorted(path.name for path in (lone.run / "checkpoints").iterdir()) == ["sft-000002", "sft-000003"]
    assert main(["doctor", str(lone.run)]) == 1
    resume(lone.run)
    assert left(lone.run) == lone.expected


def test_the_command_continues_it_and_says_what_it_needs(lone: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    point = [p for p in lone.points if p.operation == "optimizer step" and p.accident == "killed"][4]
    for words in (["sft"], ["train"]):
        write_state(lone.run, point.state)
        assert main(["doctor", str(lone.run)]) == 1
        assert "died after 4 of 7 updates of the cold start" in capsys.readouterr().out
        assert main([*words, "--resume", str(lone.run)]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_updates"] == 7
        assert left(lone.run) == lone.expected
    assert main(["sft"]) == 2
    assert main(["sft", "--resume", str(lone.run), "--sft.num_steps", "9"]) == 2
    error = capsys.readouterr().err
    assert "gspo sft needs RECIPE.toml, or --resume RUN_DIR" in error
    assert "continues a run with its own recipe" in error


def test_one_that_is_nearly_over_keeps_nothing_on_the_way(folder: Path, recipe: Recipe) -> None:
    path = folder / "recipe" / "recipe.toml"
    short = load_recipe(path, ["--sft.checkpoint_every", "0", "--sft.num_steps", "2"])
    alone(short, folder / "short")
    events = read_events(folder / "short" / "events.jsonl")
    assert [event["path"] for event in of(events, "checkpoint")] == ["checkpoints/sft"]
