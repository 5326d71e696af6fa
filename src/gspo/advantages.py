"""From rewards to advantages: relative to the group, leave-one-out, and GAE for a critic."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gspo.errors import ConfigError, RewardError

Scale = Literal["group_std", "none", "batch_std", "leave_one_out"]
#: Rewards as (N,) numbers; None and nan mean "could not be scored".
Rewards = Tensor | Sequence[float | None]
#: One id per row: an (N,) integer tensor or any hashable values, in any order.
GroupIds = Tensor | Sequence[Hashable]


def group_advantages(
    rewards: Rewards, group_ids: GroupIds, scale: Scale = "group_std", std_floor: float = 1e-4
) -> Tensor:
    """Advantage of each response against its group, equation (6) of arXiv 2507.18071.

    * ``group_std``: (r - mean) / max(std, std_floor), the sample standard deviation (ddof = 1) of the group.
    * ``none``: r - mean (Dr.GRPO, arXiv 2503.20783).
    * ``batch_std``: (r - mean of the group) / max(std, std_floor) with the sample std of all scored rewards.
    * ``leave_one_out``: r - mean of the OTHER members (RLOO, arXiv 2402.14740).

    A response that could not be scored takes no part in any mean or std and gets exactly 0. A group whose scored
    rewards are all equal (told by max == min, not by a computed std), or that has one scored member, gets exactly 0.

    Args:
        rewards: (N,).
        group_ids: (N,); groups may be of any size and interleaved.
        scale: one of the four above.
        std_floor: smallest std divided by, in units of reward; not added to the std.

    Returns:
        (N,) float32, or float64 if the rewards are a float64 tensor. Computed in float64.

    Raises:
        RewardError: an infinite reward (the row is named), or not one group id per reward.
        ConfigError: an unknown scale or a negative floor.
    """
    if scale not in get_args(Scale):
        raise ConfigError(f"there is no advantage scale {scale!r}; it is one of {', '.join(get_args(Scale))}")
    if not (math.isfinite(std_floor) and std_floor >= 0):
        raise ConfigError(f"std_floor = {std_floor} is not a floor; it must be 0 or more and finite")
    values, scored = _reward_tensor(rewards)
    groups = _Groups.of(values, scored, group_ids)
    centered = values - groups.mean[groups.index]
    if scale == "group_std":
        centered = centered / groups.std(centered)[groups.index].clamp(min=std_floor)
    elif scale == "batch_std":
        centered = centered / _sample_std(values[scored]).clamp(min=std_floor)
    elif scale == "leave_one_out":
        size = groups.size[groups.index]
        centered = centered * size / (size - 1).clamp(min=1)
    has_signal = ~groups.constant[groups.index] & scored
    result = torch.where(has_signal, centered, torch.zeros_like(centered))
    keep_double = isinstance(rewards, Tensor) and rewards.dtype == torch.float64
    return result if keep_double else result.float()


def constant_groups(rewards: Rewards, group_ids: GroupIds) -> int:
    """Number of groups without signal: their scored rewards are all equal, or fewer than two are scored.

    Raises:
        RewardError: as ``group_advantages``.
    """
    values, scored = _reward_tensor(rewards)
    return int(_Groups.of(values, scored, group_ids).constant.sum())


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv 1506.02438, equation (16).

    ``delta_t = r_t + gamma V_t' - V_t`` and ``A_t = delta_t + gamma lam A_t'``, where t' is the next token of the mask
    (tool tokens between are skipped), and V = A = 0 after the last one.

    Args:
        rewards: (N, T) reward given at each token.
        values: (N, T) critic's value of the state before each token.
        mask: (N, T) bool; what lies elsewhere is not read.
        gamma: discount per token, in [0, 1].
        lam: decay of the estimator, in [0, 1].

    Returns:
        (N, T) advantages and (N, T) returns (advantage + value), both 0 outside the mask; no gradient.

    Raises:
        ConfigError: gamma or lam outside [0, 1].
        ValueError: shapes differ.
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ConfigError(f"{name} = {factor} is not a discount; it must lie in [0, 1]")
    if not rewards.shape == values.shape == mask.shape or rewards.dim() != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must be equal"
        )
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    zero = torch.zeros((), dtype=dtype, device=rewards.device)
    rewards = torch.where(mask, rewards.detach().to(dtype), zero)
    values = torch.where(mask, values.detach().to(dtype), zero)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, zero)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
    return advantages, advantages + values


@dataclass(frozen=True, eq=False)
class _Groups:
    """Statistics of K groups over their scored members, float64."""

    index: Tensor  # (N,) int64, which group a row belongs to
    scored: Tensor  # (N,) bool
    size: Tensor  # (K,) scored members
    mean: Tensor  # (K,) 0 for a group without scored members
    constant: Tensor  # (K,) bool

    @classmethod
    def of(cls, values: Tensor, scored: Tensor, group_ids: GroupIds) -> _Groups:
        index = _group_index(group_ids, len(values)).to(values.device)
        num_groups = int(index.max()) + 1 if len(index) else 0
        size = values.new_zeros(num_groups).index_add(0, index, scored.double())
        mean = values.new_zeros(num_groups).index_add(0, index, values) / size.clamp(min=1)
        highest = values.new_full((num_groups,), -torch.inf)
        highest = highest.scatter_reduce(0, index, values.masked_fill(~scored, -torch.inf), "amax")
        lowest = values.new_full((num_groups,), torch.inf)
        lowest = lowest.scatter_reduce(0, index, values.masked_fill(~scored, torch.inf), "amin")
        return cls(index, scored, size, mean, (size < 2) | (highest == lowest))

    def std(self, centered: Tensor) -> Tensor:
        """(K,) sample standard deviation; 0 for a group with fewer than two scored members."""
        square = torch.where(self.scored, centered.square(), torch.zeros_like(centered))
        total = torch.zeros_like(self.mean).index_add(0, self.index, square)
        return (total / (self.size - 1).clamp(min=1)).sqrt()


def _sample_std(values: Tensor) -> Tensor:
    if len(values) < 2:
        return values.new_zeros(())
    return values.std(correction=1)


def _reward_tensor(rewards: Rewards) -> tuple[Tensor, Tensor]:
    """(N,) float64 with 0 where there is no score, and (N,) bool where there is one."""
    if isinstance(rewards, Tensor):
        values = rewards.detach().double()
    else:
        values = torch.tensor([math.nan if r is None else float(r) for r in rewards], dtype=torch.float64)
    if values.dim() != 1:
        raise RewardError(f"rewards have shape {tuple(values.shape)}; one per response, (N,), is needed")
    infinite = torch.isinf(values)
    if infinite.any():
        row = int(torch.nonzero(infinite)[0])
        raise RewardError(
            f"the reward function gave {values[row].item()} for row {row}; a reward is a finite number, "
            "or None for a response that cannot be scored"
        )
    scored = ~torch.isnan(values)
    return torch.where(scored, values, torch.zeros_like(values)), scored


def _group_index(group_ids: GroupIds, num_rows: int) -> Tensor:
    """(N,) int64 in order of first appearance (hashable ids) or of value (a tensor)."""
    if len(group_ids) != num_rows:
        raise RewardError(f"there are {num_rows} rewards for {len(group_ids)} group ids; each needs exactly one")
    if isinstance(group_ids, Tensor):
        return torch.unique(group_ids, return_inverse=True)[1]
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in group_ids], dtype=torch.int64)
