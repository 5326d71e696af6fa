from __future__ import annotations

import math

import pytest
import torch

from gspo.errors import ConfigError
from gspo.objectives import KLPenalty
from gspo.objectives.kl import k1, k2, k3

from .helpers import loss_and_gradient, random_batch


def test_estimators_are_their_formulas() -> None:
    policy, reference = (torch.tensor(v, dtype=torch.float64) for v in ([-1.0, -2.0], [-1.7, -1.2]))
    x = [-0.7, 0.8]  # reference - policy
    assert k1(policy, reference).tolist() == pytest.approx([-v for v in x], abs=1e-15)
    assert k2(policy, reference).tolist() == pytest.approx([v * v / 2 for v in x], abs=1e-15)
    assert k3(policy, reference).tolist() == pytest.approx([math.exp(v) - 1 - v for v in x], abs=1e-15)


def test_k1_and_k3_average_to_the_exact_divergence() -> None:
    """Expectation over the policy by summing over a whole vocabulary of 5."""
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, 1.0, -1.0, 1.5], dtype=torch.float64), 0)
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in (k1, k3):
        assert float((policy.exp() * estimator(policy, reference)).sum()) == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_goes_on_as_its_tangent_beyond_ten(dtype: torch.dtype) -> None:
    policy = torch.tensor([-10.5, -101.0, -1001.0, -1e6], dtype=dtype, requires_grad=True)
    value = k3(policy, torch.tensor([-1.0], dtype=dtype))
    value.sum().backward()
    slope = math.expm1(10)
    expected = [math.expm1(9.5) - 9.5] + [slope - 10 + (x - 10) * slope for x in (100.0, 1000.0, 999_999.0)]
    assert value.tolist() == pytest.approx(expected, rel=1e-6)
    assert policy.grad.tolist() == pytest.approx([-math.expm1(9.5), -slope, -slope, -slope], rel=1e-6)


def test_k3_is_never_negative_and_increases_away_from_zero() -> None:
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    value = k3(torch.zeros_like(x), x)
    assert (value >= 0).all()
    assert (value[300:].diff() > 0).all()
    assert (value[:301].diff() < 0).all()


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_the_penalty_pulls_towards_the_reference(unit: str) -> None:
    """d/d log pi: k3 gives 1 - exp(x), k2 and k1 give -x, with x = reference - policy."""
    batch = random_batch(0)
    x = batch.old - batch.logprobs
    lengths = batch.mask.sum(-1, keepdim=True).clamp(min=1).double()
    weight = torch.ones_like(x) / batch.mask.sum() if unit == "token" else 1.0 / lengths / 5
    for estimator, slope in (("k1", -x), ("k2", -x), ("k3", 1 - x.exp())):
        _, gradient = loss_and_gradient(KLPenalty(0.25, estimator, unit), batch)  # type: ignore[arg-type]
        want = torch.where(batch.mask, 0.25 * slope * weight, 0.0)
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-14)


def test_the_metric_has_no_coefficient_and_k1_keeps_its_value() -> None:
    batch = random_batch(1)
    out = KLPenalty(0.5, "k1")(batch.logprobs, batch.old, batch.advantages, batch.mask)
    total = (batch.logprobs - batch.old)[batch.mask].sum().item()
    num_tokens = int(batch.mask.sum())
    assert out.metrics["kl/reference"] == (pytest.approx(total, abs=1e-13), num_tokens)
    assert out.loss_sum.item() == pytest.approx(0.5 * total, abs=1e-13)
    assert (out.unit, out.count) == ("token", num_tokens)


def test_advantages_are_not_read() -> None:
    batch = random_batch(2)
    nan = torch.full_like(batch.advantages, math.nan)
    for got, want in zip(
        loss_and_gradient(KLPenalty(), batch, nan), loss_and_gradient(KLPenalty(), batch), strict=True
    ):
        assert torch.equal(got, want)


def test_an_unknown_estimator_or_a_bad_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KL estimator 'k4'"):
        KLPenalty(estimator="k4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"coefficient is -0\.1"):
        KLPenalty(coefficient=-0.1)
