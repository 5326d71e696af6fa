import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import DataError
from gspo.rewards.output import MAX_DIGITS, check_comparison, read_value, same_value, text_difference

SAME = [
    (b"6", b"6\n"),
    (b"1 2\n3\n", b"1  2 \n3\n\n\n"),
    (b"1\r\n2\r\n", b"1\n2\n"),
    (b"0.333333333333", b"0.333333"),
    (b"3", b"3.0"),
    (b"1000000.0", b"1000000.9"),  # 9e-7 of the value
    (b"0.0000001", b"0"),  # 1e-7 away
    (b"1e5", b"100000"),
    (b"-0.0", b"0"),
    (b"YES", b"YES"),
    (b"", b"\n"),
]
DIFFERENT = [
    (b"6", b""),
    (b"6", b"6 6"),
    (b"6\n7", b"6 7"),
    (b"50000000000000000", b"50000000000000001"),
    (b"0011", b"11"),
    (b"7", b"+7"),
    (b"0.333333333333", b"0.33333"),  # 3.3e-6 away
    (b"1000000.0", b"1000002.0"),
    (b"YES", b"yes"),
    (b"6", b"6\x00"),
    (b"6", b"\xff\xfe"),
    (b"1.5", b"nan"),
    (b"1.5", b"1e999"),
    (b"1.5", b"1_5"),
    (b"1.5", b"1.5" + b"0" * 10_000),
]


@pytest.mark.parametrize(("expected", "said"), SAME)
def test_same_output(expected, said):
    assert text_difference(expected, said) == ""


@pytest.mark.parametrize(("expected", "said"), DIFFERENT)
def test_different_output(expected, said):
    assert text_difference(expected, said) != ""


def test_the_difference_is_named():
    assert text_difference(b"1\n2\n", b"1\n3\n") == "line 2: '3' instead of '2'"
    assert text_difference(b"1\n2\n", b"1\n") == "1 lines instead of 2"
    assert text_difference(b"1", b"  \n") == "no output"


def test_comparisons():
    assert text_difference(b"1\n2", b"1 2", "tokens") == ""
    assert text_difference(b"1 2", b"1 2\n", "exact") != ""
    assert text_difference(b"0.5", b"0.50", tolerance=0.0) == ""
    assert text_difference(b"0.5", b"0.5000001", tolerance=0.0) != ""
    with pytest.raises(DataError, match="no comparison 'line'; there are lines, tokens, exact"):
        check_comparison("line")


@given(st.binary(max_size=200))
def test_any_output_is_itself_and_never_raises(data):
    assert text_difference(data, data) == ""
    text_difference(b"1 2.5\nx", data)


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_whole_numbers_are_exact(left, right):
    assert (text_difference(str(left).encode(), str(right).encode()) == "") is (left == right)
    assert same_value(left, right) is (left == right)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_a_value_survives_the_way_out_of_the_box(value):
    assert same_value(value, read_value(json.dumps(value).encode()))


@pytest.mark.parametrize(
    ("expected", "said"),
    [(1, True), (0, False), (None, 0), ("1", 1), ([1], [1, 1]), ([1], 1), ({"a": 1}, {"b": 1}), (0.3, 0.30001),
     ({"a": [1]}, {"a": [2]}), ("ab", ["a", "b"]), (["a", "b"], "ab"), (1.5, 10**400)],
)  # fmt: skip
def test_different_values(expected, said):
    assert not same_value(expected, said)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"NaN", b"-Infinity", b"1e999", b"[" * 100_000, b'{"a":' * 100_000, b"6" * (MAX_DIGITS + 1), b"\xff",
     b"1" * 10 + b"." + b"1" * MAX_DIGITS, b"6 6"],
)  # fmt: skip
def test_what_is_no_value_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 (any message)
        read_value(text)
