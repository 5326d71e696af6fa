"""The number and exact-match verifiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.rewards import exact_match, number


@pytest.mark.parametrize(
    ("gold", "response", "correct"),
    [
        ("1000", "That makes 1,000.", True),
        ("1000", "1000.0", True),
        ("0.1", "0.10000000000000001", False),  # equal as floats
        ("-3", "x = −3", True),
        ("-3", "3", False),
        ("7", "first 7, then 8", False),
        ("7", "\\boxed{7} and 8", True),
        ("50000000000000001", "50000000000000000", False),
        ("#### 12", "12", True),
        ("7", "", False),
        ("7", "<think>7", False),
        ("none", "7", None),
    ],
)
def test_number(gold, response, correct):
    assert number.verify(gold, response).correct is correct


@given(st.integers(), st.integers())
def test_numbers_are_right_exactly_if_equal(a, b):
    assert number.verify(str(a), f"The result is {b:,}").correct is (a == b)


@pytest.mark.parametrize(
    ("gold", "response", "correct"),
    [
        ("Paris", " Paris\n", True),
        ("Paris", "paris", False),
        ("Paris", "<think>Rome?</think>\nParis", True),
        ("Paris", "<think>Paris", False),
        ("Paris", "It is \\boxed{Paris}.", True),
        ("Paris", "It is Paris.", False),
        (" ", "", None),
    ],
)
def test_exact_match(gold, response, correct):
    assert exact_match.verify(gold, response).correct is correct
