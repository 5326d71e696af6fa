"""``events.jsonl``, written and read. Where it lies is ``run_directory.py``'s."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gspo.errors import DataError
from gspo.events.files import append, plain
from gspo.events.metrics import find_metric
from gspo.events.schema import EVENT_TYPES
from gspo.events.secrets import redact

#: Events that are synced to the disk as they are written; the others go to the operating system and follow with them.
SYNCED = frozenset({"start", "step", "calibration", "evaluation", "checkpoint", "go_back", "end"})


class EventWriter:
    """Appends events to ``events.jsonl``, one line each, handed to the operating system at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._closed = False

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return os.fstat(self._file).st_size

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Writes one event and returns it as a reader will see it.

        Non-finite numbers become null and are named, with what they were, in ``non_finite``.
        Numpy and torch scalars become plain numbers; secrets of the environment, the names of their variables.

        Raises:
            ValueError: an unknown kind, a missing field, or a metric that ``METRICS`` does not list.
            RunError: the disk did not take it; no part of the line is left.
        """
        _check_fields(kind, fields)
        non_finite: dict[str, str] = {}
        event = {"type": kind, "time": time.time(), **{k: plain(v, k, non_finite) for k, v in fields.items()}}
        if non_finite:
            event["non_finite"] = non_finite
        line = json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"
        append(self._file, redact(line).encode(), self._path)
        if kind in SYNCED:
            self.sync()
        return event

    def sync(self) -> None:
        """Returns once everything written so far is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_fields(kind: str, fields: Mapping[str, Any]) -> None:
    if kind not in EVENT_TYPES:
        raise ValueError(f"unknown event type {kind!r}; the types are {', '.join(EVENT_TYPES)}")
    reserved = {"type", "time", "non_finite"} & fields.keys()
    if reserved:
        raise ValueError(f"event {kind!r}: the writer itself fills in {', '.join(sorted(reserved))}")
    missing = EVENT_TYPES[kind].__required_keys__ - fields.keys() - {"type", "time"}  # type: ignore[attr-defined]
    if missing:
        raise ValueError(f"event {kind!r} lacks {', '.join(sorted(missing))}")
    for name in fields.get("metrics", ()):
        info = find_metric(name)
        if info is None:
            raise ValueError(
                f"event {kind!r}: metric {name!r} is not registered; add it to METRICS and docs/metrics.md"
            )
        if kind not in info.levels:
            raise ValueError(f"metric {name!r} belongs to {' and '.join(info.levels)} events, not to {kind!r}")


@dataclass(frozen=True)
class EventLog:
    """The events of a file, oldest first."""

    events: list[dict[str, Any]]
    torn: str | None = None  # a sentence about a last line that was cut off while being written

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


def read_event_log(path: Path) -> EventLog:
    """Reads ``events.jsonl``. A last line without its end, as a killed process leaves one, is told apart.

    Raises:
        DataError: no such file, or another line is not a JSON object with a type (with its number).
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot read the events of this run ({error.strerror})") from error
    events = [_parse_line(line, path, number) for number, line in enumerate(lines, 1)]
    if not rest:
        return EventLog(events)
    try:  # complete but for its newline: nothing is lost
        return EventLog([*events, _parse_line(rest, path, len(lines) + 1)])
    except DataError:
        return EventLog(events, f"{path}:{len(lines) + 1}: the last line was cut off while being written; left out")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file; a torn last line is left out with a Python warning. See :func:`read_event_log`."""
    log = read_event_log(path)
    if log.torn:
        warnings.warn(log.torn, stacklevel=2)
    return log.events


def _parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}:{number}: not a JSON object ({error}); the file was changed or damaged") from error
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise DataError(f'{path}:{number}: not an event: a JSON object with a "type" is needed')
    return event
