"""Rows of users' files, and where they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.errors import DataError
from gspo.evals.tables import file_digests, read_records

ROWS = [{"id": "a", "n": 1}, {"id": "b", "n": {"deep": [2]}}, {"id": "c", "n": 3}]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("indent", [None, 0, 3])
def test_jsonl_and_arrays_give_the_same_rows_with_their_lines(tmp_path: Path, indent: int | None) -> None:
    lines = read_records(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, ROWS))))
    assert [(r.place, r.values) for r in lines] == [(f"a.jsonl, line {n}", row) for n, row in enumerate(ROWS, 1)]
    text = json.dumps(ROWS, indent=indent)
    array = read_records(write(tmp_path / "a.json", text))
    assert [record.values for record in array] == ROWS
    starts = [text[: text.index(f'"id": "{row["id"]}"')].rstrip().rstrip("{").count("\n") + 1 for row in ROWS]
    assert [record.place for record in array] == [f"a.json, line {start}" for start in starts]


def test_csv_records_may_span_lines_and_empty_cells_are_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'id,problem,answer\n1,"What is\n2 + 2?",4\n\n2,,5\n')
    first, second = read_records(path)
    assert (first.place, first.values) == ("a.csv, line 2", {"id": "1", "problem": "What is\n2 + 2?", "answer": "4"})
    assert second.place == "a.csv, line 5"
    with pytest.raises(DataError, match=r"a\.csv, line 5: has no column 'problem'"):
        second.text("problem")


def test_parquet_has_rows(tmp_path: Path) -> None:
    records = read_records(parquet(tmp_path / "a.parquet", [{"id": "x"}, {"id": "y"}]))
    assert [(record.place, record.get("id")) for record in records] == [
        ("a.parquet, row 1", "x"),
        ("a.parquet, row 2", "y"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '[{"id": 1},\n {"id": 2,]', r"line 2, column 11: is not JSON"),
        ("a.json", '[{"id": 1}\n {"id": 2}]', r"line 2, column 2: is not JSON \(a comma or \] is missing\)"),
        ("a.json", '[{"id": 1},\n 7]', r"line 2: holds a number; each element must be an object"),
        ("a.json", '[{"id": 1},', r"is not JSON"),
        ("a.json", "[]", r"has no rows"),
        ("a.json", "[" * 100_000, r"line 1.*nested too deeply|line 1.*is not JSON|holds a list"),
        ("a.jsonl", '{"id": 1}\n{"id": 2', r"line 2, column \d+: is not JSON"),
        ("a.csv", "a,b\n1,2\n3\n", r"a\.csv, line 3: has 1 cells where the header has 2"),
        ("a.csv", "a,a\n1,2\n", r"line 1: names a column twice"),
        ("a.csv", 'a,b\n"1,2\n', r"is not CSV"),
        ("a.csv", "", r"has no rows"),
        ("a.txt", "x", r"unknown suffix"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_records(write(tmp_path / name, text))


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,\xff\n")
    with pytest.raises(DataError, match=r"a\.csv, line 2: is not UTF-8"):
        read_records(path)


def test_values_are_looked_up_by_path_and_type(tmp_path: Path) -> None:
    record = read_records(write(tmp_path / "a.jsonl", json.dumps({"problem": "p", "m": {"gold": 4}, "empty": " "})))[0]
    assert record.get("m.gold") == 4
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: has no column 'probelm'; did you mean 'problem'\?"):
        record.get("probelm")
    with pytest.raises(DataError, match=r"line 1: has no column 'm\.other'"):
        record.get("m.other")
    with pytest.raises(DataError, match=r"line 1, column 'm': holds an object where text is needed"):
        record.text("m")
    with pytest.raises(DataError, match=r"line 1, column 'empty': is empty"):
        record.text("empty")


def test_files_are_digested_also_in_directories(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    one = write(tmp_path / "d" / "one.csv", "abc")
    # SHA-256 of "abc" (FIPS 180-2, appendix B.1)
    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digests([one]) == file_digests([tmp_path / "d"]) == [{"name": "one.csv", "sha256": sha}]
