import json

import pytest

from gspo.data.datasets import Row, column, load_rows, read_rows
from gspo.errors import DataError, InputError

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_jsonl(tmp_path):
    path = write(tmp_path / "d.jsonl", jsonl(ROWS))
    assert load_rows(path) == ROWS
    assert [row.place for row in read_rows(path)] == ["d.jsonl:1", "d.jsonl:2"]


def test_blank_lines_byte_order_mark_and_windows_ends_do_not_matter(tmp_path):
    text = "\ufeff" + jsonl(ROWS[:1]) + "\n\r\n" + jsonl(ROWS[1:]).replace("\n", "\r\n")
    rows = read_rows(write(tmp_path / "d.jsonl", text))
    assert [dict(row.values) for row in rows] == ROWS
    assert [row.place for row in rows] == ["d.jsonl:1", "d.jsonl:4"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no rows"),
        (b"\n \n", "has no rows"),
        (b'{"a": 1}\n{"a": ', r"line 2, column 7: is not JSON .*; the last line seems to be cut off"),
        (b'{"a": 1}\n{a: 1}\n{"a": 1}\n', r"line 2, column 2: is not JSON"),
        (b'{"a": 1}\n{"a": "\x00"}\n', r"line 2: holds a NUL byte at column 8"),
        (b'{"a": "\xff"}\n', r"line 1: is not UTF-8 \(byte 8\)"),
        (b"[1, 2]\n", r"line 1: holds a JSON list; each line must be an object"),
        (b'[\n{"a": 1}\n]\n', "is one JSON array; write one object per line"),
        (b'"text"\n', r"line 1: holds a JSON str"),
        (b"[" * 100_000, r"line 1.*(nested too deeply|is not JSON)"),
    ],
)
def test_broken_jsonl_is_named(tmp_path, data, message):
    path = write(tmp_path / "d.jsonl", data)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "train.jsonl", jsonl(ROWS))
    with pytest.raises(DataError, match=r"there is no data file.*did you mean .*train.jsonl"):
        load_rows(tmp_path / "trian.jsonl")


def test_an_unknown_suffix_says_what_works(tmp_path):
    with pytest.raises(DataError, match=r"unknown suffix '.csv'; data are JSONL"):
        load_rows(write(tmp_path / "d.csv", "a,b"))


class TestParquet:
    @pytest.fixture
    def parquet(self):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")

        def save(path, rows):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            return path

        return save

    def test_nested_columns_of_verl(self, parquet, tmp_path):
        row = {
            "data_source": "own/sums",
            "prompt": [{"role": "user", "content": "2+2"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0},
        }
        rows = read_rows(parquet(tmp_path / "d.parquet", [row]))
        assert rows == [Row("d.parquet:1", row)]

    def test_a_broken_file(self, parquet, tmp_path):
        with pytest.raises(DataError, match=r"d.parquet is not a readable Parquet file"):
            load_rows(write(tmp_path / "d.parquet", b"PAR1 nonsense"))

    def test_a_directory_of_files_in_order(self, parquet, tmp_path):
        parquet(tmp_path / "train-00001-of-00002.parquet", ROWS[1:])
        parquet(tmp_path / "train-00000-of-00002.parquet", ROWS[:1])
        rows = read_rows(tmp_path)
        assert [dict(row.values) for row in rows] == ROWS
        assert len({row.place for row in rows}) == 2

    def test_splits_are_not_mixed(self, parquet, tmp_path):
        parquet(tmp_path / "train-00000-of-00001.parquet", ROWS)
        parquet(tmp_path / "test-00000-of-00001.parquet", ROWS)
        with pytest.raises(DataError, match=r"several splits \(test, train\); name one file"):
            load_rows(tmp_path)

    def test_without_the_extra(self, parquet, tmp_path, monkeypatch):
        path = parquet(tmp_path / "d.parquet", ROWS)
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(InputError, match=r"pip install 'gspo\[data\]'"):
            load_rows(path)


class TestSavedDataset:
    def test_rows(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        assert load_rows(tmp_path / "saved") == ROWS

    def test_a_dictionary_of_splits_asks_for_one(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        split = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
        with pytest.raises(DataError, match=r"several splits \(test, train\); name one, e.g. .*test"):
            load_rows(tmp_path / "saved")
        assert load_rows(tmp_path / "saved" / "train") == ROWS

    def test_an_empty_directory(self, tmp_path):
        with pytest.raises(DataError, match="holds no data"):
            load_rows(tmp_path)


def test_a_missing_column_names_the_nearest():
    row = Row("d.jsonl:3", {"prompts": "a", "answer": "1"})
    with pytest.raises(DataError, match=r"d.jsonl:3 has no column 'prompt' \(it has .*\); did you mean 'prompts'\?"):
        column(row, "prompt")
