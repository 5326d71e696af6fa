"""pass@k against the case file and against counting every subset."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import ConfigError
from gspo.evals.passk import pass_at_k, pass_at_k_mean

CASES = json.loads((Path(__file__).parents[1] / "cases" / "evaluation_cases.json").read_text())
CASE: dict[str, Any] = next(case for case in CASES if case["id"] == "G10")


@pytest.mark.parametrize(
    ("counts", "expected"), list(zip(CASE["input"]["n_c_k"], CASE["expected"]["values"], strict=True)), ids=str
)
def test_case_values(counts: list[int], expected: float | str) -> None:
    n, c, k = counts
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"pass@{k} needs at least {k} samples per problem and there are {n}"):
            pass_at_k(n, c, k)
    else:
        assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-9)


def test_case_dataset_is_a_mean_over_problems() -> None:
    counts = [(n, c) for n, c in CASE["input"]["dataset"]]
    for name, expected in CASE["expected"]["dataset"].items():
        assert pass_at_k_mean(counts, int(name.removeprefix("pass@"))) == pytest.approx(expected, abs=1e-9)


def test_case_greedy_samples_of_other_problems_are_no_samples_of_this_one() -> None:
    counts = [(1, 1)] * 50 + [(1, 0)] * 114
    assert pass_at_k_mean(counts, 1) == pytest.approx(50 / 164)
    with pytest.raises(ConfigError, match=r"pass@10 needs at least 10 samples per problem and there are 1"):
        pass_at_k_mean(counts, 10)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_it_is_the_share_of_subsets_with_a_pass(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 7))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    passed = [True] * c + [False] * (n - c)
    subsets = list(combinations(passed, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 3000), c=st.integers(0, 3000))
def test_it_grows_with_k_from_the_pass_rate_to_any_pass(n: int, c: int) -> None:
    c = min(c, n)
    values = [pass_at_k(n, c, k) for k in sorted({1, max(1, n // 2), n})]
    assert values == sorted(values)
    assert values[0] == pytest.approx(c / n)
    assert values[-1] == float(c > 0)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ConfigError):
        pass_at_k(n, c, k)


def test_no_problem_has_no_pass_rate() -> None:
    with pytest.raises(ConfigError, match="no problem"):
        pass_at_k_mean([], 1)
