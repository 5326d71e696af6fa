"""The bootstrap, the two standard errors, Holm's adjustment: closed forms, and simulations of what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import ConfigError
from gspo.evals.bootstrap import bootstrap_interval
from gspo.evals.result import Settings, cell_metrics
from gspo.evals.statistics import holm, measurement_error, standard_error, t_quantile

RATES = st.lists(st.integers(0, 8).map(lambda c: c / 8), min_size=2, max_size=30)


@pytest.mark.parametrize("beta", [(2.0, 2.0), (0.5, 0.5), (0.3, 1.2), (20.0, 20.0)])
def test_bootstrap_coverage_at_30_problems_and_32_samples(beta: tuple[float, float]) -> None:
    """As the score interval: 93 to 97 % where 95 % is promised; a seed per interval, as evaluations have."""
    rng = np.random.default_rng(1)
    truth = beta[0] / sum(beta)
    rates = rng.binomial(32, rng.beta(*beta, size=(600, 30))) / 32
    found = [bootstrap_interval(row, seed=number, num_resamples=400) for number, row in enumerate(rates)]
    assert 0.93 <= np.mean([one.low <= truth <= one.high for one in found]) <= 0.97


def test_with_many_problems_it_is_the_t_interval() -> None:
    rates = np.random.default_rng(0).beta(2, 2, 2000)
    found = bootstrap_interval(rates)
    half = t_quantile(0.975, 1999) * rates.std(ddof=1) / math.sqrt(2000)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.08)
    assert found.value == pytest.approx(rates.mean())


def test_it_leans_where_the_rates_are_skewed() -> None:
    """Most problems never solved, a few always: the interval reaches further up than down."""
    found = bootstrap_interval([0.0] * 25 + [1.0] * 5)
    assert found.high - found.value > 1.15 * (found.value - found.low)


@settings(max_examples=30, deadline=None)
@given(rates=RATES, seed=st.integers(0, 5))
def test_it_holds_the_mean_stays_in_range_and_is_seeded(rates: list[float], seed: int) -> None:
    found = bootstrap_interval(rates, seed=seed, num_resamples=200)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found == bootstrap_interval(rates, seed=seed, num_resamples=200)


def test_equal_rates_leave_nothing_to_resample() -> None:
    found = bootstrap_interval([0.25] * 30)
    assert (found.low, found.high) == (0.25, 0.25)
    with pytest.raises(ConfigError, match="at least one problem"):
        bootstrap_interval([])


def test_standard_error_is_over_problems() -> None:
    # rates 0, 1/2, 1: variance with ddof 1 is (1/4 + 0 + 1/4) / 2 = 1/4, over 3 problems
    assert standard_error([0.0, 0.5, 1.0]) == pytest.approx(math.sqrt(0.25 / 3))
    assert math.isnan(standard_error([0.5]))


def test_measurement_error_is_over_samples_with_the_problems_fixed() -> None:
    # problems of 4 and 2 samples: p (1 - p) / (n - 1) is (1/4)(3/4)/3 = 1/16 and (1/2)(1/2)/1 = 1/4, over 2 squared
    assert measurement_error([(4, 1), (2, 1)]) == pytest.approx(math.sqrt(1 / 16 + 1 / 4) / 2)
    assert measurement_error([(4, 0), (4, 4)]) == 0.0
    assert math.isnan(measurement_error([(4, 1), (1, 1)]))
    assert math.isnan(measurement_error([]))


def test_both_errors_are_what_they_say() -> None:
    """Simulated: fixed problems sampled again spread by the measurement error, fresh problems by the standard error."""
    rng = np.random.default_rng(4)
    difficulty = rng.beta(0.5, 0.5, 30)
    again = rng.binomial(8, difficulty, size=(4000, 30)) / 8
    predicted = np.mean([measurement_error([(8, round(8 * r)) for r in row]) ** 2 for row in again[:400]])
    assert again.mean(axis=1).var(ddof=1) == pytest.approx(predicted, rel=0.08)  # 2.2 % and 1 % of noise
    fresh = rng.binomial(8, rng.beta(0.5, 0.5, size=(4000, 30))) / 8
    predicted = np.mean([standard_error(row) ** 2 for row in fresh[:400]])
    assert fresh.mean(axis=1).var(ddof=1) == pytest.approx(predicted, rel=0.08)
    assert predicted > 2 * np.mean([measurement_error([(8, round(8 * r)) for r in row]) ** 2 for row in fresh[:400]])


def test_holm_by_hand() -> None:
    # sorted 0.01, 0.02, 0.03, 0.2: times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.2
    assert holm([0.02, 0.2, 0.01, 0.03]) == pytest.approx([0.06, 0.2, 0.04, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@given(p=st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_raw_value_and_bonferroni_and_keeps_the_order(p: list[float]) -> None:
    found = holm(p)
    for raw, adjusted in zip(p, found, strict=True):
        assert raw <= adjusted <= min(1.0, len(p) * raw)
    order = sorted(range(len(p)), key=lambda i: p[i])
    assert [found[i] for i in order] == sorted(found)


def test_holm_keeps_the_chance_of_any_false_finding() -> None:
    rng = np.random.default_rng(5)
    false = np.mean([min(holm(list(row))) <= 0.05 for row in rng.uniform(size=(4000, 5))])
    assert false <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)


# Cells.


def test_cells_by_hand() -> None:
    cells = [[1.0, 1.0, 0.0, None], [0.0, 0.0], []]
    found = cell_metrics(cells, 4, Settings(k=(2,)))
    assert found["pass@1"] == pytest.approx((2 / 3 + 0) / 2)
    assert found["pass@2"] == pytest.approx(((1 - 0) + 0) / 2)  # 3 samples, 2 right: no pair is all wrong
    assert found["missing_fraction"] == pytest.approx(6 / 12)
    assert found["unscored_fraction"] == pytest.approx(1 / 12)
    assert found["pass@1/if_unscored_wrong"] == pytest.approx((2 / 4 + 0 + 0) / 3)
    assert found["pass@1/if_unscored_right"] == pytest.approx((3 / 4 + 2 / 4 + 4 / 4) / 3)


@settings(max_examples=50, deadline=None)
@given(cells=st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), max_size=4), min_size=1, max_size=6))
def test_what_is_missing_is_bounded_by_every_way_it_could_have_gone(cells: list[list[float | None]]) -> None:
    found = cell_metrics(cells, 4)
    if "pass@1/if_unscored_wrong" not in found:
        assert all(len(row) == 4 and None not in row for row in cells)
        return
    for value in (0.0, 1.0):
        filled = [[v if v is not None else value for v in row] + [value] * (4 - len(row)) for row in cells]
        whole = cell_metrics(filled, 4)["pass@1"]
        assert found["pass@1/if_unscored_wrong"] - 1e-12 <= whole <= found["pass@1/if_unscored_right"] + 1e-12


def test_nothing_scored_is_not_a_number_and_one_problem_has_no_spread() -> None:
    nothing = cell_metrics([[None], []], 1)
    assert math.isnan(nothing["pass@1"])
    assert "pass@1/standard_error" not in nothing
    one = cell_metrics([[1.0, 0.0]], 2)
    assert (one["pass@1"], one["pass@1/low"], one["pass@1/high"]) == (0.5, 0.0, 1.0)
    assert math.isnan(one["pass@1/bootstrap_low"])


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_wrong_confidence_is_refused(confidence: float) -> None:
    with pytest.raises(ConfigError, match="strictly between 0 and 1"):
        Settings(confidence=confidence).check(4)
