"""Values and gradients of the variants against loops over floats, and what they have in common with the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gspo.errors import ConfigError
from gspo.objectives import (
    CISPO,
    DAPO,
    FSPO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    SAPO,
    DrGRPO,
    GSPOToken,
    MiniRL,
    Objective,
    PolicyGradient,
)
from gspo.types import mean_metrics

from .helpers import Batch, loss_and_gradient, random_batch

#: (value, derivative by log pi) of every token of one response, times what its unit is divided by later.
Row = Callable[[list[float], list[float], float], tuple[float, list[float]]]


def cispo_row(d: list[float], logprobs: list[float], a: float) -> tuple[float, list[float]]:
    weights = [min(max(math.exp(x), 1 - 0.3), 1 + 0.4) for x in d]
    return sum(w * a * p for w, p in zip(weights, logprobs, strict=True)), [w * a for w in weights]


def sapo_row(d: list[float], logprobs: list[float], a: float) -> tuple[float, list[float]]:
    tau = 1.5 if a > 0 else 2.5
    gates = [1 / (1 + math.exp(-tau * (math.exp(x) - 1))) for x in d]
    value = sum(4 / tau * g * a for g in gates) / len(d)
    return value, [4 * g * (1 - g) * math.exp(x) * a / len(d) for g, x in zip(gates, d, strict=True)]


def gmpo_row(d: list[float], logprobs: list[float], a: float) -> tuple[float, list[float]]:
    kept = [min(x, 0.25) if a > 0 else max(x, -0.2) for x in d]
    s = math.exp(sum(kept) / len(d))
    return s * a, [s * a / len(d) if k == x else 0.0 for k, x in zip(kept, d, strict=True)]


def minirl_row(d: list[float], logprobs: list[float], a: float) -> tuple[float, list[float]]:
    cut = [(a > 0 and math.exp(x) > 1.3) or (a < 0 and math.exp(x) < 0.8) for x in d]
    terms = [0.0 if c else math.exp(x) * a for c, x in zip(cut, d, strict=True)]
    return sum(terms), terms


def dr_grpo_row(d: list[float], logprobs: list[float], a: float) -> tuple[float, list[float]]:
    values, slopes = [], []
    for x in d:
        free, bound = math.exp(x) * a, min(max(math.exp(x), 0.8), 1.3) * a
        values.append(min(free, bound) / 11)
        slopes.append(free / 11 if free <= bound else 0.0)
    return sum(values), slopes


def fspo_row(d: list[float], logprobs: list[float], a: float) -> tuple[float, list[float]]:
    log_s = sum(d) / len(d)
    low, high = math.log(1 - 0.2) / math.sqrt(len(d)), math.log(1 + 0.3) / math.sqrt(len(d))
    free, bound = math.exp(log_s) * a, math.exp(min(max(log_s, low), high)) * a
    return min(free, bound), [free / len(d) if free <= bound else 0.0] * len(d)


def luspo_row(d: list[float], logprobs: list[float], a: float) -> tuple[float, list[float]]:
    s = math.exp(sum(d) / len(d))
    free, bound = s * a, min(max(s, 1 - 0.02), 1 + 0.03) * a
    return len(d) * min(free, bound), [free if free <= bound else 0.0] * len(d)


CASES: list[tuple[Objective, Row]] = [
    (CISPO(0.3, 0.4), cispo_row),
    (SAPO(1.5, 2.5), sapo_row),
    (GMPO(0.2, 0.25), gmpo_row),
    (MiniRL(0.2, 0.3), minirl_row),
    (DrGRPO(11, 0.2, 0.3), dr_grpo_row),
    (FSPO(0.2, 0.3), fspo_row),
    (LUSPO(0.02, 0.03), luspo_row),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("objective", "row"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_value_and_gradient_are_the_formula(objective: Objective, row: Row, seed: int) -> None:
    batch = random_batch(seed, drift=0.4)
    count = int((batch.mask.any(-1) if objective.unit == "sequence" else batch.mask).sum())
    total, gradient = 0.0, torch.zeros_like(batch.logprobs)
    for n in range(len(batch.mask)):
        places = torch.nonzero(batch.mask[n])[:, 0]
        if not len(places):
            continue
        d = (batch.logprobs[n, places] - batch.old[n, places]).tolist()
        value, slopes = row(d, batch.logprobs[n, places].tolist(), float(batch.advantages[n]))
        total += value
        gradient[n, places] = -torch.tensor(slopes, dtype=torch.float64) / count
    loss, got = loss_and_gradient(objective, batch)
    assert loss.item() == pytest.approx(-total / count, abs=1e-12)
    torch.testing.assert_close(got, gradient, rtol=0, atol=1e-12)


def _same(one: Objective, other: Objective, batch: Batch, factor: float = 1.0) -> None:
    for got, want in zip(loss_and_gradient(one, batch), loss_and_gradient(other, batch), strict=True):
        torch.testing.assert_close(got * factor, want, rtol=0, atol=1e-13)


def test_dapo_is_grpo_with_a_token_mean_and_its_bounds() -> None:
    _same(DAPO(), GRPO(0.2, 0.28, "token"), random_batch(0))


def test_dr_grpo_and_minirl_weigh_tokens_alike_in_short_and_long_responses() -> None:
    batch = random_batch(1)
    on_policy = batch.with_(old=batch.logprobs)
    num_sequences = int(batch.mask.any(-1).sum())
    for objective, divisor in ((DrGRPO(9), 9.0), (MiniRL(), 1.0)):
        _, gradient = loss_and_gradient(objective, on_policy)
        expected = -batch.advantages[:, None].expand(batch.mask.shape) / divisor / num_sequences
        torch.testing.assert_close(gradient[batch.mask], expected[batch.mask], rtol=0, atol=1e-15)


def test_minirl_has_the_gradient_of_clipped_token_ratios() -> None:
    # The min has the same zero and the same slope, so only the value of cut tokens differs.
    batch = random_batch(2, drift=0.5)
    assert torch.allclose(
        loss_and_gradient(MiniRL(0.2, 0.3), batch)[1],
        loss_and_gradient(DrGRPO(1, 0.2, 0.3), batch)[1],
        rtol=0,
        atol=1e-14,
    )


def test_luspo_is_the_token_sum_of_gspo_token() -> None:
    batch = random_batch(3, drift=0.05)
    lengths, num = batch.mask.sum(-1, keepdim=True), int(batch.mask.any(-1).sum())
    loss, gradient = loss_and_gradient(LUSPO(0.01, 0.02), batch)
    base = loss_and_gradient(GSPO(0.01, 0.02), batch)[1]
    torch.testing.assert_close(gradient, base * lengths, rtol=0, atol=1e-14)
    values = [
        GSPO(0.01, 0.02)(*(x[n : n + 1] for x in (batch.logprobs, batch.old, batch.advantages, batch.mask))).loss_sum
        for n in range(len(lengths))
    ]
    by_hand = sum(float(v) * int(k) for v, k in zip(values, lengths[:, 0], strict=True)) / num
    assert loss.item() == pytest.approx(by_hand, abs=1e-13)


def test_one_token_responses_are_gspo_under_the_band_of_fspo_and_under_luspo() -> None:
    batch = random_batch(4, num_rows=40, width=1)
    for make in (FSPO, LUSPO):
        _same(make(0.1, 0.2), GSPO(0.1, 0.2), batch)


def test_the_band_of_fspo_narrows_with_the_root_of_the_length() -> None:
    # At 16 tokens the bounds on log s are a quarter of those at one token: log(1.2) / 4 = 0.0456.
    old = torch.zeros(1, 16, dtype=torch.float64) - 1
    mask, advantages = torch.ones(1, 16, dtype=torch.bool), torch.tensor([1.0], dtype=torch.float64)
    for drift, cut in ((0.045, 0.0), (0.046, 1.0)):
        out = FSPO(0.2, 0.2)(old + drift, old, advantages, mask)
        assert mean_metrics(out.metrics)["clip_fraction/sequence"] == cut
    assert FSPO(0.2, 0.2).clipped_rows(old + 0.046, old, advantages, mask).tolist() == [True]


def test_gmpo_without_cuts_is_gspo_without_bounds() -> None:
    _same(GMPO(math.inf, math.inf), GSPO(math.inf, math.inf), random_batch(5, drift=0.8))


def test_sapo_has_the_gradient_of_policy_gradient_on_policy_and_a_smaller_one_off_policy() -> None:
    batch = random_batch(6)
    on_policy = batch.with_(old=batch.logprobs)
    want = loss_and_gradient(PolicyGradient(), on_policy)[1]
    torch.testing.assert_close(loss_and_gradient(SAPO(), on_policy)[1], want, rtol=0, atol=1e-15)
    # Per unit of ratio, 4 p (1 - p) < 1 away from the ratio 1, and smaller for the larger temperature.
    off = batch.with_(old=batch.logprobs - 0.5)
    soft, hard = (loss_and_gradient(SAPO(t, t), off)[1][batch.mask].abs() for t in (1.0, 4.0))
    unbounded = want[batch.mask].abs() * math.exp(0.5)
    assert (hard < soft).all()
    assert (soft < unbounded).all()


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    batch = random_batch(7, drift=2.0)
    gradient = loss_and_gradient(CISPO(), batch)[1][batch.mask]
    assert (gradient != 0).all()
    assert (
        mean_metrics(CISPO()(batch.logprobs, batch.old, batch.advantages, batch.mask).metrics)[
            "clip_fraction/token_low"
        ]
        == 0.0
    )  # no lower bound by default


def test_values_that_are_no_bound_or_temperature_are_refused() -> None:
    for make in (
        lambda: SAPO(0.0),
        lambda: SAPO(1.0, math.inf),
        lambda: DrGRPO(0),
        lambda: GMPO(-1),
        lambda: MiniRL(-1),
    ):
        with pytest.raises(ConfigError, match="is not a"):
            make()


def test_gmpo_refuses_advantages_that_differ_inside_a_response() -> None:
    batch = random_batch(8)
    wide = torch.arange(7.0).expand(batch.mask.shape)
    with pytest.raises(ValueError, match="one per response"):
        GMPO()(batch.logprobs, batch.old, wide, batch.mask)
    assert math.isfinite(GSPOToken()(batch.logprobs, batch.old, wide, batch.mask).loss_sum)
