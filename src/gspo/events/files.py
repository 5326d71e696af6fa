"""How bytes and JSON reach the disk.

What is written survives the process that wrote it; what is synced survives the machine. A file that is replaced is
written beside, synced, renamed, and its directory synced (:func:`replace_file`). What the files mean is not known here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.errors import RunError
from gspo.events.secrets import redact


def append(descriptor: int, data: bytes, path: Path) -> None:
    """Appends all of ``data`` or, where the disk does not take it, nothing.

    Raises:
        RunError: the disk is full or failing; names the file.
    """
    before = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
    except OSError as error:
        os.ftruncate(descriptor, before)
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> RunError:
    """What is said of a file that the disk did not take."""
    return RunError(
        f"{path}: cannot be written ({error.strerror}); free space or mend the disk, then continue with "
        "gspo train --resume"
    )


def write_all(descriptor: int, data: bytes) -> None:
    """Writes every byte; the system may take them in several pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Writes beside the target, syncs, renames: a reader, and a machine that stops, see all of it or nothing."""
    beside = path.with_name(path.name + ".tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(beside, path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Returns once a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """:func:`replace_file` with JSON. Non-finite numbers become null; secrets of the environment, their names."""
    text = json.dumps(plain(value, path.name, {}), indent=2, ensure_ascii=False, allow_nan=False)
    replace_file(path, (redact(text) + "\n").encode())


def plain(value: Any, where: str, non_finite: dict[str, str]) -> Any:
    """``value`` in JSON's types; ``where`` names it, e.g. ``metrics.loss``."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # Half a surrogate pair cannot be written as UTF-8, and decoders of sampled bytes do produce some.
        return str(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        non_finite[where] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, Path):
        return plain(str(value), where, non_finite)
    if isinstance(value, Sequence):
        return [plain(item, f"{where}.{index}", non_finite) for index, item in enumerate(value)]
    if callable(getattr(value, "item", None)):  # a numpy or torch scalar
        return plain(value.item(), where, non_finite)
    raise ValueError(f"event field {where} is a {type(value).__name__}, which JSON does not have")
