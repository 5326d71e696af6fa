"""Skipped work changes nothing but the time: gradients, loss and clip fractions are those of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gspo.objectives import make_objective
from gspo.objectives.bundle import PAPER_BOUNDS
from gspo.objectives.kl import KLPenalty
from gspo.train import step as training
from gspo.train.schedule import mini_batches
from gspo.train.skipping import Skipped, rows_to_differentiate, with_signal
from gspo.train.step import update

from .test_step import WHOLE, batch, optimizer, policy


def run(trained, data, objective, kl=None):
    opt = optimizer(trained.model, learning_rate=1e-12)
    (mini,) = mini_batches(data, 1, seed=0, step=1)
    result = update(trained, opt, objective, data, mini, temperature=1.0, cut=WHOLE, kl=kl)
    return torch.cat([p.grad.flatten() for p in trained.model.parameters()]), result


def without_skipping(monkeypatch):
    monkeypatch.setattr(training, "with_signal", lambda a, _: torch.ones(len(a), dtype=torch.bool))
    monkeypatch.setattr(training, "rows_to_differentiate", lambda *_: None)


def some_batch(trained, num_quiet=2, num_clipped=2):
    """Six rows: the first have advantage 0, the last are far outside the band on the side that is clipped."""
    data = batch(trained)
    advantages = torch.tensor([1.0, -1.0, 1.0, -0.5, 0.5, 1.5])
    advantages[:num_quiet] = 0.0
    old = data.old_logprobs.clone()
    if num_clipped:
        old[-num_clipped:] -= 0.3 * advantages[-num_clipped:, None].sign()
    return replace(data, advantages=advantages, old_logprobs=old)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("num_quiet", "num_clipped"), [(2, 0), (0, 4), (2, 3), (3, 3), (6, 0), (0, 1)])
def test_skipping_changes_no_number(kind, num_quiet, num_clipped, monkeypatch):
    trained = policy(kind)
    data = some_batch(trained, num_quiet, num_clipped)
    objective = make_objective("gspo", 1e-3, 1e-3)
    skipped, result = run(trained, data, objective)
    without_skipping(monkeypatch)
    whole, expected = run(trained, data, objective)
    assert torch.allclose(skipped, whole, atol=2e-6 * float(whole.abs().max()) + 1e-9)
    for name in ("loss", "clip_fraction/sequence", "clip_fraction/token", "num_sequences", "num_tokens"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-6), name
    assert result.sums["clip_fraction/sequence"][1] == 6
    assert int(torch.isnan(result.log_s).sum()) == num_quiet


def test_what_was_saved_is_counted():
    """Lengths are 4, 1, 7, 4, 1, 7: two quiet rows have 5 tokens; the last two, clipped, 8 of the other 19."""
    result = run(*(lambda t: (t, some_batch(t, 2, 2)))(policy()), make_objective("gspo", 1e-3, 1e-3))[1]
    assert result.metrics["tokens/skipped_forward"] == 5
    assert result.metrics["tokens/skipped_backward"] == 5 + 8
    few = run(*(lambda t: (t, some_batch(t, 0, 1)))(policy()), make_objective("gspo", 1e-3, 1e-3))[1]
    assert few.metrics["tokens/skipped_backward"] == 0  # 7 clipped tokens of 24: another forward would cost more


@pytest.mark.parametrize("name", sorted(PAPER_BOUNDS))
def test_under_every_objective_a_row_without_advantage_has_no_loss_and_no_gradient(name):
    """What skipping rests on."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(4, 5, generator=generator, dtype=torch.float64)
    old = logprobs + 0.1 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    leaf = logprobs.clone().requires_grad_()
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    mask = torch.ones(4, 5, dtype=torch.bool)
    options = {"length_divisor": 5.0} if name == "dr_grpo" else {}
    objective = make_objective(name, *(PAPER_BOUNDS[name] or (None, None)), **options)
    output = objective(leaf, old, advantages, mask)
    output.loss_sum.backward()
    assert torch.equal(leaf.grad[[1, 3]], torch.zeros(2, 5, dtype=torch.float64))
    rows = torch.tensor([0, 2])
    alone = objective(logprobs[rows], old[rows], advantages[rows], mask[rows])
    torch.testing.assert_close(alone.loss_sum, output.loss_sum.detach(), atol=1e-12, rtol=0)


def test_with_a_kl_term_nothing_is_skipped():
    trained = policy()
    data = some_batch(trained, 3, 3)
    data = replace(data, ref_logprobs=data.old_logprobs - 0.1)
    _, result = run(trained, data, make_objective("gspo", 1e-3, 1e-3), kl=KLPenalty(0.5, "k2", "sequence"))
    assert result.metrics["tokens/skipped_backward"] == 0
    assert not torch.isnan(result.log_s).any()


def test_a_batch_without_signal_still_lets_the_moments_move_the_weights():
    """As it would with the zero gradient of the whole computation."""
    trained = policy()
    opt = optimizer(trained.model)
    objective = make_objective("gspo", 0.2, 0.2)
    for data in (batch(trained), some_batch(trained, 6, 0)):
        before = [p.detach().clone() for p in trained.model.parameters()]
        (mini,) = mini_batches(data, 1, seed=0, step=1)
        result = update(trained, opt, objective, data, mini, temperature=1.0, cut=WHOLE)
        assert result.applied
        assert any(not torch.equal(a, b) for a, b in zip(before, trained.model.parameters(), strict=True))
    assert result.metrics["loss"] == 0
    assert result.metrics["grad_norm"] == 0
    assert result.metrics["clip_fraction/sequence"] == 0


def test_signal_is_an_advantage_somewhere():
    assert with_signal(torch.tensor([0.0, 1.0]), False).tolist() == [False, True]
    assert with_signal(torch.tensor([[0.0, 0.0], [0.0, -1.0]]), False).tolist() == [False, True]
    assert with_signal(torch.tensor([0.0]), True).tolist() == [True]


def test_an_objective_that_clips_tokens_is_differentiated_whole():
    rows = torch.zeros(2, 3)
    assert rows_to_differentiate(make_objective("grpo"), rows, rows, torch.ones(2), torch.ones(2, 3).bool()) is None


def test_counts_of_clip_fractions_include_rows_that_were_not_computed():
    sums = {"clip_fraction/sequence": (1.0, 2.0), "clip_fraction/token_low": (3.0, 9.0), "entropy": (4.0, 9.0)}
    assert Skipped(rows=2, tokens=7).counted(sums) == {
        "clip_fraction/sequence": (1.0, 4.0),
        "clip_fraction/token_low": (3.0, 16.0),
        "entropy": (4.0, 9.0),
    }
