from __future__ import annotations

import pytest
import torch

from gspo.objectives import PolicyGradient

from .helpers import loss_and_gradient, random_batch


def test_value_and_gradient_are_the_formula() -> None:
    batch = random_batch(0)
    loss, gradient = loss_and_gradient(PolicyGradient(), batch)
    lengths = batch.mask.sum(-1)
    total = 0.0
    for n in range(5):  # the sixth row has no token
        inside = batch.mask[n]
        total += batch.advantages[n].item() * sum(batch.logprobs[n][inside].tolist()) / int(lengths[n])
        want = torch.full((int(lengths[n]),), -batch.advantages[n].item() / int(lengths[n]) / 5, dtype=torch.float64)
        torch.testing.assert_close(gradient[n][inside], want, rtol=0, atol=1e-15)
    assert loss.item() == pytest.approx(-total / 5, abs=1e-14)


def test_old_logprobs_change_metrics_only() -> None:
    batch = random_batch(1)
    other = batch.with_(old=batch.old - 3.0)
    for got, want in zip(
        loss_and_gradient(PolicyGradient(), other), loss_and_gradient(PolicyGradient(), batch), strict=True
    ):
        assert torch.equal(got, want)
    metrics = PolicyGradient()(other.logprobs, other.old, other.advantages, other.mask).metrics
    assert metrics["log_ratio/mean"][0] != 0
    assert metrics["clip_fraction/sequence"] == (0.0, 5)
