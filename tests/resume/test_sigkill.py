"""Runs in processes of their own, killed for good at random instants, stopped by signals, and continued."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo.events import read_events

from .processes import Server, same_but_for_its_place
from .runs import make_recipe

#: Kills in the suite; ``make soak`` asks for more.
NUM_KILLS = int(os.environ.get("GSPO_NUM_KILLS", "6"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "signal")
    yield server
    server.close()


@pytest.fixture(scope="module")
def quiet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    """Recipe file, undisturbed run and its seconds."""
    folder = tmp_path_factory.mktemp("quiet")
    make_recipe(folder)
    begin = time.monotonic()
    server.start("train", str(folder / "recipe.toml"), str(folder / "run"))
    assert server.wait() == 0
    return folder / "recipe.toml", folder / "run", time.monotonic() - begin


def test_killed_at_random_instants_it_ends_with_the_same_bits(
    server: Server, quiet: tuple[Path, Path, float], tmp_path: Path
) -> None:
    recipe, undisturbed, seconds = quiet
    random.seed(7)
    kills, run, number = 0, tmp_path / "run-0", 0
    while kills < NUM_KILLS:
        words = ("resume", str(run)) if (run / "run.json").exists() else ("train", str(recipe), str(run))
        child = server.start(*words)
        time.sleep(random.uniform(0, seconds))
        with contextlib.suppress(ProcessLookupError):  # ended by itself, or has no group yet
            os.killpg(child, signal.SIGKILL)
        status = server.wait()
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        if status == 0:
            same_but_for_its_place(undisturbed, run)
            number += 1
            run = tmp_path / f"run-{number}"
    server.start("resume", str(run)) if (run / "run.json").exists() else server.start("train", str(recipe), str(run))
    assert server.wait() == 0
    same_but_for_its_place(undisturbed, run)


@pytest.mark.parametrize(
    ("name", "call", "left"),
    [("SIGTERM", 5, ["step-000001"]), ("SIGINT", 4, ["step-000001"]), ("SIGINT", 2, [])],
    ids=["in a step", "in an evaluation", "in the first step"],
)
def test_a_signal_ends_it_at_a_safe_point_with_a_status_of_its_own(
    server: Server, quiet: tuple[Path, Path, float], tmp_path: Path, name: str, call: int, left: list[str]
) -> None:
    recipe, undisturbed, _ = quiet
    run = tmp_path / "run"
    server.signal_file.write_text(f"{name} {call}")  # the calls: evaluation, step, refill, evaluation, step, ...
    server.start("train", str(recipe), str(run))
    assert server.wait() == 3
    end = read_events(run / "events.jsonl")[-1]
    assert (end["type"], end["status"], end["message"]) == ("end", "interrupted", f"stopped by {name}")
    saved = run / "checkpoints"
    assert (sorted(path.name for path in saved.iterdir()) if saved.exists() else []) == left
    server.start("resume", str(run))
    assert server.wait() == 0
    same_but_for_its_place(undisturbed, run)


def test_a_run_that_goes_on_is_not_continued_a_second_time(
    server: Server, quiet: tuple[Path, Path, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from gspo.cli import main

    recipe, _, _ = quiet
    run = tmp_path / "run"
    child = server.start("train", str(recipe), str(run))
    while not (run / "run.json").exists():
        time.sleep(0.002)
    os.kill(child, signal.SIGSTOP)
    assert main(["train", "--resume", str(run)]) == 2
    assert f"in use by pid {child}" in capfd.readouterr().err
    os.kill(child, signal.SIGCONT)
    assert server.wait() == 0


@pytest.mark.skipif("GSPO_SOAK" not in os.environ, reason="five processes that import everything: for make soak")
def test_verify_resume_proves_it_for_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gspo.cli import main

    make_recipe(tmp_path)
    assert main(["verify-resume", str(tmp_path / "recipe.toml"), "--steps", "2", "--kills", "3"]) == 0
    text = capsys.readouterr().out
    assert text.count("killed after ") == 3
    assert "the same bits" in text


def test_the_second_signal_ends_it_at_once() -> None:
    from gspo.launch import StopSignal
    from gspo.train.loop import StoppedError

    # Under nohup SIGINT is ignored, before and after; what is tested is a terminal's.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopSignal() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StoppedError, match="SIGINT"):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, outside) is signal.default_int_handler
