from __future__ import annotations

import pytest
import torch

from gspo.objectives import GRPO, PPO

from .helpers import loss_and_gradient, random_batch
from .reference import gradient_tensor, token_ratio


@pytest.mark.parametrize("seed", range(4))
def test_advantages_per_token_match_the_formula(seed: int) -> None:
    batch = random_batch(seed)
    advantages = torch.randn(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = token_ratio(batch.logprobs, batch.old, advantages, batch.mask, 0.2, 0.2, by_token=True)
    loss, gradient = loss_and_gradient(PPO(), batch, advantages)
    assert loss.item() == pytest.approx(expected.loss, abs=1e-13)
    torch.testing.assert_close(gradient, gradient_tensor(expected), rtol=0, atol=1e-13)


def test_with_shared_advantages_it_is_the_token_mean_of_grpo() -> None:
    batch = random_batch(1)
    for got, want in zip(
        loss_and_gradient(PPO(0.1, 0.3), batch), loss_and_gradient(GRPO(0.1, 0.3, "token"), batch), strict=True
    ):
        assert torch.equal(got, want)
