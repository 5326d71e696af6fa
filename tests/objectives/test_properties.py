"""What must hold for every objective."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import ConfigError, NumericalError
from gspo.objectives import (
    CISPO,
    DAPO,
    FSPO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    PPO,
    SAPO,
    DrGRPO,
    GSPOToken,
    KLPenalty,
    MiniRL,
    Objective,
    PolicyGradient,
)
from gspo.types import add_metrics, mean_metrics

from .helpers import Batch, loss_and_gradient, random_batch
from .reference import gradient_tensor, gspo, token_ratio

CLIPPING = [GSPO(0.02, 0.03), GSPOToken(0.02, 0.03), GRPO(0.2, 0.27), GRPO(0.2, 0.27, "token"), PPO(0.2, 0.2)]
# Their values and gradients are tested in files of their own.
VARIANTS = [DAPO(), DrGRPO(20), CISPO(0.3, 0.4), GMPO(0.2, 0.2), LUSPO(), FSPO(), MiniRL(), SAPO()]
TRAINING = [*CLIPPING, *VARIANTS, PolicyGradient()]
ALL = [*TRAINING, KLPenalty(0.5, "k1"), KLPenalty(0.5, "k2", "sequence"), KLPenalty(0.5, "k3")]
NON_FINITE = [math.nan, math.inf, -math.inf]


def label(objective: object) -> str:
    return repr(objective)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("objective", CLIPPING, ids=label)
def test_value_and_gradient_are_the_formula_in_float64(objective: Objective, seed: int) -> None:
    batch = random_batch(seed)
    low, high = objective.clip_low, objective.clip_high  # type: ignore[attr-defined]
    if objective.name in ("gspo", "gspo_token"):
        expected = gspo(batch.logprobs, batch.old, batch.advantages, batch.mask, low, high)
    else:
        wide = batch.advantages[:, None].expand(batch.mask.shape)
        expected = token_ratio(batch.logprobs, batch.old, wide, batch.mask, low, high, objective.unit == "token")
    loss, gradient = loss_and_gradient(objective, batch)
    assert loss.item() == pytest.approx(expected.loss, abs=1e-13)
    torch.testing.assert_close(gradient, gradient_tensor(expected), rtol=0, atol=1e-13)


@pytest.mark.parametrize("objective", ALL, ids=label)
@pytest.mark.parametrize("where", ["logprobs", "old", "both"])
@pytest.mark.parametrize("fill", [*NON_FINITE, 1e9, -1e9, 0.0])
def test_masked_slots_reach_nothing(objective: Objective, where: str, fill: float) -> None:
    batch = random_batch(0, dtype=torch.float32)
    loss, gradient = loss_and_gradient(objective, batch)
    filled = {
        name: getattr(batch, name).masked_fill(~batch.mask, fill)
        for name in ("logprobs", "old")
        if where in (name, "both")
    }
    dirty_loss, dirty_gradient = loss_and_gradient(objective, batch.with_(**filled))
    assert torch.equal(dirty_loss, loss)  # bit for bit
    assert torch.equal(dirty_gradient, gradient)
    assert torch.equal(dirty_gradient[~batch.mask], torch.zeros_like(dirty_gradient[~batch.mask]))


@pytest.mark.parametrize("objective", TRAINING, ids=label)
def test_masked_advantages_reach_nothing(objective: Objective) -> None:
    batch = random_batch(1)
    loss, gradient = loss_and_gradient(objective, batch)
    wide = batch.advantages[:, None].expand(batch.mask.shape).masked_fill(~batch.mask, math.nan)
    per_row = batch.advantages.masked_fill(~batch.mask.any(-1), math.nan)  # the row without tokens
    for advantages in (wide, per_row):
        dirty_loss, dirty_gradient = loss_and_gradient(objective, batch, advantages)
        assert torch.equal(dirty_loss, loss)
        assert torch.equal(dirty_gradient, gradient)


@pytest.mark.parametrize("objective", ALL, ids=label)
@pytest.mark.parametrize(("left", "right"), [(0, 5), (3, 0), (2, 9)])
def test_padding_side_and_amount_do_not_matter(objective: Objective, left: int, right: int) -> None:
    batch = random_batch(2)
    padded = Batch(
        *(torch.nn.functional.pad(x, (left, right), value=7.0) for x in (batch.logprobs, batch.old)),
        batch.advantages,
        torch.nn.functional.pad(batch.mask, (left, right), value=False),
    )
    loss, gradient = loss_and_gradient(objective, batch)
    padded_loss, padded_gradient = loss_and_gradient(objective, padded)
    torch.testing.assert_close(padded_loss, loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(padded_gradient[:, left : left + 7], gradient, rtol=0, atol=1e-14)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000), cut_points=st.sets(st.integers(1, 5), max_size=4), which=st.integers(0, len(ALL) - 1)
)
def test_any_cut_into_micro_batches_gives_the_same_loss_gradient_and_metrics(
    seed: int, cut_points: set[int], which: int
) -> None:
    objective = ALL[which]
    batch = random_batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    whole = objective(batch.logprobs, batch.old, batch.advantages, batch.mask)
    loss, gradient = loss_and_gradient(objective, batch)

    leaf = batch.logprobs.clone().requires_grad_()
    edges = [0, *sorted(cut_points), 6]
    parts = []
    for start, end in pairwise(edges):
        rows = order[start:end]
        parts.append(objective(leaf[rows], batch.old[rows], batch.advantages[rows], batch.mask[rows]))
        (parts[-1].loss_sum / whole.count).backward()
    assert sum(p.count for p in parts) == whole.count
    assert sum(p.loss_sum.item() for p in parts) / whole.count == pytest.approx(loss.item(), abs=1e-13)
    torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=1e-13)
    assert mean_metrics(add_metrics([p.metrics for p in parts])) == pytest.approx(
        mean_metrics(whole.metrics), abs=1e-12
    )


@pytest.mark.parametrize("objective", ALL, ids=label)
def test_rows_without_tokens_leave_numerator_and_denominator(objective: Objective) -> None:
    batch = random_batch(3)
    fewer = Batch(batch.logprobs[:-1], batch.old[:-1], batch.advantages[:-1], batch.mask[:-1])
    loss, gradient = loss_and_gradient(objective, batch)
    fewer_loss, fewer_gradient = loss_and_gradient(objective, fewer)
    torch.testing.assert_close(loss, fewer_loss, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient[:-1], fewer_gradient, rtol=0, atol=1e-15)


@pytest.mark.parametrize("objective", ALL, ids=label)
def test_nothing_left_is_a_zero_sum_with_zero_gradient(objective: Objective) -> None:
    batch = random_batch(4)
    leaf = batch.logprobs.clone().requires_grad_()
    out = objective(leaf, batch.old, batch.advantages, torch.zeros_like(batch.mask))
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.count) == (0.0, 0)
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))
    assert all(count == 0 and math.isfinite(value) for value, count in out.metrics.values())


@pytest.mark.parametrize("objective", CLIPPING, ids=label)
def test_at_old_equal_to_current_the_ratio_is_one_and_nothing_is_clipped(objective: Objective) -> None:
    batch = random_batch(5)
    same = batch.with_(old=batch.logprobs)
    out = objective(same.logprobs, same.old, same.advantages, same.mask)
    means = mean_metrics(out.metrics)
    assert means["ratio/mean"] == 1.0
    assert means["log_ratio/abs_mean"] == 0.0
    assert [v for k, v in means.items() if k.startswith("clip_fraction")] == [0.0] * 6
    # There every sequence-unit objective has the gradient of plain policy gradient.
    if objective.unit == "sequence":
        _, gradient = loss_and_gradient(objective, same)
        _, control = loss_and_gradient(PolicyGradient(), same)
        torch.testing.assert_close(gradient, control, rtol=0, atol=1e-15)


@pytest.mark.parametrize("objective", CLIPPING, ids=label)
@pytest.mark.parametrize(
    ("advantage", "shift", "cut"), [(1.0, 1.0, True), (1.0, -1.0, False), (-1.0, -1.0, True), (-1.0, 1.0, False)]
)
def test_each_sign_is_cut_on_its_own_side_only(objective: Objective, advantage: float, shift: float, cut: bool) -> None:
    old = torch.tensor([[-2.0, -3.0]], dtype=torch.float64)
    batch = Batch(old + shift, old, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
    loss, gradient = loss_and_gradient(objective, batch)
    low, high = objective.clip_low, objective.clip_high  # type: ignore[attr-defined]
    if cut:
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert loss.item() == pytest.approx(-(1 + high) if advantage > 0 else 1 - low, abs=1e-15)
    else:
        # loss = -A exp(shift) for both tokens; each carries half of it
        assert loss.item() == pytest.approx(-advantage * math.exp(shift), abs=1e-14)
        assert gradient.tolist()[0] == pytest.approx([-advantage * math.exp(shift) / 2] * 2, abs=1e-14)


@pytest.mark.parametrize("objective", TRAINING, ids=label)
def test_bfloat16_is_upcast_before_the_subtraction(objective: Objective) -> None:
    half = random_batch(6, drift=0.05, dtype=torch.bfloat16)
    single = Batch(half.logprobs.float(), half.old.float(), half.advantages.float(), half.mask)
    loss, gradient = loss_and_gradient(objective, half)
    expected_loss, expected_gradient = loss_and_gradient(objective, single)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient.bfloat16())


@pytest.mark.parametrize("objective", ALL, ids=label)
@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs"])
def test_a_non_finite_logprob_inside_the_mask_is_named(objective: Objective, value: float, name: str) -> None:
    batch = random_batch(7)
    mask = torch.ones_like(batch.mask)
    tensors = {"logprobs": batch.logprobs.clone(), "old_logprobs": batch.old.clone()}
    tensors[name][2, 4] = value
    with pytest.raises(NumericalError, match=rf"^{name} is {value} at row 2, token 4, .*\(1 of 6 rows"):
        objective(tensors["logprobs"], tensors["old_logprobs"], batch.advantages, mask)


@pytest.mark.parametrize("objective", TRAINING, ids=label)
@pytest.mark.parametrize("value", NON_FINITE)
def test_a_non_finite_advantage_of_a_row_that_enters_is_named(objective: Objective, value: float) -> None:
    batch = random_batch(8)
    advantages = batch.advantages.clone()
    advantages[1] = value
    with pytest.raises(NumericalError, match=f"advantages is {value} at row 1"):
        objective(batch.logprobs, batch.old, advantages, batch.mask)


@pytest.mark.parametrize("objective", TRAINING, ids=label)
@pytest.mark.parametrize("shift", [-700.0, -120.0, 120.0, 700.0])
def test_extreme_ratios_stay_finite_in_float32(objective: Objective, shift: float) -> None:
    old = torch.full((2, 3), -800.0)
    batch = Batch(old + shift, old, torch.tensor([1.0, -1.0]), torch.ones(2, 3, dtype=torch.bool))
    loss, gradient = loss_and_gradient(objective, batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("objective", TRAINING, ids=label)
def test_every_objective_reports_the_same_names(objective: Objective) -> None:
    batch = random_batch(9)
    out = objective(batch.logprobs, batch.old, batch.advantages, batch.mask)
    assert set(out.metrics) == {
        *(f"clip_fraction/{u}{side}" for u in ("sequence", "token") for side in ("", "_low", "_high")),
        "log_ratio/mean",
        "log_ratio/abs_mean",
        "ratio/mean",
        "kl/k3_old",
    }
    assert isinstance(objective, Objective)
    assert out.unit == objective.unit


def test_no_gradient_flows_into_old_logprobs_or_advantages() -> None:
    batch = random_batch(10)
    leaves = [x.clone().requires_grad_() for x in (batch.logprobs, batch.old, batch.advantages)]
    GRPO()(*leaves, batch.mask).loss_sum.backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None


@pytest.mark.parametrize("objective", ALL, ids=label)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(objective: Objective) -> None:
    x, a, mask = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2, 4\), logprobs \(2, 3\)"):
        objective(x, torch.zeros(2, 4), a, mask)
    with pytest.raises(ValueError, match=r"response_mask has shape \(3, 2\)"):
        objective(x, x, a, mask.T)
    with pytest.raises(ValueError, match="one row per response"):
        objective(x[0], x[0], a, mask[0])
    with pytest.raises(TypeError, match="must be bool"):
        objective(x, x, a, mask.float())
    with pytest.raises(TypeError, match="float dtype"):
        objective(x.long(), x, a, mask)


@pytest.mark.parametrize("objective", TRAINING, ids=label)
def test_advantages_of_another_shape_are_refused(objective: Objective) -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\).*one per response"):
        objective(x, x, torch.zeros(3), mask)


@pytest.mark.parametrize("make", [GSPO, GSPOToken, GRPO, PPO])
@pytest.mark.parametrize("bounds", [(-0.1, 0.2), (0.2, math.nan)])
def test_bounds_that_are_none_are_refused(make: type[GSPO], bounds: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="is not a bound"):
        make(*bounds)


@pytest.mark.parametrize("make", [GSPO, GRPO, PPO])
def test_infinite_bounds_never_clip(make: type[GSPO]) -> None:
    batch = random_batch(11, drift=2.0)
    unbounded, wide = make(math.inf, math.inf), make(1.0, 1e12)
    for got, want in zip(loss_and_gradient(unbounded, batch), loss_and_gradient(wide, batch), strict=True):
        assert torch.equal(got, want)
    fraction = unbounded(batch.logprobs, batch.old, batch.advantages, batch.mask).metrics["clip_fraction/token"]
    assert fraction == (0.0, int(batch.mask.sum()))
