"""The policy loss of DAPO: token ratios, a wider upper bound, a mean over tokens. arXiv 2503.14476, equation (8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gspo.objectives.ppo import PPO


@dataclass(frozen=True)
class DAPO(PPO):
    """``J = sum_i sum_t min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i) / sum_i |y_i|``; loss = -J.

    ``w_it = pi_it / old_it``. The same sum as PPO's, with one advantage per response and a wider upper bound. The rest
    of DAPO lies elsewhere: ``train.groups_without_signal = "refill"`` samples dynamically,
    ``train.truncated = "exclude"`` filters overlong responses. The log ratio of a token is bounded at 10 where it is
    exponentiated.
    """

    clip_high: float = 0.28
    name: ClassVar[str] = "dapo"
