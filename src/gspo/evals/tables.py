"""Rows of the files that users bring, each with its place: JSONL, JSON arrays, CSV, Parquet, dataset directories."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.data.datasets import read_rows
from gspo.errors import DataError

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Record:
    """One row, and where it stands."""

    place: str  # "aime.jsonl, line 3"; "aime.parquet, row 3"
    values: Mapping[str, Any]

    def get(self, column: str) -> Any:
        """The value of a column; ``a.b`` goes into an object.

        Raises:
            DataError: it is not there or null.
        """
        value: Any = self.values
        for part in column.split("."):
            if not isinstance(value, Mapping) or value.get(part) is None:
                raise DataError(f"{self.place}: has no column {column!r}{self._hint(column)}")
            value = value[part]
        return value

    def text(self, column: str) -> str:
        """The value of a column as text that is not blank.

        Raises:
            DataError: it is not.
        """
        value = self.get(column)
        if not isinstance(value, str):
            raise self.fault(column, f"holds {_kind(value)} where text is needed")
        if not value.strip():
            raise self.fault(column, "is empty")
        return value

    def fault(self, column: str, message: str) -> DataError:
        """The error that says what is wrong with a column of this row."""
        return DataError(f"{self.place}, column {column!r}: {message}")

    def _hint(self, column: str) -> str:
        close = get_close_matches(column, list(self.values), n=1)
        known = ", ".join(map(repr, self.values)) or "none"
        return f"; did you mean {close[0]!r}?" if close and close[0] != column else f"; it has {known}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def read_records(path: str | Path) -> list[Record]:
    """All rows of a file or directory, in order.

    Raises:
        DataError: not there, of an unknown form, damaged (with line and column), or without rows.
        InputError: the extra ``data`` is needed and not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_file() and suffix == ".csv":
        records = list(_read_csv(path))
    elif path.is_file() and suffix in (".json", ".jsonl") and _text(path).lstrip(_SPACE).startswith("["):
        records = list(_read_array(path))
    else:
        return [Record(_place(row.place, path), row.values) for row in read_rows(path)]
    if not records:
        raise DataError(f"{path} has no rows")
    return records


def read_all(paths: Sequence[str | Path]) -> list[Record]:
    """The rows of several files, one after the other."""
    return [record for path in paths for record in read_records(path)]


def _place(place: str, path: Path) -> str:
    name, _, number = place.rpartition(":")
    lines = Path(name).suffix.lower() in (".jsonl", ".ndjson", ".json")
    return f"{name}, {'line' if lines else 'row'} {number}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: is not UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read_csv(path: Path) -> Iterator[Record]:
    """A header and records; a record may span lines, its place is its first one. Empty cells are missing."""
    reader = csv.reader(_text(path).splitlines(keepends=True), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise DataError(f"{path}, line 1: names a column twice ({', '.join(header)})")
        start = reader.line_num + 1
        for cells in reader:
            if cells:
                if len(cells) != len(header):
                    raise DataError(f"{path}, line {start}: has {len(cells)} cells where the header has {len(header)}")
                values = {name: cell for name, cell in zip(header, cells, strict=True) if cell != ""}
                yield Record(f"{path.name}, line {start}", values)
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: is not CSV ({error})") from error


def _read_array(path: Path) -> Iterator[Record]:
    """A JSON array of objects; the place of each is the line on which it begins."""
    text = _text(path)
    decoder = json.JSONDecoder()
    position, line, counted = text.index("[") + 1, 1, 0
    while True:
        position = _skip(text, position)
        if text[position : position + 1] == "]":
            return
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}, column {error.colno}: is not JSON ({error.msg})") from error
        except RecursionError as error:
            raise DataError(f"{path}, line {line}: is nested too deeply") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {line}: holds {_kind(value)}; each element must be an object with columns")
        yield Record(f"{path.name}, line {line}", value)
        position = _skip(text, position)
        if text[position : position + 1] not in (",", "]"):
            at = text.count("\n", 0, position) + 1
            column = position - text.rfind("\n", 0, position)
            raise DataError(f"{path}, line {at}, column {column}: is not JSON (a comma or ] is missing)")
        position += text[position] == ","


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def file_digests(paths: Sequence[Path]) -> list[dict[str, str]]:
    """Name and SHA-256 of each file; of a directory, of every file in it."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    found = []
    for file in files:
        if file.is_file():
            with file.open("rb") as stream:
                found.append({"name": file.name, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()})
    return found
