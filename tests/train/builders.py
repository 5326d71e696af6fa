"""Small rollout groups for the tests of the training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gspo.types import Prompt, Rollout, RolloutGroup, Score, StopReason


def rollout(
    ids: Sequence[int],
    reward: float | None,
    *,
    logprobs: Sequence[float] | None = None,
    stop_reason: StopReason = StopReason.EOS,
    components: dict[str, float | None] | None = None,
) -> Rollout:
    return Rollout(
        token_ids=torch.tensor(ids, dtype=torch.long),
        response_mask=torch.ones(len(ids), dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs if logprobs is not None else [-1.0] * len(ids)),
        text="",
        stop_reason=stop_reason,
        policy_version=0,
        score=Score(reward, components or {}),
    )


def group(prompt_id: str, prompt: Sequence[int], *rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(Prompt(prompt_id, prompt_id, tuple(prompt)), rollouts)
