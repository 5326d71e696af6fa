"""What one cell's run consists of, inside the worker process. Which runs there are, and when, is ``run.py``'s.

::

    CELL/
    ├── job.json        what is to be done, with the digest of the study's file
    ├── recipe.toml     base recipe, overrides and seed
    ├── run/            the run directory of a trained cell
    ├── records.json    what another executor wrote
    ├── log.txt         everything that was printed
    └── done.json       written last: a cell without it is done again
"""

from __future__ import annotations

import fcntl
import importlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.config.load import load_recipe
from gspo.config.schema import Recipe
from gspo.errors import ConfigError, RunError
from gspo.events import write_json
from gspo.study.measures import RECORDS, RUN
from gspo.study.schema import Cell, Curve

JOB, DONE, RECIPE, LOG = "job.json", "done.json", "recipe.toml", "log.txt"
#: Exit status of a run that somebody asked to end: not a result.
STOPPED = 3


@dataclass(frozen=True)
class Job:
    """One cell as an executor sees it."""

    study: str
    cell: Cell
    recipe: Recipe  # base, overrides and seed; starts from the seed's cold start where the study has one
    options: Mapping[str, Any]  # of the arm and its levels
    directory: Path  # exists; the executor's to write into
    quick: bool


@dataclass(frozen=True)
class Records:
    """What an executor measured."""

    scalars: Mapping[str, float | None] = field(default_factory=dict)
    series: Mapping[str, Curve] = field(default_factory=dict)


def train(job: Job) -> Records:
    """Trains the cell's recipe as ``gspo train`` does; what was measured is in the run directory."""
    from gspo import launch

    launch.train(job.recipe, run_dir=job.directory / RUN, command=["gspo", "study", job.study, job.cell.place])
    _clear(job.directory / RUN)
    return Records()


def cold_start(job: Job) -> Records:
    """The supervised training that the arms of a seed start from, as ``gspo sft`` does it."""
    from gspo import launch

    launch.sft(job.recipe, run_dir=job.directory / RUN, command=["gspo", "study", "cold start", job.cell.place])
    return Records()


def _clear(run: Path) -> None:
    """The weights of a run that is judged by its events are not kept."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shutil.rmtree(run / "journal", ignore_errors=True)


def execute(directory: Path) -> None:
    """Does the job in ``directory`` and writes done.json.

    A run that goes wrong by itself (RunError, e.g. a non-finite gradient) is a result: it is done, and failed.

    Raises:
        InputError: the job cannot be done; nothing is marked as done.
    """
    with _locked(directory):
        if (directory / DONE).exists():  # another study made this cold start meanwhile
            return
        job, executor = _read(directory)
        start = time.perf_counter()
        done: dict[str, Any] = {"status": "finished", "message": ""}
        try:
            records = executor(job)
        except RunError as error:
            if error.exit_status == STOPPED:
                raise
            done = {"status": "failed", "message": f"{type(error).__name__}: {error}"}
            _clear(directory / RUN)
        else:
            if records.scalars or records.series:
                series = {name: curve.model_dump() for name, curve in records.series.items()}
                write_json(directory / RECORDS, {"scalars": dict(records.scalars), "series": series})
        write_json(directory / DONE, {**done, "seconds": round(time.perf_counter() - start, 2)})


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with directory.with_name(directory.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(directory: Path) -> tuple[Job, Callable[[Job], Records]]:
    found = json.loads((directory / JOB).read_text(encoding="utf-8"))
    recipe = load_recipe(directory / RECIPE, command="sft" if found["executor"] == "cold_start" else "train")
    cell = Cell.model_validate(found["cell"])
    job = Job(found["study"], cell, recipe, found["options"], directory, found["quick"])
    return job, executor_of(found["executor"])


def executor_of(name: str) -> Callable[[Job], Records]:
    """An executor by name, or from ``"module:function"``.

    Raises:
        ConfigError: there is none.
    """
    own: Mapping[str, Callable[[Job], Records]] = {"train": train, "cold_start": cold_start}
    if name in own:
        return own[name]
    module, colon, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"study executor {name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise ConfigError(f'study executor {name!r} is neither "train" nor a "module:function"')
    return found  # type: ignore[no-any-return]
