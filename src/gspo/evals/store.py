"""What an evaluation has done so far, on disk: responses and grades, problem by problem.

::

    DIR/samples.jsonl   the responses: {"id": .., "answers": [{"text", "num_tokens", "stop_reason"}, ..], "check": ..}
    DIR/grades.jsonl    the grades:    {"id": .., "grades": [{"value", "verdict", ..}, ..], "check": ..}

The first line of each file says what it belongs to (digests of data, prompts, model, protocol, judge). ``check`` is a
digest of the rest of its line. Lines are synced as they are written; at a start everything from the first damaged line
on is cut off, and done again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gspo.errors import DataError, RunDirectoryError
from gspo.events import append, sync_path

_CHECK = "check"


class Store:
    """One such file; a record per problem, kept in memory too.

    Args:
        path: made with its first record; its directory must exist.
        identity: what the records depend on, as text by name.
        warn: told, in a sentence, about lines that cannot be used.

    Raises:
        RunDirectoryError: the file belongs to another evaluation; says in what they differ.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, str], warn: Callable[[str], None] = lambda message: None
    ) -> None:
        self.path = path
        self._identity = dict(identity)
        self._records: dict[str, dict[str, Any]] = {}
        self._file = _open(path)
        try:
            if os.fstat(self._file).st_size:
                self._read(warn)
            if os.fstat(self._file).st_size == 0:
                self._append({"identity": self._identity})
                sync_path(path.parent)
        except BaseException:
            self.close()  # and with it the lock
            raise

    def get(self, problem_id: str) -> dict[str, Any] | None:
        """The record of a problem, or None."""
        return self._records.get(problem_id)

    def known(self, problem_id: str) -> dict[str, Any]:
        """The record of a problem that has one."""
        return self._records[problem_id]

    def write(self, problem_id: str, **fields: Any) -> None:
        """Appends a record; returns once it is on the disk.

        Raises:
            RunError: the disk did not take it.
        """
        record = {"id": problem_id, **fields}
        self._append(record)
        self._records[problem_id] = record

    def close(self) -> None:
        os.close(self._file)

    def _append(self, record: Mapping[str, Any]) -> None:
        append(self._file, sealed(record), self.path)
        os.fsync(self._file)

    def _read(self, warn: Callable[[str], None]) -> None:
        records, good, damaged = read_sealed(self.path)
        if records:
            self._compare(records[0].get("identity"))
        elif not _is_torn(self.path):
            raise RunDirectoryError(
                f"{self.path}: is not a file of gspo eval, or its first line is damaged; choose another --out"
            )
        if damaged is not None:
            warn(f"{self.path}, line {damaged}: cut off or damaged; it and what follows is done again")
            os.ftruncate(self._file, good)
        self._records = {str(record["id"]): record for record in records[1:]}

    def _compare(self, found: Any) -> None:
        if not isinstance(found, Mapping):
            raise RunDirectoryError(f"{self.path}: does not say what it belongs to; choose another --out")
        changed = [name for name in {**found, **self._identity} if found.get(name) != self._identity.get(name)]
        if changed:
            raise RunDirectoryError(
                f"{self.path}: belongs to an evaluation with another {', another '.join(sorted(changed))}; "
                "continue that one with its own options, or choose another --out"
            )


def _open(path: Path) -> int:
    """The file, open for appending and locked for this process."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunDirectoryError(
            f"{path}: another evaluation is writing to it; wait for that one, or choose another --out"
        ) from error
    return descriptor


def sealed(record: Mapping[str, Any]) -> bytes:
    """A record as a line with its check."""
    return (json.dumps({**record, _CHECK: _check_of(record)}, ensure_ascii=True) + "\n").encode()


def read_sealed(path: Path) -> tuple[list[dict[str, Any]], int, int | None]:
    """The records up to the first damaged line, the bytes they take, and the number of that line (None: none)."""
    records: list[dict[str, Any]] = []
    good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line)
            if record is None:
                return records, good, number
            records.append(record)
            good += len(line)
    return records, good, None


def _is_torn(path: Path) -> bool:
    """Whether a file is nothing but a first line that was cut off while it was written."""
    content = path.read_bytes()
    return content.startswith(b'{"identity"') and b"\n" not in content


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.pop(_CHECK, None) != _check_of(record):
        return None
    return record


def _check_of(record: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, ensure_ascii=True).encode(), digest_size=8).hexdigest()


def read_samples(path: Path) -> dict[str, list[str | Mapping[str, Any]]]:
    """Responses by problem id from a file that the user brings.

    Each line is ``{"id": .., "responses": [text, ..]}`` or ``{"id": .., "response": text}`` (lines of one id add up);
    the ``samples.jsonl`` of an earlier evaluation is read too.

    Raises:
        DataError: a line that has none of these forms, or damage; names the line.
    """
    from gspo.evals.tables import read_records  # read_records reads what users bring, this module what we wrote

    found: dict[str, list[str | Mapping[str, Any]]] = {}
    for record in read_records(path):
        values = record.values
        if "identity" in values and "id" not in values:
            continue
        if values.get("id") in (None, ""):
            raise record.fault("id", "is missing; it names the problem that the responses answer")
        if _CHECK in values:
            rest = {name: value for name, value in values.items() if name != _CHECK}
            if values[_CHECK] != _check_of(rest):
                raise DataError(f"{record.place}: was changed or damaged since it was written")
        given = values.get("responses", values.get("answers"))
        if given is None and "response" in values:
            given = [values["response"]]
        if not isinstance(given, list) or not all(isinstance(g, str) or _is_answer(g) for g in given):
            raise record.fault("responses", "must be a list of texts")
        found.setdefault(str(values["id"]), []).extend(given)
    return found


def _is_answer(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("text"), str)
