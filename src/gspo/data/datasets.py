"""Rows from JSONL, Parquet and Hugging Face dataset directories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.errors import DataError, InputError

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
#: How files begin that have a text file's name and are something else.
_NOT_TEXT = {
    b"\x1f\x8b": "compressed (gzip); unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"PAR1": "a Parquet file; name it .parquet",
    b"\xff\xfe": "UTF-16; convert it, e.g. with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16; convert it, e.g. with iconv -f UTF-16 -t UTF-8",
}
_FORMS = "JSONL (.jsonl), Parquet (.parquet) or a Hugging Face dataset directory"


@dataclass(frozen=True)
class Row:
    """One row of a file and where it stands: ``file.jsonl:12`` (line), ``file.parquet:12`` (row, from 1)."""

    place: str
    values: Mapping[str, Any]


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a data set, without their places. See ``read_rows``."""
    return [dict(row.values) for row in read_rows(path)]


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a file or directory, in order.

    Raises:
        DataError: nothing there, an unknown form, a broken line (named), or no rows.
        InputError: the extra ``data`` is needed and not installed.
    """
    rows, faults = scan_rows(path)
    if faults:
        raise DataError(faults[0])
    return rows


def scan_rows(path: str | Path) -> tuple[list[Row], list[str]]:
    """The rows that can be read, and a sentence for each line that cannot (file and line are named).

    Raises:
        DataError: nothing there, an unknown form, a file that is damaged as a whole, or neither rows nor broken lines.
        InputError: the extra ``data`` is needed and not installed.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"there is no data file or directory {str(path)!r}{_nearest_file(path)}")
    found = _read_directory(path) if path.is_dir() else _read_file(path)
    rows = [row for row in found if isinstance(row, Row)]
    faults = [fault for fault in found if isinstance(fault, str)]
    if not rows and not faults:
        raise DataError(f"{path} has no rows")
    return rows, faults


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    close = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {str(path.parent / close[0])!r}?" if close else ""


def _read_file(path: Path) -> list[Row | str]:
    suffix = path.suffix.lower()
    if suffix in _JSON_SUFFIXES:
        return list(_read_jsonl(path))
    if suffix == ".parquet":
        return list(_read_parquet(path))
    packed = "; unpack it first" if suffix in (".gz", ".bz2", ".xz", ".zst", ".zip") else ""
    raise DataError(f"{path} has the unknown suffix {suffix!r}; data are {_FORMS}{packed}")


def _read_jsonl(path: Path) -> Iterator[Row | str]:
    """One JSON object per line; blank lines are skipped, a byte order mark at the start is dropped."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    for start, what in _NOT_TEXT.items():
        if content.startswith(start):
            raise DataError(f"{path} is not text in UTF-8 but {what}")
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[0].strip() == b"[":
        raise DataError(f"{path} is one JSON array; write one object per line instead (JSONL)")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Row(f"{path.name}:{number}", _parse_line(line, str(path), number, last=number == len(lines)))
            except DataError as error:
                yield str(error)


def _parse_line(line: bytes, file: str, number: int, last: bool) -> dict[str, Any]:
    where = f"{file}, line {number}"
    if b"\x00" in line:
        raise DataError(f"{where}: holds a NUL byte at column {line.index(0) + 1}; the file is damaged")
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_columns_once)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        torn = "; the last line seems to be cut off" if last else ""
        raise DataError(f"{where}, column {error.colno}: is not JSON ({error.msg}){torn}") from error
    except RecursionError as error:
        raise DataError(f"{where}: is nested too deeply") from error
    except ValueError as error:  # a name that is there twice; an integer too long to be read
        raise DataError(f"{where}: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: holds a JSON {type(values).__name__}; each line must be an object with columns")
    return values


def _columns_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets an object name a column twice, and readers then keep the last one in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"names {twice!r} twice; which of the two is meant?")
    return values


def _read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"reading {path} needs an extra: pip install 'gspo[data]'") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error
    return [Row(f"{path.name}:{number}", row) for number, row in enumerate(table.to_pylist(), start=1)]


def _read_directory(path: Path) -> list[Row | str]:
    if (path / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise DataError(f"{path} holds several splits ({', '.join(splits)}); name one, e.g. {str(path / splits[0])!r}")
    if (path / "state.json").exists():
        return list(_read_saved_dataset(path))
    for pattern in ("*.parquet", "*.jsonl"):
        files = sorted(path.rglob(pattern))
        if files:
            _refuse_several_splits(path, files)
            return [_below(file.relative_to(path), row) for file in files for row in _read_file(file)]
    raise DataError(f"the directory {path} holds no data; data are {_FORMS}")


def _below(name: Path, row: Row | str) -> Row | str:
    """A row of a file inside a directory, placed by the file's path in it."""
    return row if isinstance(row, str) else Row(f"{name}:{row.place.rpartition(':')[2]}", row.values)


def _refuse_several_splits(path: Path, files: list[Path]) -> None:
    """``train-00000-of-00002.parquet`` beside ``test-...`` must not be mixed in silence."""
    known = ("train", "test", "validation", "valid", "val", "dev", "eval")
    found = {split for file in files for split in known if file.name.split("-")[0].split(".")[0].lower() == split}
    if len(found) > 1:
        raise DataError(
            f"{path} holds several splits ({', '.join(sorted(found))}); name one file, e.g. {str(files[0])!r}"
        )


def _read_saved_dataset(path: Path) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"reading the dataset directory {path} needs an extra: pip install 'gspo[data]'") from error
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a readable dataset directory: {error}") from error
    return [Row(f"{path.name}:{number}", dict(row)) for number, row in enumerate(dataset, start=1)]


def column(row: Row, name: str) -> Any:
    """The value of a column.

    Raises:
        DataError: the row lacks it; the nearest column is named.
    """
    if name in row.values:
        return row.values[name]
    close = get_close_matches(name, list(row.values), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise DataError(f"{row.place} has no column {name!r} (it has {', '.join(map(repr, row.values)) or 'none'}){hint}")
