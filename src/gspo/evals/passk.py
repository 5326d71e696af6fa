"""pass@k: the chance that at least one of k responses to a problem passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from gspo.errors import ConfigError


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate ``1 - C(n - c, k) / C(n, k)`` from n samples of which c passed.

    It is the share of the k-subsets of the n samples that hold at least one that passed (Chen et al.,
    arXiv 2107.03374, section 2.1). The division is of exact integers, so any n works.

    Raises:
        ConfigError: k below 1 or above n (n samples say nothing about more than n draws), or c outside 0..n.
    """
    if k < 1:
        raise ConfigError(f"pass@{k} does not exist; k is at least 1")
    if k > num_samples:
        raise ConfigError(
            f"pass@{k} needs at least {k} samples per problem and there are {num_samples}; "
            f"draw more samples or ask for k <= {num_samples}"
        )
    if not 0 <= num_correct <= num_samples:
        raise ConfigError(f"{num_correct} of {num_samples} samples cannot have passed")
    subsets = comb(num_samples, k)
    return (subsets - comb(num_samples - num_correct, k)) / subsets


def pass_at_k_mean(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Mean of pass@k over problems, each given as (samples, how many passed). Never pooled over problems.

    Raises:
        ConfigError: no problem, or one with fewer than k samples.
    """
    if not counts:
        raise ConfigError(f"pass@{k} of no problem is not defined")
    return sum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
