"""The manifest of a checkpoint: what every file of it must be, down to the single tensor.

A safetensors file is an eight-byte length, a JSON header and the bytes of the tensors. The header is digested on its
own and each tensor on its own, so that damage is named by tensor; other files are digested whole. Nothing is
unpickled anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gspo.errors import ModelError
from gspo.events import sync_path, write_json

NAME = "manifest.json"
FORMAT = 1
_CHUNK = 1 << 22
_HEADER_LIMIT = 100_000_000  # the safetensors format's own


def write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    """Digests every file below ``directory``, syncs it, and writes the manifest last; ``facts`` go beside.

    Raises:
        OSError: the disk is full or failing.
    """
    files: dict[str, Any] = {}
    for path in _files(directory):
        files[path.relative_to(directory).as_posix()] = _describe(path)
        sync_path(path)
    for folder in sorted({path.parent for path in _files(directory)} - {directory}):
        sync_path(folder)
    write_json(directory / NAME, {"format": FORMAT, **facts, "files": files})


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest; None if there is none.

    Raises:
        ModelError: it cannot be read as one.
    """
    path = directory / NAME
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: damaged, not a manifest ({error})") from error
    if version != FORMAT or not isinstance(files, dict):
        raise ModelError(f"{path}: has format {version!r}; this build reads format {FORMAT}")
    return dict(manifest)


def verify(directory: Path) -> dict[str, Any]:
    """Compares every file with the manifest and returns the manifest.

    Raises:
        ModelError: there is none, or a file is missing, shorter, longer or changed; names the file and, where one
            is hit, the tensor.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise ModelError(f"{directory}: has no {NAME}; it was not written to its end, or not by gspo")
    for name, wanted in manifest["files"].items():
        path = directory / name
        try:
            found = _describe(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {_reason(error)}; the checkpoint is damaged") from error
        if found != wanted:
            raise ModelError(f"{path}: {_difference(found, wanted)}; the checkpoint is damaged")
    return manifest


def _reason(error: OSError | ValueError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / NAME)


def _describe(path: Path) -> dict[str, Any]:
    """Size and digest of a file; of safetensors also shape, dtype and digest of every tensor.

    Raises:
        OSError: missing or unreadable.
        ValueError: a safetensors file that is not one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return {"size": size, "digest": _digest(file, size)}
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"is cut off: {size} bytes, and its header alone says {length}")
        header = file.read(length)
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {}
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]):
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            tensors[name] = {
                "dtype": entry["dtype"],
                "shape": entry["shape"],
                "digest": _digest(file, end - start),
            }
    return {"size": size, "digest": hashlib.blake2b(header, digest_size=16).hexdigest(), "tensors": tensors}


def _digest(file: BinaryIO, count: int) -> str:
    """Of the next ``count`` bytes. Raises ValueError if the file ends before."""
    digest = hashlib.blake2b(digest_size=16)
    while count:
        chunk = file.read(min(count, _CHUNK))
        if not chunk:
            raise ValueError(f"is cut off: {count} bytes are missing")
        digest.update(chunk)
        count -= len(chunk)
    return digest.hexdigest()


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    if found["size"] != wanted["size"]:
        return f"has {found['size']} bytes instead of {wanted['size']}"
    if found["digest"] != wanted["digest"] or "tensors" not in found:
        return "its bytes are not those that were written (digest differs)"
    ours, theirs = found["tensors"], wanted.get("tensors", {})
    changed = [name for name in theirs if ours.get(name) != theirs[name]]
    return f"tensor {changed[0] if changed else '?'} is not the one that was written (digest differs)"
