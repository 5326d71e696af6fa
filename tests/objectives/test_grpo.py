from __future__ import annotations

import math

import pytest
import torch

from gspo.errors import ConfigError
from gspo.objectives import GRPO

from .helpers import loss_and_gradient, random_batch


def test_the_default_unit_weighs_responses_and_token_weighs_tokens() -> None:
    batch = random_batch(0)
    same = batch.with_(old=batch.logprobs)
    lengths = batch.mask.sum(-1)
    num_sequences, num_tokens = int((lengths > 0).sum()), int(lengths.sum())
    # ratio 1: loss = -mean A over responses, or -sum(len A) / sum(len)
    by_sequence, by_token = loss_and_gradient(GRPO(), same)[0], loss_and_gradient(GRPO(unit="token"), same)[0]
    assert by_sequence.item() == pytest.approx(-batch.advantages[:-1].sum().item() / num_sequences, abs=1e-14)
    assert by_token.item() == pytest.approx(-(batch.advantages * lengths).sum().item() / num_tokens, abs=1e-14)


def test_a_cut_token_leaves_the_others_of_its_response_alone() -> None:
    old = torch.tensor([[-2.0, -2.0]], dtype=torch.float64)
    batch = random_batch(0, num_rows=1, width=2).with_(
        old=old,
        logprobs=old + torch.tensor([[1.0, 0.1]], dtype=torch.float64),
        advantages=torch.tensor([1.0], dtype=torch.float64),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    _, gradient = loss_and_gradient(GRPO(), batch)
    assert gradient.tolist()[0] == pytest.approx([0.0, -math.exp(0.1) / 2], abs=1e-15)


def test_the_log_ratio_of_a_token_is_bounded_at_ten_and_keeps_its_gradient() -> None:
    old = torch.tensor([[-60.0]], dtype=torch.float64)
    batch = random_batch(0, num_rows=1, width=1).with_(
        old=old,
        logprobs=old + 50,
        advantages=torch.tensor([-1.0], dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
    )
    loss, gradient = loss_and_gradient(GRPO(), batch)
    assert loss.item() == gradient.item() == pytest.approx(math.exp(10), rel=1e-12)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="grpo has no unit 'batch'"):
        GRPO(unit="batch")  # type: ignore[arg-type]
