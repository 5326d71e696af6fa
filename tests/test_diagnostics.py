from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.diagnostics import (
    calibrated_bounds,
    effective_sample_size,
    log_ratio_by_length,
    log_ratio_quantiles,
    mismatch,
    sequence_log_ratio,
    staleness,
)
from gspo.errors import ConfigError, RunError
from gspo.objectives import GSPO

NAN = math.nan


def test_sequence_log_ratio_is_the_mean_over_response_tokens_and_nan_without_any() -> None:
    new = torch.tensor([[-1.0, NAN, -2.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    old = torch.tensor([[-1.5, 7.0, -1.7], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    got = sequence_log_ratio(new, old, torch.tensor([[True, False, True], [False, False, False]])).tolist()
    assert got[0] == pytest.approx((0.5 - 0.3) / 2, abs=1e-15)
    assert math.isnan(got[1])


def test_sequence_log_ratio_is_unbounded_and_upcasts() -> None:
    new, old = torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-101.0]], dtype=torch.bfloat16)
    got = sequence_log_ratio(new, old, torch.ones(1, 1, dtype=torch.bool))
    assert (got.dtype, got.item()) == (torch.float32, 100.0)


def test_quantiles_and_std_leave_nan_out() -> None:
    # 0, 1, ..., 100: the p-th percentile is p
    log_s = torch.cat([torch.arange(101.0), torch.tensor([NAN])])[torch.randperm(102)]
    got = log_ratio_quantiles(log_s)
    assert got == pytest.approx(
        {f"log_ratio/q{p:02d}": float(p) for p in (1, 5, 25, 50, 75, 95, 99)}
        | {"log_ratio/std": statistics.stdev(range(101))}
    )
    assert log_ratio_quantiles(torch.tensor([NAN])) == {}
    assert log_ratio_quantiles(torch.tensor([0.5]))["log_ratio/std"] == 0.0


def test_spread_is_reported_by_length_quarter() -> None:
    # lengths 1 .. 8; pairs (1,2), (3,4), (5,6), (7,8) spread by 8, 6, 4, 2; std of {a, a + d} is d / sqrt(2)
    lengths = torch.tensor([8, 1, 7, 2, 6, 3, 5, 4, 9])
    log_s = torch.tensor([0.0, 0.0, 2.0, 8.0, 4.0, 0.0, 0.0, 6.0, NAN])
    assert log_ratio_by_length(log_s, lengths) == pytest.approx(
        {f"log_ratio/std_length_q{q}": d / math.sqrt(2) for q, d in zip((1, 2, 3, 4), (8, 6, 4, 2), strict=True)}
    )
    assert log_ratio_by_length(log_s[:4], lengths[:4]) == {}


def test_effective_sample_size() -> None:
    # weights 3, 1: (4)^2 / (2 * 10) = 0.8, whatever the common factor
    for shift in (0.0, 500.0, -500.0):
        got = effective_sample_size(torch.tensor([math.log(3) + shift, shift, NAN], dtype=torch.float64))
        assert got == pytest.approx(0.8)
    assert effective_sample_size(torch.zeros(7)) == 1.0
    assert effective_sample_size(torch.tensor([100.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert math.isnan(effective_sample_size(torch.tensor([NAN])))


def test_mismatch_is_over_the_mask() -> None:
    rollout = torch.tensor([[-1.0, NAN], [-2.0, -3.0]], dtype=torch.float64)
    trainer = torch.tensor([[-1.1, 5.0], [-2.0, -2.7]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, True]])
    # x = trainer - rollout = -0.1, 0, 0.3
    k3 = sum(math.exp(x) - 1 - x for x in (-0.1, 0.0, 0.3)) / 3
    assert mismatch(rollout, trainer, mask) == pytest.approx(
        {"mismatch/mean_abs": 0.4 / 3, "mismatch/max_abs": 0.3, "mismatch/k3": k3}
    )
    assert set(mismatch(rollout, trainer, torch.zeros_like(mask)).values()) == {0.0}


def test_staleness() -> None:
    assert staleness(torch.tensor([3, 5, 5, 4]), 5) == {"staleness/mean": 0.75, "staleness/max": 2.0}
    assert staleness(torch.tensor([], dtype=torch.int64), 5) == {"staleness/mean": 0.0, "staleness/max": 0.0}
    with pytest.raises(RunError, match="row 1 was sampled by policy version 6, but the newest is 5"):
        staleness(torch.tensor([5, 6]), 5)


def share_cut(log_s: torch.Tensor, advantages: torch.Tensor, bounds: tuple[float, float]) -> float:
    """What GSPO itself clips: one-token responses with these log ratios."""
    cut = GSPO(*bounds).clipped_rows(
        log_s[:, None], torch.zeros(len(log_s), 1), advantages, torch.ones(len(log_s), 1, dtype=torch.bool)
    )
    return float(cut.double().mean())


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), target=st.floats(0.02, 0.3), n=st.integers(100, 300))
def test_calibrated_bounds_cut_the_target_share(seed: int, target: float, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_s = 0.01 * torch.randn(n, generator=generator, dtype=torch.float64)
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    low, high = calibrated_bounds(log_s, advantages, target)
    assert high / low == pytest.approx(4 / 3)
    assert share_cut(log_s, advantages, (low, high)) == pytest.approx(round(target * n) / n, abs=1e-12)


def test_calibrated_bounds_by_hand() -> None:
    """s - 1 = +0.04, +0.08 for A > 0 and -0.06 for A < 0: scales 0.01, 0.02 and 0.02; the rest never is cut.

    Of 8 rows, target 0.25 wants the 2 at 0.02: k = (0.02 + 0.01) / 2 = 0.015, bounds 0.045 and 0.06.
    """
    s = torch.tensor([1.04, 1.08, 0.94, 0.5, 2.0, 1.5, 1.0, NAN, 1.3], dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.0, 1.0, -1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert calibrated_bounds(s.log(), advantages, 0.25) == pytest.approx((0.045, 0.06), abs=1e-12)


def test_tied_scales_are_cut_together_or_not_at_all() -> None:
    """Scales 3, 2, 2, 2, 2, 1 of 10 rows: one, five or six can be cut. 0.2 is nearest to one, 0.4 to five."""
    scales = torch.tensor([3.0, 2.0, 2.0, 2.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    log_s = torch.log1p(4e-3 * scales)
    for target, k in ((0.2, 2.5e-3), (0.4, 1.5e-3), (0.6, 0.5e-3)):
        low, high = calibrated_bounds(log_s, torch.ones(10, dtype=torch.float64), target)
        assert (low, high) == pytest.approx((3 * k, 4 * k), rel=1e-9)


def test_an_unreachable_target_cuts_half_of_what_moved_outward() -> None:
    log_s = torch.log1p(torch.tensor([0.04, 0.08, 0.12, 0.16] + [0.0] * 16, dtype=torch.float64))
    bounds = calibrated_bounds(log_s, torch.ones(20, dtype=torch.float64), 0.5)
    assert bounds == pytest.approx((0.075, 0.1))  # between 0.08 and 0.12: two of the four


def test_nothing_to_calibrate_on_is_refused() -> None:
    with pytest.raises(RunError, match="none of 3 responses moved outward"):
        calibrated_bounds(torch.tensor([0.0, -0.1, NAN, 0.1]), torch.tensor([1.0, 1.0, 1.0, -1.0]))
    with pytest.raises(ConfigError, match=r"target = 1\.5"):
        calibrated_bounds(torch.tensor([0.1]), torch.tensor([1.0]), target=1.5)
    with pytest.raises(ConfigError, match="asymmetry"):
        calibrated_bounds(torch.tensor([0.1]), torch.tensor([1.0]), asymmetry=(0, 4))
