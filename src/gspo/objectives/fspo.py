"""GSPO with the length-fair band of Fair Sequence Policy Optimization, arXiv 2509.09177."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gspo.objectives.base import Terms
from gspo.objectives.clipping import Clipped, clipped_surrogate
from gspo.objectives.gspo import GSPOToken
from gspo.objectives.ratios import mean_log_ratio


@dataclass(frozen=True)
class FSPO(GSPOToken):
    """``J = mean_i min(s_i A_i, clip(s_i, low_i, high_i) A_i)``; loss = -J. s_i is GSPO's sequence ratio.

    FSPO lets the sum of the log ratios, S_i = |y_i| log s_i, stray by a band proportional to sqrt(|y_i|), because that
    is how its standard deviation grows: ``log(1 - clip_low) <= S_i / sqrt(|y_i|) <= log(1 + clip_high)``. So short and
    long responses are cut equally often, where GSPO's fixed band cuts the short ones. For one token it is GSPO.

    The band is FSPO's; the weight inside it stays GSPO's length-normalised s_i, not the product exp(S_i). The default
    bounds make the band GSPO's 3e-4 / 4e-4 at 6,400 tokens (and 3e-3 / 4e-3 at 64).
    """

    clip_low: float = 0.024
    clip_high: float = 0.032
    name: ClassVar[str] = "fspo"

    def _clipped(self, terms: Terms) -> Clipped:
        log_s = mean_log_ratio(terms.token_log_ratio, terms.mask)[:, None]
        root = terms.lengths.clamp(min=1)[:, None].to(log_s.dtype).sqrt()
        return clipped_surrogate(terms, log_s, self.clip_low, self.clip_high, band_scale=root)
