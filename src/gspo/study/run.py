"""Makes the runs of a study: cold starts first, then its cells, two at a time, each once.

::

    runs/studies/
    ├── starts/DIGEST+seed=N/    cold starts, shared by all studies that start from the same supervised recipe
    └── NAME/
        ├── study.toml           the file as it was
        ├── runs/CELL/           see execute.py
        └── exploration/CELL/    runs of [exploration]; never in the verdict
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from gspo.config.load import load_recipe
from gspo.errors import ConfigError, RunError
from gspo.events import write_json
from gspo.study.execute import DONE, JOB, LOG, RECIPE
from gspo.study.load import (
    LoadedStudy,
    arm_of,
    cells,
    exploration_cells,
    overrides_of,
    recipe_file_text,
    recipe_tree,
)
from gspo.study.measures import RECORDS, RUN
from gspo.study.schema import Cell

Say = Callable[[str], None]


def run_study(loaded: LoadedStudy, directory: Path, *, jobs: int, quick: bool, explore: bool, say: Say) -> None:
    """Makes every run that is not there yet. Finished ones are kept; one that was broken off is made again.

    Args:
        directory: of the study; cold starts lie beside it.
        jobs: worker processes, one thread each.
        explore: the runs of [exploration] in place of the confirmatory ones.

    Raises:
        ConfigError: a run is there that was made by another version of the file, or a recipe is wrong.
        RunError: runs could not be made; names them and their logs.
    """
    wanted = exploration_cells(loaded.study) if explore else cells(loaded.study, quick=quick)
    if explore and not wanted:
        raise ConfigError(f"study {loaded.study.name} has no runs under [exploration]")
    folder = directory / ("exploration" if explore else "runs")
    if not explore:
        check_digests(loaded, folder)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(loaded.path, directory / "study.toml")
    prepared = [_prepare(loaded, cell, directory, folder, quick) for cell in wanted]
    starts = list(dict.fromkeys(start for _, start in prepared if start is not None))
    _work(_open(starts), jobs, say, "cold start")
    for (place, _), cell in zip(prepared, wanted, strict=True):
        _take_over(loaded, cell, place, directory.parent, say)
    _work(_open([place for place, _ in prepared]), jobs, say, "run")


def check_digests(loaded: LoadedStudy, folder: Path) -> None:
    """Refuses a folder with runs of another version of the study's file.

    Raises:
        ConfigError: names one such run and both digests.
    """
    for job in sorted(folder.glob(f"*/{JOB}")):
        found = json.loads(job.read_text(encoding="utf-8"))["digest"]
        if found != loaded.digest:
            raise ConfigError(
                f"{job.parent} was run by another version of the study's file ({found}, now {loaded.digest}); runs of "
                "two versions are not mixed: give another --dir, or put the file back"
            )


def _prepare(loaded: LoadedStudy, cell: Cell, directory: Path, folder: Path, quick: bool) -> tuple[Path, Path | None]:
    """The directory of a cell with its job, and that of its cold start."""
    study = loaded.study
    overrides, options = overrides_of(study, cell, quick=quick)
    tree = recipe_tree(study, overrides)
    tree["run"] = {**tree.get("run", {}), "name": cell.place, "seed": cell.seed}
    start = None
    if study.cold_start:
        start = _prepare_start(tree, cell.seed, directory.parent / "starts")
        tree.pop("sft")
        tree["model"] = {
            **{key: value for key, value in tree["model"].items() if key not in ("tiny", "tiny_config")},
            "path": str((start / RUN / "checkpoints" / "sft").resolve()),
        }
    job = {"study": study.name, "digest": loaded.digest, "executor": study.executor, "options": options, "quick": quick}
    place = folder / cell.place
    _write_job(place, {**job, "cell": cell.model_dump()}, recipe_file_text(tree))
    return place, start


def _prepare_start(tree: dict[str, Any], seed: int, starts: Path) -> Path:
    """The directory of a cold start, named by everything that it depends on.

    Raises:
        ConfigError: the recipe has no [sft].
    """
    if "sft" not in tree:
        raise ConfigError("a study with cold_start = true needs [recipe.sft]: what its arms start from")
    sections = ("model", "data", "sft", "rollout", "reward", "eval")
    kept: dict[str, Any] = {name: tree[name] for name in sections if name in tree}
    kept["rollout"] = {k: v for k, v in kept.get("rollout", {}).items() if k in ("max_new_tokens", "stop_strings")}
    kept["eval"] = {k: v for k, v in kept.get("eval", {}).items() if k != "every"}
    kept["run"] = {"name": "cold-start", "seed": seed, "num_threads": 1}
    text = recipe_file_text(kept)
    place = starts / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}+seed={seed}"
    cell = Cell(arm="cold-start", seed=seed).model_dump()
    job = {"study": "cold start", "digest": "", "executor": "cold_start", "options": {}, "quick": False, "cell": cell}
    _write_job(place, job, text)
    return place


def _write_job(place: Path, job: dict[str, Any], recipe: str) -> None:
    if (place / DONE).exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    (place / RECIPE).write_text(recipe, encoding="utf-8")
    write_json(place / JOB, job)


def _open(places: Sequence[Path]) -> list[Path]:
    """Those that are not done."""
    return [place for place in places if not (place / DONE).exists()]


def _take_over(loaded: LoadedStudy, cell: Cell, place: Path, studies: Path, say: Say) -> None:
    """Copies the finished run of another study where the recipes say the same.

    Raises:
        ConfigError: they do not.
    """
    same_as = arm_of(loaded.study, cell.arm).same_as
    if same_as is None or (place / DONE).exists():
        return
    study, _, arm = same_as.partition("/")
    other = studies / study / "runs" / cell.model_copy(update={"arm": arm}).place
    if not (other / DONE).exists():
        return  # not there: made here
    one, two = (_without_name(folder / RECIPE) for folder in (place, other))
    if one != two:
        raise ConfigError(f"{place.name} is to be the same as {other}, but their recipes differ: {one} and {two}")
    for name in (RUN, LOG, DONE):
        copy = shutil.copytree if (other / name).is_dir() else shutil.copyfile
        copy(other / name, place / name)
    say(f"{place.name}: taken over from {same_as}")


def _without_name(path: Path) -> dict[str, Any]:
    tree = load_recipe(path).model_dump()
    tree["run"].pop("name")
    return tree


def _work(places: Sequence[Path], jobs: int, say: Say, what: str) -> None:
    """Gives the directories to worker processes; returns when all are done.

    Raises:
        ConfigError: a job cannot be done.
        RunError: a worker died; the other runs are made all the same.
    """
    if not places:
        return
    say(f"{len(places)} {what}{'s' if len(places) > 1 else ''} to make, {jobs} at a time")
    crew = _Crew(places, say)
    threads = [threading.Thread(target=crew.serve, daemon=True) for _ in range(min(jobs, len(places)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        crew.end()
        raise
    if crew.refused:
        raise ConfigError(crew.refused[0])
    if crew.died:
        raise RunError("; ".join(crew.died) + "; gspo study run makes the missing runs again")


class _Crew:
    """Worker processes and the jobs that they share."""

    def __init__(self, places: Sequence[Path], say: Say) -> None:
        self.total, self.done, self.say = len(places), 0, say
        self.refused: list[str] = []  # jobs that cannot be done: nothing else is begun
        self.died: list[str] = []  # jobs during which a worker died
        self._queue: SimpleQueue[Path] = SimpleQueue()
        for place in places:
            self._queue.put(place)
        self._workers: list[subprocess.Popen[str]] = []

    def serve(self) -> None:
        """One worker after another, until there is nothing left to do."""
        worker = self._hire()
        while not self.refused:
            try:
                place = self._queue.get_nowait()
            except Empty:
                break
            answer = _give(worker, place)
            if answer is None:
                worker.wait()
                self.died.append(f"{place.name} died with status {worker.returncode}; see {place / LOG}")
                self.say(self.died[-1])
                worker = self._hire()
            elif answer["error"] is not None:
                self.refused.append(f"{place.name}: {answer['error']}")
            else:
                self._tell(place)
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()

    def end(self) -> None:
        """Stops every worker at once; what they were at is made again next time."""
        for worker in self._workers:
            worker.kill()

    def _hire(self) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "gspo.study.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        self._workers.append(worker)
        return worker

    def _tell(self, place: Path) -> None:
        self.done += 1
        found = json.loads((place / DONE).read_text(encoding="utf-8"))
        tail = f" ({found['message']})" if found["message"] else ""
        self.say(f"{self.done}/{self.total} {place.name}: {found['status']} in {found['seconds']:.0f} s{tail}")


def _give(worker: subprocess.Popen[str], place: Path) -> dict[str, Any] | None:
    """Has a worker do one job; its answer, or None if it died."""
    shutil.rmtree(place / RUN, ignore_errors=True)  # of an attempt that was broken off
    (place / RECORDS).unlink(missing_ok=True)
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{place}\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    return dict(json.loads(answer)) if answer else None
