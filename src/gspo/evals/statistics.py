"""How sure a pass@1 is: intervals and comparisons in which the problem is the unit that was drawn.

The samples of one problem resemble each other, so they are not independent draws: the standard error comes from
the spread of the per-problem means (Miller, arXiv 2411.00640), not from the number of responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gspo.errors import ConfigError
from gspo.seeding import derive_seed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class PairedDifference:
    """How far a second evaluation of the same problems is above the first."""

    difference: float  # mean over problems of (second - first)
    low: float
    high: float
    p_value: float  # two-sided, sign-flip permutation
    num_prompts: int
    confidence: float


def mean_interval(rates: Sequence[float] | Floats, num_samples: float, confidence: float = 0.95) -> Interval:
    """Interval for the mean pass rate over the population from which the problems were drawn.

    Wilson's score interval with the effective number of draws ``m (1 - m) / se^2`` in place of n and Student's t
    with P - 1 degrees of freedom in place of the normal quantile; m is the mean and ``se`` the standard error over
    the P per-problem rates. It never leaves [0, 1] and is not symmetric near the ends. The effective number of
    draws lies between P (each problem all or nothing) and P * n (problems all alike); where the rates do not vary
    at all the interval takes P, the careful end, so that 30 problems that all passed give a lower bound of 0.88 and
    not a width of zero.

    Args:
        rates: per-problem pass rates, each in [0, 1].
        num_samples: responses per problem behind a rate (their mean where it differs).
        confidence: in (0, 1).

    Raises:
        ConfigError: no problem, a rate outside [0, 1], or a confidence outside (0, 1).
    """
    values = checked_rates(rates, confidence)
    mean = float(values.mean())
    count = len(values)
    if count == 1:  # one problem says nothing about the others
        return Interval(mean, 0.0, 1.0, confidence)
    variance = float(values.var(ddof=1)) / count
    spread = mean * (1 - mean)
    draws = spread / variance if variance > 1e-15 else float(count)
    draws = min(max(draws, float(count)), count * max(num_samples, 1.0))
    t2 = t_quantile((1 + confidence) / 2, count - 1) ** 2
    centre = (mean + t2 / (2 * draws)) / (1 + t2 / draws)
    half = math.sqrt(t2 * (spread / draws + t2 / (4 * draws**2))) / (1 + t2 / draws)
    low = max(0.0, centre - half) if mean > 0 else 0.0  # exactly, where rounding would leave 1e-17
    high = min(1.0, centre + half) if mean < 1 else 1.0
    return Interval(mean, low, high, confidence)


def paired_difference(
    first: Sequence[float] | Floats,
    second: Sequence[float] | Floats,
    *,
    confidence: float = 0.95,
    seed: int = 0,
    num_permutations: int = 10_000,
) -> PairedDifference:
    """Compares two evaluations of the same problems, in the same order, by their per-problem rates.

    The interval is the t interval over the P per-problem differences. Where all of them are equal it has no spread
    to go by; then it is the difference plus or minus ``t^2 / (P + t^2)``, Wilson's bound on the share of problems
    that behave otherwise when none of P did. The p-value is :func:`sign_flip_p_value`.

    Raises:
        ConfigError: unequal numbers of problems, no problem, rates outside [0, 1].
    """
    a, b = checked_rates(first, confidence), checked_rates(second, confidence)
    if len(a) != len(b):
        raise ConfigError(f"cannot pair an evaluation of {len(a)} problems with one of {len(b)}; use the same problems")
    differences = b - a
    count = len(differences)
    mean = float(differences.mean())
    p_value = sign_flip_p_value(differences, seed=seed, num_permutations=num_permutations)
    if count == 1:
        return PairedDifference(mean, -1.0, 1.0, p_value, count, confidence)
    t = t_quantile((1 + confidence) / 2, count - 1)
    variance = float(differences.var(ddof=1)) / count
    half = t * math.sqrt(variance) if variance > 1e-15 else t**2 / (count + t**2)
    return PairedDifference(mean, max(-1.0, mean - half), min(1.0, mean + half), p_value, count, confidence)


def standard_error(rates: Sequence[float] | Floats) -> float:
    """Of the mean, problems drawn from a population: ``std / sqrt(P)`` over the per-problem rates (the clusters).

    nan for one problem. (Miller, arXiv 2411.00640, section 2.2; with equal numbers of responses this is its clustered
    standard error up to the factor ``sqrt(P / (P - 1))``.)
    """
    values = checked_rates(rates)
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def measurement_error(counts: Sequence[tuple[int, int]]) -> float:
    """Standard error of the mean rate with the problems fixed: how far another set of samples of them would move it.

    ``sqrt(sum_i p_i (1 - p_i) / (n_i - 1)) / P`` from (scored, passed) of each problem: the unbiased variance of each
    rate, added. nan where a problem has a single sample, whose spread nothing tells.
    """
    if not counts or any(n < 2 for n, _ in counts):
        return math.nan
    variance = sum((c / n) * (1 - c / n) / (n - 1) for n, c in counts)
    return math.sqrt(variance) / len(counts)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for being several (Holm 1979), in the order given: each at most alpha keeps the chance of any
    false finding at most alpha.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def sign_flip_p_value(differences: Sequence[float] | Floats, *, seed: int = 0, num_permutations: int = 10_000) -> float:
    """Two-sided p-value of "the two are exchangeable on every problem".

    Under it each difference is as likely to have the other sign. All sign patterns are counted where the non-zero
    differences are at most 13; beyond that ``num_permutations`` random ones, with ``(hits + 1) / (draws + 1)`` so
    that the p-value is never 0 (Phipson and Smyth 2010).
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if not len(values):
        return 1.0
    # Ties count, whatever the order of summing.
    observed = abs(float(values.sum())) - 1e-12 * float(np.abs(values).sum())
    if len(values) <= 13:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ values) >= observed))
    generator = np.random.default_rng(derive_seed(seed, "sign-flip"))
    hits = 0
    for start in range(0, num_permutations, 1000):
        rows = min(1000, num_permutations - start)
        signs = generator.integers(0, 2, size=(rows, len(values)), dtype=np.int8) * 2.0 - 1.0
        hits += int(np.count_nonzero(np.abs(signs @ values) >= observed))
    return (hits + 1) / (num_permutations + 1)


def t_quantile(probability: float, degrees: int) -> float:
    """Student's t: the x with ``P(T <= x) = probability`` for whole degrees of freedom, to about 1e-12.

    Bisection on the closed form of the distribution (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"t quantile needs 0 < probability < 1 and degrees >= 1, not {probability} and {degrees}")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, max(2.0, 2 * NormalDist().inv_cdf(probability))
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(x: float, degrees: int) -> float:
    """P(T <= x) for x >= 0: a finite sum in sine and cosine of arctan(x / sqrt(degrees))."""
    angle = math.atan(x / math.sqrt(degrees))
    cos2 = math.cos(angle) ** 2
    if degrees % 2:
        term, total = math.cos(angle), 0.0
        for power in range(1, degrees - 1, 2):
            total += term
            term *= cos2 * (power + 1) / (power + 2)
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        term, total = 1.0, 0.0
        for power in range(0, degrees - 1, 2):
            total += term
            term *= cos2 * (power + 1) / (power + 2)
        inside = math.sin(angle) * total
    return 0.5 + inside / 2


def checked_rates(rates: Sequence[float] | Floats, confidence: float = 0.95) -> Floats:
    """Rates as an array. Raises ConfigError: none, one outside [0, 1], or a confidence outside (0, 1)."""
    values = np.asarray(rates, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ConfigError("an interval needs the pass rates of at least one problem")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence}; it lies strictly between 0 and 1, e.g. 0.95")
    wrong = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if len(wrong):
        raise ConfigError(f"pass rate of problem {wrong[0]} is {values[wrong[0]]}; rates lie between 0 and 1")
    return values
