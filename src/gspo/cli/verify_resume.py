"""``gspo verify-resume``: trains a recipe twice for a few steps, once undisturbed and once killed and continued.

Both are processes of their own, as in earnest; the second gets SIGKILL, with its whole process group, as soon as its
events have come to each of several lines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.cli.commands import checked_recipe
from gspo.config.load import recipe_text
from gspo.errors import InputError, RunError
from gspo.events import read_event_log

_POLL_S = 0.01


def verify_resume(path: Path, overrides: Sequence[str], num_steps: int, num_kills: int) -> int:
    """Prints what it does and what differs. Exit status 1 if anything does.

    Raises:
        InputError: the recipe is wrong, or there are too few steps or kills.
        RunError: a run did not reach its end by itself.
    """
    if num_steps < 1 or num_kills < 1:
        raise InputError(f"--steps {num_steps} --kills {num_kills}: at least 1 of each is needed")
    short = ["--train.num_steps", str(num_steps), "--checkpoint.every", "1", "--checkpoint.keep_last", "1"]
    recipe = checked_recipe(path, [*overrides, *short], "train")
    with tempfile.TemporaryDirectory(prefix="gspo-verify-resume-") as folder:
        root = Path(folder)
        text = root / "recipe.toml"
        text.write_text(recipe_text(recipe), encoding="utf-8")
        quiet, disturbed = root / "undisturbed", root / "disturbed"
        print(f"undisturbed: {num_steps} steps", flush=True)
        _run_to_its_end(["train", str(text), "--run-dir", str(quiet)])
        total = len(read_event_log(quiet / "events.jsonl").events)
        words = ["train", str(text), "--run-dir", str(disturbed)]
        for number in range(1, num_kills + 1):
            target = max(1, total * number // (num_kills + 1))
            _kill_at(words, disturbed / "events.jsonl", target)
            print(f"killed after {_num_lines(disturbed / 'events.jsonl')} of {total} events", flush=True)
            if (disturbed / "run.json").exists():
                words = ["train", "--resume", str(disturbed)]
        _run_to_its_end(words)
        found = differences(quiet, disturbed)
    for name in found:
        print(f"differs: {name}")
    print("NOT the same" if found else "the same bits: weights, optimizer state, position, events")
    return 1 if found else 0


def _command(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gspo", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _run_to_its_end(words: Sequence[str]) -> None:
    process = _command(words)
    _, error = process.communicate()
    if process.returncode:
        raise RunError(f"gspo {' '.join(words)} ended with status {process.returncode}: {error.decode().strip()}")


def _kill_at(words: Sequence[str], events: Path, num_lines: int) -> None:
    """Starts a run and kills its process group once there are so many events, or lets it end."""
    process = _command(words)
    while process.poll() is None and _num_lines(events) < num_lines:
        time.sleep(_POLL_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    _, error = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RunError(f"gspo {' '.join(words)} ended with status {process.returncode}: {error.decode().strip()}")


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def differences(one: Path, other: Path) -> list[str]:
    """Names of what two runs of the same recipe left differently, times aside."""
    found = []
    if _events(one) != _events(other):
        found.append("events.jsonl")
    folders = [run / "checkpoints" for run in (one, other)]
    names = sorted({path.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("*")})
    for name in names:
        left, right = (folder / name for folder in folders)
        if left.is_dir() and right.is_dir():
            continue
        if not (left.exists() and right.exists()):
            found.append(f"checkpoints/{name} (only one has it)")
        elif _matters(left) != _matters(right):
            found.append(f"checkpoints/{name}")
    return found


def _events(run: Path) -> list[dict[str, Any]]:
    """Without when they happened and how long it took."""
    return [
        {name: value for name, value in event.items() if name not in ("time", "seconds")}
        for event in read_event_log(run / "events.jsonl").events
    ]


def _matters(path: Path) -> object:
    """Weights, moments and positions; of the position not the length of the events, in which times have more or fewer
    digits. Of other files, such as the tokenizer's, the trainer reads nothing that it did not write."""
    if path.suffix == ".safetensors":
        return path.read_bytes()
    if path.name != "state.json":
        return None
    state = dict(json.loads(path.read_text(encoding="utf-8")))
    state.pop("events_size", None)
    return state
