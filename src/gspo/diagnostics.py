"""What to look at beside the reward: how far the policy drifted, how much the clip cuts, whose log-probs differ.

Pure functions of tensors. Log-prob tensors are (N, T); log s is (N,), nan for rows without response tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo.errors import ConfigError, RunError
from gspo.objectives.kl import k3
from gspo.objectives.masking import select
from gspo.objectives.ratios import mean_log_ratio

#: Quantiles of log s that are reported, as whole percents.
QUANTILES = (1, 5, 25, 50, 75, 95, 99)


@torch.no_grad()
def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(N,) log s_i, equation (7) of arXiv 2507.18071, unbounded; nan for rows without response tokens.

    float32, or float64 if an input is.
    """
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, old_logprobs.dtype), torch.float32)
    difference = select(logprobs, mask).to(dtype) - select(old_logprobs, mask).to(dtype)
    return mean_log_ratio(difference, mask).masked_fill(~mask.any(dim=-1), torch.nan)


@torch.no_grad()
def log_ratio_quantiles(log_s: Tensor, prefix: str = "log_ratio") -> dict[str, float]:
    """``{prefix}/q01`` ... ``{prefix}/q99`` and ``{prefix}/std`` (ddof = 1; 0 for one row) of (N,) log s.

    Quantiles interpolate linearly. nan rows are left out; an empty dict if none is left.
    """
    known = log_s[~log_s.isnan()].double()
    if not len(known):
        return {}
    points = torch.tensor([percent / 100 for percent in QUANTILES], dtype=torch.float64, device=known.device)
    values = torch.quantile(known, points).tolist()
    result = {f"{prefix}/q{percent:02d}": value for percent, value in zip(QUANTILES, values, strict=True)}
    return {**result, f"{prefix}/std": float(known.std(correction=1)) if len(known) > 1 else 0.0}


@torch.no_grad()
def log_ratio_by_length(log_s: Tensor, lengths: Tensor) -> dict[str, float]:
    """``log_ratio/std_length_q1`` (shortest quarter of the rows) ... ``_q4`` (longest): std of log s, ddof = 1.

    log s spreads by about sigma / sqrt(length), so one band cuts short responses more often than long ones. Rows of
    equal length may fall into neighbouring quarters. A quarter with fewer than two rows is left out.

    Args:
        log_s: (N,), nan rows are left out.
        lengths: (N,) response tokens.
    """
    known = ~log_s.isnan()
    ordered = log_s[known][lengths[known].argsort(stable=True)].double()
    quarters = torch.tensor_split(ordered, 4)
    return {
        f"log_ratio/std_length_q{number}": float(quarter.std(correction=1))
        for number, quarter in enumerate(quarters, start=1)
        if len(quarter) > 1
    }


@torch.no_grad()
def effective_sample_size(log_s: Tensor) -> float:
    """(sum s)**2 / (n sum s**2) in (0, 1]: the share of the n responses that importance weights s leave effective.

    1 when all ratios are equal, 1 / n when one dominates. Independent of a common factor, so log s of any size is fine.
    nan rows are left out; nan if none is left.
    """
    known = log_s[~log_s.isnan()].double()
    if not len(known):
        return math.nan
    weights = (known - known.max()).exp()
    return float(weights.sum().square() / (len(known) * weights.square().sum()))


@torch.no_grad()
def mismatch(rollout_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's under the same weights, over the mask's tokens.

    ``mismatch/mean_abs`` and ``mismatch/max_abs`` of the difference in nats, and ``mismatch/k3``, the estimate of
    KL(engine, trainer) on the engine's samples. All 0 for an empty mask.
    """
    if not mask.any():
        return {"mismatch/mean_abs": 0.0, "mismatch/max_abs": 0.0, "mismatch/k3": 0.0}
    rollout, trainer = rollout_logprobs[mask].double(), trainer_logprobs[mask].double()
    difference = (rollout - trainer).abs()
    return {
        "mismatch/mean_abs": float(difference.mean()),
        "mismatch/max_abs": float(difference.max()),
        "mismatch/k3": float(k3(policy=rollout, reference=trainer).mean()),
    }


@torch.no_grad()
def staleness(policy_versions: Tensor, current_version: int) -> dict[str, float]:
    """``staleness/mean`` and ``staleness/max``: updates between the weights that sampled and the current ones.

    Args:
        policy_versions: (N,) int64, of each response.
        current_version: updates behind the weights being trained.

    Raises:
        RunError: a response claims weights that do not exist yet.
    """
    age = current_version - policy_versions
    if len(age) and int(age.min()) < 0:
        row = int(age.argmin())
        raise RunError(
            f"row {row} was sampled by policy version {int(policy_versions[row])}, but the newest is {current_version}"
        )
    if not len(age):
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    return {"staleness/mean": float(age.double().mean()), "staleness/max": float(age.max())}


@torch.no_grad()
def calibrated_bounds(
    log_s: Tensor, advantages: Tensor, target: float = 0.15, asymmetry: tuple[float, float] = (3, 4)
) -> tuple[float, float]:
    """Bounds (clip_low, clip_high) in the given proportion that cut a target share of these responses.

    With bounds (3k, 4k) a response is cut when A > 0 and s > 1 + 4k, or A < 0 and s < 1 - 3k; that is, when its own
    scale, (s - 1) / 4 or (1 - s) / 3, is above k. Sorting these scales solves for k exactly: m = round(target * n), at
    least 1, responses are cut when k lies between the m-th and the next largest scale; it is put midway. Tied scales
    are cut together or not at all: then the number cut is the possible one nearest to m, the smaller of two that are
    equally near.

    The share is of all n responses, those with A = 0 included, since that is how clip fractions are reported. If fewer
    than m responses moved outward at all, no band reaches the target: about half of them are cut then (a band that cuts
    all of them would leave nothing of the off-policy data).

    Args:
        log_s: (N,) log sequence ratios; nan rows are left out.
        advantages: (N,).
        target: wanted clip fraction, in (0, 1).
        asymmetry: proportion clip_low : clip_high.

    Raises:
        ConfigError: target or asymmetry out of range.
        RunError: no response moved outward, so there is nothing to measure.
    """
    if not 0 < target < 1:
        raise ConfigError(f"target = {target} is not a share of responses; it must lie between 0 and 1")
    low, high = asymmetry
    if not (low > 0 and high > 0 and math.isfinite(low + high)):
        raise ConfigError(f"asymmetry = {asymmetry} is not a proportion; both parts must be above 0")
    known = ~log_s.isnan()
    scales = _outward_scales(log_s[known].double(), advantages[known].double(), low, high)
    if not len(scales):
        raise RunError(
            f"none of {int(known.sum())} responses moved outward (A > 0 and s > 1, or A < 0 and s < 1), so bounds "
            "cannot be calibrated on them; measure after the first update, on groups whose rewards differ"
        )
    wanted = max(1, round(target * int(known.sum())))
    k = _scale_that_cuts(scales, wanted if wanted <= len(scales) else (len(scales) + 1) // 2)
    return low * k, high * k


def _outward_scales(log_s: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Scale k at which each response stops being cut, largest first; only those that moved outward."""
    moved = torch.expm1(log_s)
    scales = torch.where(advantages > 0, moved / high, torch.where(advantages < 0, -moved / low, 0.0))
    return scales[scales > 0].sort(descending=True).values


def _scale_that_cuts(scales: Tensor, wanted: int) -> float:
    """A k with ``wanted`` of the (descending) scales above it, or as near to that as ties allow, but at least one."""
    following = torch.cat([scales[1:], scales.new_zeros(1)])
    possible = torch.nonzero(scales > following).squeeze(-1) + 1
    distance = 2 * (possible - wanted).abs() + (possible > wanted)
    num_cut = int(possible[distance.argmin()])
    return float((scales[num_cut - 1] + following[num_cut - 1]) / 2)
