"""The clustered bootstrap: an interval for a mean over problems that assumes no form of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from gspo.evals.statistics import Floats, Interval, checked_rates, t_quantile
from gspo.seeding import derive_seed

_NORMAL = NormalDist()


def bootstrap_interval(
    rates: Sequence[float] | Floats, confidence: float = 0.95, *, seed: int = 0, num_resamples: int = 4000
) -> Interval:
    """The BCa interval (bias-corrected and accelerated; Efron 1987) of the mean, problems drawn with replacement.

    A problem is drawn with all its responses, so the draws are independent though the responses are not. Student's t
    with P - 1 degrees of freedom stands in place of the normal quantile: without it the interval of 30 problems
    covers less than it says. Where all rates are equal there is nothing to resample and the interval is a point; the
    score interval (``mean_interval``) is then the one to read.

    Raises:
        ConfigError: as ``mean_interval``.
    """
    values = checked_rates(rates, confidence)
    mean, count = float(values.mean()), len(values)
    deviations = values - mean
    squares = float((deviations**2).sum())
    if squares < 1e-15:
        return Interval(mean, mean, mean, confidence)
    generator = np.random.default_rng(derive_seed(seed, "bootstrap"))
    means = np.sort(_resampled_means(values, generator, num_resamples))
    acceleration = float((deviations**3).sum()) / (6 * squares**1.5)
    below = float(np.mean(means < mean - 1e-12) + np.mean(np.abs(means - mean) <= 1e-12) / 2)
    bias = _NORMAL.inv_cdf(min(max(below, 1 / num_resamples), 1 - 1 / num_resamples))
    quantile = t_quantile((1 + confidence) / 2, count - 1)
    shares = [_share(bias, acceleration, bias + sign * quantile) for sign in (-1, 1)]
    low, high = (float(np.quantile(means, share)) for share in shares)
    return Interval(mean, min(low, mean), max(high, mean), confidence)


def _share(bias: float, acceleration: float, point: float) -> float:
    """Which quantile of the resampled means is the end of the interval; ``point`` on the scale of the normal."""
    scale = 1 - acceleration * point
    if scale <= 0:  # beyond the pole: the end of the distribution
        return 1.0 if point > 0 else 0.0
    return _NORMAL.cdf(bias + point / scale)


def _resampled_means(values: Floats, generator: np.random.Generator, num_resamples: int) -> Floats:
    """Means of resamples, in pieces that need little memory. (num_resamples,)"""
    count = len(values)
    rows = max(1, 1_000_000 // count)
    pieces = [
        values[generator.integers(0, count, size=(min(rows, num_resamples - start), count))].mean(axis=1)
        for start in range(0, num_resamples, rows)
    ]
    return np.concatenate(pieces)
