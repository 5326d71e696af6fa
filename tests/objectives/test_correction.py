from __future__ import annotations

import math

import pytest
import torch

from gspo.errors import ConfigError
from gspo.objectives import GRPO, GSPO, Correction, GSPOToken
from gspo.objectives.bundle import CORRECTION_BOUNDS, correction_findings
from gspo.objectives.correction import corrected_advantages
from gspo.types import mean_metrics

from .helpers import loss_and_gradient, random_batch

D = torch.float64
MASK = torch.tensor([[True, True, True], [True, True, False]])
OLD = torch.full((2, 3), -1.0, dtype=D)
# log(old / mu) by token: [log 3, 0, -log 4], [log 1.5, log 0.8, (masked)]
MU = OLD - torch.tensor([[math.log(3), 0.0, -math.log(4)], [math.log(1.5), math.log(0.8), 7.0]], dtype=D)
A = torch.tensor([1.0, -1.0], dtype=D)


def weights(correction: Correction, pi: torch.Tensor = OLD) -> list[object]:
    result, _ = correction.weights(pi, OLD, MU, A, MASK)
    return result.tolist()


def test_tis_caps_the_weight_of_each_token() -> None:
    assert weights(Correction("tis")) == [pytest.approx([2.0, 1.0, 0.25]), pytest.approx([1.5, 0.8, 0.0])]


def test_icepop_drops_tokens_on_both_sides_and_weighs_the_others() -> None:
    assert weights(Correction("icepop")) == [pytest.approx([3.0, 1.0, 0.0]), pytest.approx([1.5, 0.8, 0.0])]
    assert weights(Correction("icepop", 0.2, 1.2)) == [pytest.approx([0, 1.0, 0.25]), pytest.approx([0, 0.8, 0.0])]


def test_seq_geo_and_seq_prod_keep_or_drop_whole_responses() -> None:
    # geometric means: (3/4)^(1/3) = 0.909 and 1.2^(1/2) = 1.095; products: 0.75 and 1.2
    assert weights(Correction("seq_geo")) == [0.0, 0.0]
    assert weights(Correction("seq_geo", 0.9, 1.05)) == [1.0, 0.0]
    assert weights(Correction("seq_prod")) == [1.0, 1.0]
    assert weights(Correction("seq_prod", 0.8, 1.3)) == [0.0, 1.0]


def test_the_negative_mask_drops_only_bad_responses_that_became_unlikely() -> None:
    # mean log(mu / pi) of row 1 is -log(1.2) / 2 = -0.091 at pi = old; pi = old - 0.2 makes it 0.109
    assert weights(Correction("negative_mask")) == [1.0, 1.0]
    assert weights(Correction("negative_mask"), OLD - 0.2) == [1.0, 0.0]
    assert weights(Correction("negative_mask", high=0.2), OLD - 0.2) == [1.0, 1.0]
    assert Correction("negative_mask").weights(OLD - 9, OLD, MU, -A, MASK)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("kind", CORRECTION_BOUNDS)
def test_an_engine_that_agrees_leaves_everything_as_it_is(kind: str) -> None:
    batch = random_batch(0)
    result, metrics = Correction(kind).weights(batch.old, batch.old, batch.old, batch.advantages, batch.mask)
    wide = corrected_advantages(batch.advantages, result)
    want = loss_and_gradient(GSPOToken(), batch)
    got = loss_and_gradient(GSPOToken(), batch, wide)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    means = mean_metrics(metrics)
    assert means == {"correction/weight": 1.0, "correction/masked": 0.0, "correction/outside": 0.0}


@pytest.mark.parametrize("kind", CORRECTION_BOUNDS)
def test_masked_slots_are_not_read_and_no_gradient_flows(kind: str) -> None:
    batch = random_batch(1)
    mu = batch.old + 0.1
    leaf = batch.logprobs.clone().requires_grad_()
    clean, _ = Correction(kind).weights(leaf, batch.old, mu, batch.advantages, batch.mask)
    dirty = [x.masked_fill(~batch.mask, math.nan) for x in (batch.logprobs, batch.old, mu)]
    again, _ = Correction(kind).weights(*dirty, batch.advantages, batch.mask)
    assert not clean.requires_grad
    if clean.dim() == 1:
        assert torch.equal(clean, again)
    else:
        assert torch.equal(clean[batch.mask], again[batch.mask])
        assert (again[~batch.mask] == 0).all()


def test_a_weight_of_two_doubles_a_token_and_the_denominator_stays() -> None:
    batch = random_batch(2)
    mu = batch.old - math.log(2)  # old / mu = 2, the cap
    factor, _ = Correction("tis").weights(batch.old, batch.old, mu, batch.advantages, batch.mask)
    for objective in (GRPO(), GSPOToken()):
        want = loss_and_gradient(objective, batch)
        got = loss_and_gradient(objective, batch, corrected_advantages(batch.advantages, factor))
        torch.testing.assert_close(got[1], 2 * want[1], rtol=0, atol=1e-14)
        assert got[0].item() == pytest.approx(2 * want[0].item(), abs=1e-13)


def test_the_ratio_times_the_correction_is_the_whole_weight() -> None:
    # pi / old * old / mu = pi / mu: with the cap out of the way, GRPO's gradient is that of the ratio to the engine.
    batch = random_batch(3, drift=0.05)
    mu = batch.old + 0.3 * torch.randn(batch.old.shape, generator=torch.Generator().manual_seed(1), dtype=D)
    factor, _ = Correction("tis", high=1e6).weights(batch.old, batch.old, mu, batch.advantages, batch.mask)
    got = loss_and_gradient(GRPO(0.9, 9.0), batch, corrected_advantages(batch.advantages, factor))[1]
    want = loss_and_gradient(GRPO(0.99, 99.0), batch.with_(old=mu))[1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_a_response_that_a_sequence_mask_drops_stays_in_the_denominator() -> None:
    batch = random_batch(4)
    keep = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=D)
    out = GSPO()(batch.logprobs, batch.old, corrected_advantages(batch.advantages, keep), batch.mask)
    assert out.count == 5


def test_extreme_differences_stay_finite() -> None:
    for kind in CORRECTION_BOUNDS:
        for shift in (-800.0, 800.0):
            result, _ = Correction(kind).weights(OLD, OLD, OLD + shift, A, MASK)
            assert torch.isfinite(result).all()


def test_bounds_that_keep_nothing_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="no correction 'mis'"):
        Correction("mis")
    with pytest.raises(ConfigError, match="needs 0 <= low < high"):
        Correction("icepop", 5.0, 0.5)


def test_findings_name_what_has_no_effect() -> None:
    assert correction_findings("gspo", "none", None, None, "engine") == []
    assert correction_findings("gspo", "tis", None, None, "recompute") == []
    assert correction_findings("gspo", "negative_mask", None, None, "engine") == []
    [(severity, text)] = correction_findings("gspo", "icepop", None, None, "engine")
    assert severity == "error"
    assert "which is 1" in text
    [(_, text)] = correction_findings("gmpo", "tis", None, None, "recompute")
    assert "one weight per response" in text
    [(_, text)] = correction_findings("gspo", "seq_geo", 2.0, None, "recompute")
    assert "keeps nothing" in text
