from __future__ import annotations

import math

import pytest
import torch

from gspo.objectives import GRPO, GSPO, GSPOToken
from gspo.types import mean_metrics

from .helpers import Batch, loss_and_gradient, random_batch


def rows(logprobs: list[list[float]], old: list[list[float]], advantages: list[float]) -> Batch:
    double = torch.float64
    return Batch(
        torch.tensor(logprobs, dtype=double),
        torch.tensor(old, dtype=double),
        torch.tensor(advantages, dtype=double),
        torch.ones(len(old), len(old[0]), dtype=torch.bool),
    )


def test_the_mean_is_not_clamped_token_by_token() -> None:
    # log ratios [60, -58]: mean 1, so s = e; A < 0 and s > 1 is the side that the min leaves free.
    batch = rows([[-1.0, -61.0]], [[-61.0, -3.0]], [-1.0])
    out = GSPO()(batch.logprobs, batch.old, batch.advantages, batch.mask)
    assert out.loss_sum.item() == pytest.approx(math.e, abs=1e-12)
    _, gradient = loss_and_gradient(GSPO(), batch)
    assert gradient.tolist()[0] == pytest.approx([math.e / 2] * 2, abs=1e-12)  # -s A / |y|


def test_the_final_log_ratio_is_bounded_and_the_gradient_keeps_its_direction() -> None:
    # mean log ratio 50, A < 0: weight e^10 instead of e^50, on both tokens alike
    batch = rows([[-1.0, -1.0]], [[-51.0, -51.0]], [-2.0])
    loss, gradient = loss_and_gradient(GSPO(), batch)
    assert loss.item() == pytest.approx(2 * math.exp(10), rel=1e-12)
    assert gradient.tolist()[0] == pytest.approx([math.exp(10)] * 2, rel=1e-12)


def test_one_token_responses_are_grpo() -> None:
    whole = random_batch(0, num_rows=40, width=1)
    for low, high in ((3e-4, 4e-4), (0.2, 0.27)):
        for got, want in zip(
            loss_and_gradient(GSPO(low, high), whole), loss_and_gradient(GRPO(low, high), whole), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("seed", range(4))
def test_gspo_token_with_shared_advantages_is_gspo(seed: int) -> None:
    batch = random_batch(seed, drift=0.05)
    wide = batch.advantages[:, None].expand(batch.mask.shape)
    want = loss_and_gradient(GSPO(0.01, 0.01), batch)
    for advantages in (batch.advantages, wide):
        got = loss_and_gradient(GSPOToken(0.01, 0.01), batch, advantages)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    call = (batch.logprobs, batch.old, batch.advantages, batch.mask)
    assert GSPOToken(0.01, 0.01)(*call).metrics == GSPO(0.01, 0.01)(*call).metrics


def test_gspo_token_gives_each_token_its_advantage_under_the_ratio_of_the_sequence() -> None:
    # log s = 0.1, above log 1.05: positive tokens are cut at 1.05, negative ones are free with weight s.
    batch = rows([[-1.0, -1.0, -1.0, -1.0]], [[-1.4, -1.0, -1.0, -1.0]], [0.0])
    advantages = torch.tensor([[2.0, -1.0, 0.0, 4.0]], dtype=torch.float64)
    loss, gradient = loss_and_gradient(GSPOToken(0.05, 0.05), batch, advantages)
    s = math.exp(0.1)
    assert loss.item() == pytest.approx(-(1.05 * 2 - s + 0 + 1.05 * 4) / 4, abs=1e-14)
    assert gradient.tolist()[0] == pytest.approx([0.0, s / 4, 0.0, 0.0], abs=1e-15)
    out = GSPOToken(0.05, 0.05)(batch.logprobs, batch.old, advantages, batch.mask)
    assert out.metrics["clip_fraction/token_high"] == (2.0, 4)
    assert out.metrics["clip_fraction/sequence_high"] == (1.0, 1)  # at least one token
    rows_cut = GSPOToken(0.05, 0.05).clipped_rows(batch.logprobs, batch.old, advantages, batch.mask)
    assert rows_cut.tolist() == [False]  # a token of it still has a gradient


def test_gspo_refuses_advantages_that_differ_inside_a_response() -> None:
    batch = random_batch(1)
    advantages = batch.advantages[:, None].expand(batch.mask.shape).clone()
    advantages[2, 0] += 1.0
    with pytest.raises(ValueError, match=r"advantages of row 2 differ.*GSPOToken"):
        GSPO()(batch.logprobs, batch.old, advantages, batch.mask)


def test_a_wild_token_in_a_calm_sequence_is_cut_by_grpo_and_not_by_gspo() -> None:
    # token log ratios [0.5, -0.5, 0, 0]: the sequence's mean is 0
    batch = rows([[-1.0, -1.5, -1.0, -1.0]], [[-1.5, -1.0, -1.0, -1.0]], [1.0])
    call = (batch.logprobs, batch.old, batch.advantages, batch.mask)
    assert GSPO()(*call).metrics["clip_fraction/sequence"] == (0.0, 1)
    grpo = GRPO()(*call).metrics
    assert grpo["clip_fraction/token_high"] == (1.0, 4)
    assert grpo["clip_fraction/token_low"] == (0.0, 4)  # A > 0: below the band nothing is cut
    assert grpo["clip_fraction/sequence"] == (1.0, 1)
    _, gradient = loss_and_gradient(GSPO(), batch)
    assert gradient.tolist()[0] == pytest.approx([-0.25] * 4, abs=1e-15)
    _, gradient = loss_and_gradient(GRPO(), batch)
    assert gradient.tolist()[0] == pytest.approx([0.0, -math.exp(-0.5) / 4, -0.25, -0.25], abs=1e-15)


def test_every_response_weighs_the_same_whatever_its_length() -> None:
    old = torch.full((2, 50), -1.0, dtype=torch.float64)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[0, :1] = True
    mask[1, :] = True
    batch = Batch(old, old, torch.tensor([1.0, -1.0], dtype=torch.float64), mask)
    loss, gradient = loss_and_gradient(GSPO(), batch)
    assert loss.item() == pytest.approx(0.0, abs=1e-15)
    assert gradient.sum(dim=1).tolist() == pytest.approx([-0.5, 0.5], abs=1e-15)


@pytest.mark.parametrize("seed", range(4))
def test_clipped_rows_are_the_rows_without_gradient(seed: int) -> None:
    batch = random_batch(seed, num_rows=30, drift=0.05)
    objective = GSPO(0.01, 0.01)
    cut = objective.clipped_rows(batch.logprobs, batch.old, batch.advantages, batch.mask)
    _, gradient = loss_and_gradient(objective, batch)
    has_tokens = batch.mask.any(dim=-1)
    assert 0 < int(cut.sum()) < 29
    assert torch.equal(cut, (gradient == 0).all(dim=-1) & has_tokens)
    fraction = objective(batch.logprobs, batch.old, batch.advantages, batch.mask).metrics["clip_fraction/sequence"]
    assert fraction == (float(cut.sum()), 29)


def test_metrics_are_the_formulas() -> None:
    # row 0: d = [0.02, 0.04], log s = 0.03, A > 0: cut high. row 1: d = [-0.06, 0.02], log s = -0.02, A < 0: cut low.
    batch = rows([[-1.0, -1.0], [-1.0, -1.0]], [[-1.02, -1.04], [-0.94, -1.02]], [1.0, -1.0])
    means = mean_metrics(GSPO(0.01, 0.01)(batch.logprobs, batch.old, batch.advantages, batch.mask).metrics)
    k3 = [math.exp(d) - 1 - d for d in (0.02, 0.04, -0.06, 0.02)]
    assert means == pytest.approx(
        {
            "clip_fraction/sequence": 1.0,
            "clip_fraction/sequence_low": 0.5,
            "clip_fraction/sequence_high": 0.5,
            "clip_fraction/token": 1.0,
            "clip_fraction/token_low": 0.5,
            "clip_fraction/token_high": 0.5,
            "log_ratio/mean": 0.005,
            "log_ratio/abs_mean": 0.025,
            "ratio/mean": (math.exp(0.03) + math.exp(-0.02)) / 2,
            "kl/k3_old": sum(k3) / 4,
        },
        abs=1e-12,
    )


def test_the_paper_band_is_resolved_in_float32() -> None:
    """Log ratios just inside and just outside 3e-4 / 4e-4 over 512 tokens of log-prob about -20."""
    inside, outside = 3.9e-4, 4.1e-4
    old = torch.full((2, 512), -20.0)
    batch = Batch(
        old + torch.tensor([[inside], [outside]]),
        old,
        torch.tensor([1.0, 1.0]),
        torch.ones(2, 512, dtype=torch.bool),
    )
    assert GSPO().clipped_rows(batch.logprobs, batch.old, batch.advantages, batch.mask).tolist() == [False, True]
