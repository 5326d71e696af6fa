"""Releases, windows and files of LiveCodeBench; packed tests are read without running anything."""

import base64
import json
import pickle
import tracemalloc
import zlib
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import ConfigError, DataError
from gspo.evals.benchmark import Imported
from gspo.evals.livecodebench import LIVECODEBENCH
from gspo.evals.livecodebench.errata import ERRATA, fault_of
from gspo.evals.livecodebench.files import StoredTests
from gspo.evals.livecodebench.private_tests import decode_private
from gspo.evals.livecodebench.release import (
    RELEASES,
    WINDOWS,
    check_release,
    expected_count,
    make_window,
    release_files,
)

from .live_rows import SCALE, packed, row, write

ANY = {"num_problems": "1"}


@given(st.text(), st.integers(0, 5))
def test_a_packed_string_comes_out_as_it_was(text, protocol):
    assert decode_private(packed(text, protocol)) == text


def test_a_long_string_comes_out_as_it_was():
    """Longer than a frame of the format (64 KiB), with characters of four bytes."""
    text = "𝛼1 " * 100_000
    assert decode_private(packed(text)) == text


class Trap:
    """Would make a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def pack_bytes(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("value", [["a"], 7, None, b"a", ("a", "b"), {"a": "b"}, {"a"}, 1.5, True])
@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_anything_but_a_string_is_refused(value, protocol):
    with pytest.raises(ValueError, match="only strings are read"):
        decode_private(pack_bytes(pickle.dumps(value, protocol)))


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    path = tmp_path / "trap"
    for protocol in range(6):
        with pytest.raises(ValueError, match="only strings are read"):
            decode_private(pack_bytes(pickle.dumps(Trap(path), protocol)))
    assert not path.exists()
    pickle.loads(pickle.dumps(Trap(path))).close()  # the trap works
    assert path.exists()


def test_a_bomb_is_refused_before_it_unfolds():
    """64 MiB of zeros in 64 KiB: at most a little more than the limit is ever in memory."""
    bomb = base64.b64encode(zlib.compress(bytes(64 * 2**20), 9)).decode()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 1048576 bytes"):
            decode_private(bomb, max_decoded_bytes=2**20)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not base64!", "base64"),
        (base64.b64encode(b"plain").decode(), "zlib"),
        (base64.b64encode(zlib.compress(pickle.dumps("a" * 99))[:-6]).decode(), "cut short"),
        (base64.b64encode(zlib.compress(pickle.dumps("a")) + b"x").decode(), "follow the compressed"),
        (pack_bytes(pickle.dumps("a") + b"x"), "follow the pickle"),
        (pack_bytes(pickle.dumps("a")[:-1]), "STOP"),
        (pack_bytes(b""), "STOP"),
        (pack_bytes(b"\x80\x04."), "0 strings"),
        (pack_bytes(b"\x80\x04\x8c\x01\xff\x94."), "damaged"),
        (pack_bytes(b"\x80\x04\x8c\x01a\x8c\x01b."), "2 strings"),
    ],
)
def test_damaged_private_tests_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        decode_private(text)


def test_too_long_a_text_is_refused_before_it_is_decoded():
    with pytest.raises(ValueError, match="more than 10"):
        decode_private("A" * 12, max_encoded_bytes=10)


def test_a_month_is_all_its_days_and_both_ends_are_in():
    window = make_window("2024-10", "2025-02")
    assert (window.first, window.last) == (date(2024, 10, 1), date(2025, 2, 28))
    assert window.holds(date(2024, 10, 1))
    assert window.holds(date(2025, 2, 28))
    assert not window.holds(date(2024, 9, 30))
    assert not window.holds(date(2025, 3, 1))
    assert make_window("2024-02", "2024-02").last == date(2024, 2, 29)
    assert make_window("2024-10-05", "2024-10-05").holds(date(2024, 10, 5))


@pytest.mark.parametrize(
    ("first", "last"), [("2024-13", "2025-01"), ("2024", "2025"), ("2025-02", "2024-10"), ("x", "y")]
)
def test_windows_that_cannot_be_are_refused(first, last):
    with pytest.raises(ConfigError):
        make_window(first, last)


def test_the_same_window_has_other_problems_in_another_release():
    window = make_window("2024-10", "2025-02")
    assert (expected_count("v5", window), expected_count("v6", window)) == (166, 261)
    assert expected_count("v4", window) is None


def test_counts_of_windows_agree_with_each_other():
    """A wider window of a release has at least as many problems, and none more than its files since v4 could add."""
    for (release, first, last), count in WINDOWS.items():
        assert count < RELEASES[release]
        for (other, start, end), more in WINDOWS.items():
            if other == release and start <= first and last <= end:
                assert more >= count
    assert list(RELEASES.values()) == sorted(RELEASES.values())
    assert release_files("v1") == ["test.jsonl"]
    assert release_files("v6")[-1] == "test6.jsonl"


def test_releases_by_either_name():
    assert check_release("release_v5") == check_release("v5") == "v5"
    with pytest.raises(ConfigError, match="v7"):
        check_release("v7")


def test_errata_are_found_by_id_and_by_title():
    assert fault_of("abc343_e", "7x7x7") == ERRATA["abc343_e"]
    assert fault_of("3316", "Find Words Containing Character")
    assert fault_of("abc400_a", "ABC400 Party") == ""


def load(path, **options) -> Imported:
    return LIVECODEBENCH.load([path], {**ANY, **options})


def test_a_file_is_read_and_says_what_it_is(tmp_path):
    path = write(
        tmp_path / "test.jsonl",
        [
            row("abc_b"),
            row("3000", tests=SCALE, function="scale"),
            row("abc_a", "2024-09-30"),
            row("abc_c", "2025-03-01"),
        ],
    )
    imported = load(path, num_problems="2")
    first, second = imported.problems
    assert [problem.id for problem in imported.problems] == ["3000", "abc_b"]
    assert "```python\nclass Solution:" in str(first.prompt)
    assert "standard input" in str(second.prompt)
    assert first.date == "2024-10-05"
    assert first.place == "test.jsonl, line 2"
    assert isinstance(first.gold, StoredTests)
    tests = first.gold.load()
    assert (tests.function, tests.num_public, len(tests.tests)) == ("scale", 1, 2)
    assert tests.tests[1].expected == "[]"
    assert "2 of 4 problems" in imported.notes[0]


def test_private_tests_that_are_plain_json_are_read(tmp_path):
    cases = [{"input": "1\n1\n", "output": "1", "testtype": "stdin"}]
    path = write(tmp_path / "test.jsonl", [row("a", private=json.dumps(cases))])
    assert len(load(path).problems[0].gold.load().tests) == 2


def test_the_digest_depends_on_the_tests_and_not_on_the_file(tmp_path):
    same = [
        write(tmp_path / name, rows)
        for name, rows in (("x.jsonl", [row("a")]), ("y.jsonl", [row("b", "2023-01-01"), row("a")]))
    ]
    other = write(tmp_path / "z.jsonl", [row("a", tests=[("1\n1\n", "1"), ("1\n5\n", "6")])])
    assert load(same[0]).digest == load(same[1]).digest != load(other).digest


def test_a_directory_gives_the_files_of_the_release(tmp_path):
    write(tmp_path / "test.jsonl", [row("a")])
    write(tmp_path / "test5.jsonl", [row("b")])
    write(tmp_path / "test6.jsonl", [row("c")])
    found = LIVECODEBENCH.load([tmp_path], {"num_problems": "2"})
    assert [problem.id for problem in found.problems] == ["a", "b"]
    assert len(LIVECODEBENCH.load([tmp_path], {"num_problems": "3", "release": "v6"}).problems) == 3


def test_a_wrong_count_is_refused_and_explained(tmp_path):
    """261 problems in the window under the name of v5 are those of v6; 100 are too few."""
    path = write(tmp_path / "test.jsonl", [row(f"p{k}") for k in range(261)])
    with pytest.raises(DataError, match=r"166 problems and these files have 261 in it: that is release_v6"):
        LIVECODEBENCH.load([path], {})
    assert len(LIVECODEBENCH.load([path], {"release": "v6"}).problems) == 261
    few = write(tmp_path / "few.jsonl", [row(f"p{k}") for k in range(100)])
    with pytest.raises(DataError, match="are all of them there and whole"):
        LIVECODEBENCH.load([few], {})
    with pytest.raises(DataError, match="not num_problems = 3"):
        LIVECODEBENCH.load([few], {"num_problems": "3"})


def test_a_window_without_a_published_number_says_so(tmp_path):
    path = write(tmp_path / "test.jsonl", [row("a")])
    found = LIVECODEBENCH.load([path], {"from": "2024-10-05", "to": "2024-10-05"})
    assert "not published" in found.notes[0]


def test_errata_are_left_out_only_when_asked(tmp_path):
    path = write(tmp_path / "test.jsonl", [row("abc350_c"), row("abc350_d")])
    kept, without = (load(path, num_problems="2", errata=word) for word in ("keep", "exclude"))
    assert [len(found.problems) for found in (kept, without)] == [2, 1]
    assert kept.facts["errata"]["problems"] == {"abc350_c": "wrong tests"}
    assert any("abc350_c" in note and "kept" in note for note in kept.notes)


def test_calls_that_are_not_json_are_named_and_not_a_reason_to_stop(tmp_path):
    path = write(tmp_path / "test.jsonl", [row("a", tests=[("[1]\n2", "[2]"), ("\n", '""')], function="scale")])
    found = load(path)
    assert any("test 2 is not JSON" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"private_test_cases": "%%"}, "line 1, column 'private_test_cases': neither JSON nor base64"),
        ({"private_test_cases": packed("nonsense")}, "column 'private_test_cases': is not JSON"),
        ({"private_test_cases": packed("{}")}, "not a list of objects"),
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "no tests"),
        ({"public_test_cases": '[{"input": "1", "testtype": "stdin"}]'}, "NoneType as its output"),
        ({"public_test_cases": '[{"input": "1", "output": "1", "testtype": "functional"}]'}, "functional, stdin"),
        ({"contest_date": "soon"}, "column 'contest_date': 'soon' is no ISO date"),
        ({"platform": "spoj"}, "column 'platform': 'spoj'"),
        ({"question_content": ""}, "column 'question_content'"),
        ({"question_id": None}, "column 'question_id'"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_with_line_and_column(tmp_path, change, message):
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path / "test.jsonl", [{**row("a"), **change}]))
    assert "test.jsonl, line 1" in str(caught.value)


def test_a_call_without_the_name_of_its_function_is_refused(tmp_path):
    with pytest.raises(DataError, match="column 'metadata': names no function"):
        load(write(tmp_path / "test.jsonl", [row("a", tests=SCALE, function="scale", metadata="{}")]))


def test_a_missing_column_names_the_nearest(tmp_path):
    values = row("a")
    values["private_tests"] = values.pop("private_test_cases")
    with pytest.raises(DataError, match=r"has no column 'private_test_cases'; did you mean 'private_tests'\?"):
        load(write(tmp_path / "test.jsonl", [values]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question_id": "a"', "line 1, column 20: is not JSON .*cut short"),
        ("\n[1]\n", "line 2: is list"),
        ("", "the window"),
    ],
)
def test_a_file_that_is_no_json_lines_is_refused(tmp_path, text, message):
    path = tmp_path / "test.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load(path)


def test_a_problem_that_is_there_twice_is_refused(tmp_path):
    path = write(tmp_path / "test.jsonl", [row("a"), row("a")])
    with pytest.raises(DataError, match=r"line 2: problem 'a' is in test.jsonl, line 1 too"):
        load(path)


def test_files_that_are_not_there_are_refused(tmp_path):
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(DataError):
            load(path)


def test_a_file_that_changes_while_in_use_is_noticed(tmp_path):
    path = write(tmp_path / "test.jsonl", [row("a")])
    stored = load(path).problems[0].gold
    write(path, [row("a", tests=[("1\n1\n", "2")])])
    with pytest.raises(DataError, match="changed while in use"):
        stored.load()


@pytest.mark.parametrize("options", [{"errata": "drop"}, {"streams": "new"}, {"release": "v9"}, {"window": "2024-10"}])
def test_options_that_there_are_not_are_refused(tmp_path, options):
    with pytest.raises(ConfigError):
        load(write(tmp_path / "test.jsonl", [row("a")]), **options)
