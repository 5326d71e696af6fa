from __future__ import annotations

import math

import pytest
import torch

from gspo.errors import ConfigError
from gspo.objectives.ratios import attach_gradient, bounded_exp, mean_log_ratio, selected_logprobs


def test_the_mean_is_over_the_mask_and_zero_for_an_empty_row() -> None:
    d = torch.tensor([[60.0, 1e9, -58.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert mean_log_ratio(d, mask).tolist() == [1.0, 0.0]  # (60 - 58) / 2


def test_bounded_exp_is_exp_below_ten_and_finite_above() -> None:
    got = bounded_exp(torch.tensor([-1000.0, -2.0, 0.0, 9.5, 11.0, 1e30], dtype=torch.float64)).tolist()
    assert got == pytest.approx([0.0, math.exp(-2), 1.0, math.exp(9.5), math.exp(10), math.exp(10)], rel=1e-15)


def test_attach_gradient_has_the_value_and_the_gradient_of_the_weight() -> None:
    logprobs = torch.tensor([-3.0, -0.1], requires_grad=True)
    weight = torch.tensor([1.0004, 22026.0], requires_grad=True)
    result = attach_gradient(weight, logprobs)
    assert torch.equal(result, weight)
    result.sum().backward()
    assert torch.equal(logprobs.grad, weight.detach())
    assert weight.grad is None


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_selected_logprobs_are_those_of_the_tempered_softmax(temperature: float) -> None:
    logits = [[2.0, 1.0, -1.0], [0.0, 0.0, 5.0]]
    tokens = [1, 2]
    logp, entropy = selected_logprobs(torch.tensor(logits, dtype=torch.float64), torch.tensor(tokens), temperature)
    for n, row in enumerate(logits):
        weights = [math.exp(v / temperature) for v in row]
        p = [w / sum(weights) for w in weights]
        assert logp[n].item() == pytest.approx(math.log(p[tokens[n]]), abs=1e-13)
        assert entropy[n].item() == pytest.approx(-sum(q * math.log(q) for q in p), abs=1e-13)


def test_half_precision_logits_are_upcast_and_excluded_tokens_have_no_entropy() -> None:
    logits = torch.tensor([2.0, 1.0, -math.inf], dtype=torch.bfloat16)
    logp, entropy = selected_logprobs(logits, torch.tensor(0), 1.0)
    assert logp.dtype == torch.float32
    p = 1 / (1 + math.exp(-1))
    assert logp.item() == pytest.approx(math.log(p), abs=1e-6)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_has_no_logprob_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"temperature = .* cannot be trained on"):
        selected_logprobs(torch.zeros(3), torch.tensor(0), temperature)
