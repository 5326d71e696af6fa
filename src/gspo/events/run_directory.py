"""The run directory: made, locked, described, opened again to be continued.

What is in it is told in ``gspo.events``; checkpoints and journal are written by ``train``.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from gspo.errors import RunDirectoryError
from gspo.events.files import not_written, replace_file, sync_path, write_json
from gspo.events.log import EventWriter, read_event_log


@dataclass
class RunDirectory:
    """A run directory, and the right to write to it while ``lock`` is held.

    >>> with RunDirectory.create(path, command=["gspo", "train"], config_text="...") as run:  # doctest: +SKIP
    ...     with run.event_writer() as events:
    ...         events.write("warning", message="hello")
    """

    path: Path
    lock: TextIO | None = field(default=None, repr=False)

    recipe_path = property(lambda self: self.path / "recipe.toml")
    info_path = property(lambda self: self.path / "run.json")
    events_path = property(lambda self: self.path / "events.jsonl")
    summary_path = property(lambda self: self.path / "summary.json")
    checkpoints_path = property(lambda self: self.path / "checkpoints")
    journal_path = property(lambda self: self.path / "journal")

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        command: Sequence[str] = (),
        config_text: str = "",
        versions: Mapping[str, str] | None = None,
        seed: int = 0,
        host: Mapping[str, Any] | None = None,
    ) -> Self:
        """Makes the directory (parents too), locks it and writes recipe.toml and run.json.

        Versions and host facts of this process are added to the given ones (``versions``, ``host``).

        Raises:
            RunDirectoryError: in use by another process, already holding a run, holding other files, or
                not writable.
        """
        run = cls(Path(path))
        _refuse_foreign(run)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            sync_path(run.path.parent)
            run.lock = _acquire(run.path)
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {run.path}: cannot be made ({error.strerror}); choose another --run-dir"
            ) from error
        try:
            _refuse_old_run(run)
            shutil.rmtree(run.journal_path, ignore_errors=True)  # of an attempt that trained nothing
            replace_file(run.recipe_path, config_text.encode())
            info = {
                "command": list(command),
                "versions": {**package_versions(), **(versions or {})},
                "seed": seed,
                "started": time.time(),
                "host": {**_host(), **(host or {})},
            }
            run.events_path.touch()
            write_json(run.info_path, info)  # the last: with it the directory holds a run
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def reopen(cls, path: Path | str) -> Self:
        """Locks the directory of a run that was made before, to continue it.

        Raises:
            RunDirectoryError: holds no run, or is in use by another process.
        """
        run = cls(Path(path))
        if not run.info_path.is_file() or not run.recipe_path.is_file():
            raise RunDirectoryError(
                f"{path} holds no run to continue (no run.json and recipe.toml); give the --run-dir of a run that "
                "was started"
            )
        run.lock = _acquire(run.path)
        return run

    def info(self) -> dict[str, Any]:
        """What run.json says. Raises RunDirectoryError if it cannot be read."""
        try:
            found = json.loads(self.info_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.info_path}: cannot be read ({error}); the run cannot be identified") from (
                error
            )
        return dict(found)

    def note_resume(self, **fields: Any) -> None:
        """Adds one entry, with the time, to the list ``resumed`` of run.json. Raises RunError on a full disk."""
        info = self.info()
        _write(self.info_path, {**info, "resumed": [*info.get("resumed", []), {"time": time.time(), **fields}]})

    def cut_events(self, size: int) -> None:
        """Leaves the first ``size`` bytes of events.jsonl: what a checkpoint knows of. The rest will come again.

        Raises:
            RunDirectoryError: there are fewer, or the cut is not at the end of a line.
        """
        with self.events_path.open("a+b") as file:
            have = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if have < size or (size and file.read(1) != b"\n"):
                raise RunDirectoryError(
                    f"{self.events_path}: has {have} bytes and no event that ends at byte {size}, where the checkpoint "
                    "was taken; the file was changed or damaged"
                )
            file.truncate(size)
            os.fsync(file.fileno())

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` belongs (not created here)."""
        return self.checkpoints_path / f"step-{step:06d}"

    def event_writer(self) -> EventWriter:
        return EventWriter(self.events_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json as a whole or not at all; non-finite numbers become null. Raises RunError as above."""
        _write(self.summary_path, summary)

    def close(self) -> None:
        """Gives the lock back; what is on disk stays."""
        if self.lock is not None:
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # also where a forked child still has the file open
            self.lock.close()
            self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


def _write(path: Path, value: Mapping[str, Any]) -> None:
    try:
        write_json(path, value)
    except OSError as error:
        raise not_written(path, error) from error


def _acquire(path: Path) -> TextIO:
    """The lock file of ``path``, open and locked, with our process id in it."""
    lock = (path / "run.lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise RunDirectoryError(
            f"run directory {path} is in use by pid {owner}; wait for that run or choose another --run-dir"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _refuse_foreign(run: RunDirectory) -> None:
    """Refuses a path that is a file, or a directory with files that no run has written."""
    if run.path.exists() and not run.path.is_dir():
        raise RunDirectoryError(f"run directory {run.path} is a file; choose another --run-dir")
    names = {entry.name for entry in _entries(run.path)}
    if names and "run.lock" not in names and not run.info_path.exists():
        shown = ", ".join(sorted(names)[:3])
        raise RunDirectoryError(
            f"run directory {run.path} holds other files ({shown}) and no run; choose an empty or new --run-dir"
        )


def _refuse_old_run(run: RunDirectory) -> None:
    """Refuses a directory in which anything was trained or evaluated; one that failed before that is used again."""
    if not run.info_path.exists():
        return
    events = read_event_log(run.events_path).events if run.events_path.exists() else []
    kinds = {event["type"] for event in events}
    if not kinds & {"sft", "step", "evaluation", "checkpoint"} and not any(_entries(run.checkpoints_path)):
        run.events_path.unlink(missing_ok=True)
        return
    ends = [event for event in events if event["type"] == "end"]
    state = f"a run with status {ends[-1]['status']!r}" if ends else "a run that did not reach its end"
    raise RunDirectoryError(
        f"run directory {run.path} already holds {state}; continue it with gspo train --resume {run.path}, or choose "
        "another --run-dir"
    )


def _entries(path: Path) -> Iterator[Path]:
    return path.iterdir() if path.is_dir() else iter(())


def package_versions() -> dict[str, str]:
    """Versions of what matters for the numbers, read from the installed metadata (nothing is imported)."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("gspo", "torch", "transformers", "numpy", "tokenizers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _host() -> dict[str, Any]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.system(), "machine": platform.machine(), "num_cpus": cpus}
