"""The shipped files of the sets, and how they are made."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.data.sets import contests, integers, programs
from gspo.errors import DataError

SEED = 2507
_MAKERS = {"integers": integers.make, "programs": programs.make, "contests": contests.make}
NAMES = tuple(_MAKERS)


def make_set(name: str, seed: int = SEED) -> list[dict[str, Any]]:
    """The rows of a set, made and proved again.

    Raises:
        DataError: an unknown name.
        AssertionError: two ways to an integer answer disagree (a fault of ours).
    """
    _check(name)
    return _MAKERS[name](seed)


def set_path(name: str) -> Path:
    """The shipped file, JSON lines; good for ``[data] path``."""
    _check(name)
    return Path(__file__).with_name(f"{name}.jsonl")


def load_set(name: str) -> list[dict[str, Any]]:
    """The shipped rows."""
    with set_path(name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_sets(directory: Path, seed: int = SEED) -> list[Path]:
    """Makes all sets and writes one file each."""
    paths = []
    for name in NAMES:
        path = directory / f"{name}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in make_set(name, seed)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def _check(name: str) -> None:
    if name not in _MAKERS:
        close = get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"there is no set {name!r}; there are {', '.join(NAMES)}{hint}")
