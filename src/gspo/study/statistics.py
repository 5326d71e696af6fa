"""The tests that studies are judged by. Units are paired differences, one per seed.

Exact where it can be: with n seeds all 2^n sign patterns are counted, so a one-sided p-value is never below 2^-n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gspo.errors import ConfigError
from gspo.evals.statistics import Interval, sign_flip_p_value, t_quantile
from gspo.seeding import derive_seed
from gspo.study.schema import Alternative

#: All sign patterns are counted; beyond this there would be millions.
MAX_SEEDS = 20
Floats = NDArray[np.float64]


def one_sided_p(differences: Sequence[float] | Floats, null: float = 0.0) -> float:
    """Exact sign-flip p-value of "the mean is at most ``null``" against "it is above".

    Under it each ``difference - null`` is as likely to have the other sign (or lies lower); the p-value is the share of
    the 2^n sign patterns whose sum is at least the observed one, the observed pattern included.

    Raises:
        ConfigError: no difference, or more than MAX_SEEDS.
    """
    values = np.asarray(differences, dtype=np.float64) - null
    if not 0 < len(values) <= MAX_SEEDS:
        raise ConfigError(f"an exact test takes 1 to {MAX_SEEDS} seeds, not {len(values)}")
    observed = float(values.sum()) - 1e-12 * float(np.abs(values).sum())  # ties count, whatever the order of summing
    hits = 0
    for start in range(0, 2 ** len(values), 2**16):
        numbers = np.arange(start, min(start + 2**16, 2 ** len(values)))
        signs = 1.0 - 2.0 * (numbers[:, None] >> np.arange(len(values)) & 1)
        hits += int(np.count_nonzero(signs @ values >= observed))
    return hits / 2 ** len(values)


def p_value(
    differences: Sequence[float] | Floats, alternative: Alternative, null: float, margin: float | None
) -> float:
    """p-value of the hypothesis that the alternative is false.

    "equivalent" is the larger of two one-sided tests: the mean lies above ``null - margin``, and below
    ``null + margin`` (TOST, Schuirmann 1987).
    """
    values = np.asarray(differences, dtype=np.float64)
    if alternative == "greater":
        return one_sided_p(values, null)
    if alternative == "less":
        return one_sided_p(-values, -null)
    if alternative == "different":
        return sign_flip_p_value(values - null)
    assert margin is not None  # study/load.py has seen to it
    return max(one_sided_p(values, null - margin), one_sided_p(-values, -null - margin))


def refuted_p(
    differences: Sequence[float] | Floats, alternative: Alternative, null: float, margin: float | None
) -> float:
    """p-value of the hypothesis that the alternative is true: small where the data say the contrary.

    That two things differ cannot be refuted by a test of this kind; its p-value is 1.
    """
    values = np.asarray(differences, dtype=np.float64)
    if alternative == "greater":
        return one_sided_p(-values, -null)
    if alternative == "less":
        return one_sided_p(values, null)
    if alternative == "different":
        return 1.0
    assert margin is not None
    return min(1.0, 2 * min(one_sided_p(values, null + margin), one_sided_p(-values, -null + margin)))


def interval_over_seeds(
    values: Sequence[float] | Floats, *, confidence: float, seed: int = 0, num_resamples: int = 10_000
) -> Interval:
    """Bootstrap interval for the mean of values of any size, one per seed.

    Percentiles of the resampled means, taken further out so that few values do not make it too narrow (expanded
    percentiles, Hesterberg 2015, section 3.2): in place of the normal quantile, ``sqrt(n / (n - 1))`` times Student's
    t with n - 1 degrees of freedom. One value alone gives infinite ends. For pass rates over problems see
    ``evals/bootstrap.py``.

    Raises:
        ConfigError: no value.
    """
    array = np.asarray(values, dtype=np.float64)
    count = len(array)
    if not count:
        raise ConfigError("an interval over seeds needs at least one value")
    mean = float(array.mean())
    if count == 1:
        return Interval(mean, -math.inf, math.inf, confidence)
    generator = np.random.default_rng(derive_seed(seed, "bootstrap"))
    means = array[generator.integers(0, count, size=(num_resamples, count))].mean(axis=1)
    tail = NormalDist().cdf(-t_quantile((1 + confidence) / 2, count - 1) * math.sqrt(count / (count - 1)))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high), confidence)


def log_slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """d log y / d log x by least squares; None where fewer than two points are above 0 or all x are the same."""
    points = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True) if a > 0 and b > 0]
    if len(points) < 2:
        return None
    mean_x, mean_y = (math.fsum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = math.fsum((a - mean_x) ** 2 for a, _ in points)
    return math.fsum((a - mean_x) * (b - mean_y) for a, b in points) / spread if spread > 0 else None
