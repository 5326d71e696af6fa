import copy

import pytest
import torch

from gspo.errors import RunError
from gspo.objectives import make_objective
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import load_policy
from gspo.policy.logprobs import sequence_logprobs
from gspo.train.batch import rollout_batch, train_batch
from gspo.train.optimizer import Optimizer
from gspo.train.schedule import mini_batches
from gspo.train.step import MicroBatching, old_logprobs, score, update
from gspo.types import TrainBatch

from .builders import group, rollout

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts": 4}
WHOLE = MicroBatching(None, 10_000)


def policy(kind="qwen3", seed=0):
    return load_policy(tiny=kind, tiny_config=TINY | (MOE if kind == "qwen3_moe" else {}), seed=seed, device="cpu")


def optimizer(model, **changes):
    settings = {"learning_rate": 1e-3, "num_updates": 10, "warmup_steps": 0, "schedule": "constant",
                "betas": (0.9, 0.95), "adam_eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1e9}  # fmt: skip
    return Optimizer(model, **(settings | changes))


def batch(trained, included=None, noise=0.0) -> TrainBatch:
    """Two groups of three responses with unequal lengths; old log-probs are the policy's own, plus noise."""
    generator = torch.Generator().manual_seed(1)
    groups = []
    for g, prompt in enumerate(([5, 6, 7], [8, 9])):
        rows = []
        for i, length in enumerate((4, 1, 7)):
            ids = torch.randint(4, 60, (length,), generator=generator).tolist()
            rows.append(rollout(ids, float((i + g) % 2)))
        groups.append(group(f"p{g}", prompt, *rows))
    rollouts = rollout_batch(groups)
    old = score(trained, rollouts, torch.arange(6), 1.0, WHOLE)
    old = old + noise * torch.randn(old.shape, generator=generator)
    keep = torch.tensor(included) if included else torch.ones(6, dtype=torch.bool)
    return train_batch(rollouts, old, advantage_scale="group_std", std_floor=1e-4, included=keep)


def gradient(trained, data, cut, objective="gspo", kl=None):
    """The gradient that one update accumulates, as one vector."""
    opt = optimizer(trained.model, learning_rate=1e-12)
    (mini,) = mini_batches(data, 1, seed=0, step=1)
    result = update(trained, opt, make_objective(objective, 0.2, 0.2), data, mini, temperature=1.0, cut=cut, kl=kl)
    return torch.cat([p.grad.flatten() for p in trained.model.parameters() if p.grad is not None]), result


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("objective", ["gspo", "grpo", "ppo"])
def test_gradient_and_loss_do_not_depend_on_the_micro_batch(kind, objective):
    trained = policy(kind)
    data = batch(trained, noise=0.02)
    whole, first = gradient(trained, data, WHOLE, objective)
    for cut in (MicroBatching(1, 10_000), MicroBatching(4, 10_000), MicroBatching(None, 12)):
        parts, other = gradient(trained, data, cut, objective)
        assert torch.allclose(whole, parts, atol=2e-6 * float(whole.abs().max()) + 1e-8)
        assert other.metrics["loss"] == pytest.approx(first.metrics["loss"], abs=1e-6)
        assert other.metrics["clip_fraction/token"] == pytest.approx(first.metrics["clip_fraction/token"])


def test_excluded_rows_leave_numerator_and_denominator():
    trained = policy()
    keep = [True, True, False, True, True, True]
    data = batch(trained, included=keep, noise=0.02)
    grad, result = gradient(trained, data, WHOLE)
    # The same by hand: mean over the five rows that are left of -A_i s_i, s_i = exp(mean of log ratios).
    trained.model.zero_grad()
    tokens = sequence_logprobs(trained, data.rollouts.sequences, 1.0).logprobs
    loss = torch.zeros(())
    for row in torch.tensor(keep).nonzero()[:, 0].tolist():
        n = int(data.rollouts.sequences.lengths[row])
        log_s = (tokens[row, :n] - data.old_logprobs[row, :n]).mean()
        loss = loss - data.advantages[row] * log_s.exp() / 5
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in trained.model.parameters() if p.grad is not None])
    assert torch.allclose(grad, expected, atol=1e-6)
    assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert result.metrics["num_sequences"] == 5
    assert torch.isnan(result.log_s).sum() == 1


def test_when_everything_is_excluded_the_update_is_skipped_and_counted():
    trained = policy()
    data = batch(trained, included=[False] * 6)
    before = [p.detach().clone() for p in trained.model.parameters()]
    opt = optimizer(trained.model)
    (mini,) = mini_batches(data, 1, seed=0, step=1)
    result = update(trained, opt, make_objective("gspo"), data, mini, temperature=1.0, cut=WHOLE)
    assert not result.applied
    assert result.metrics == {"skipped_updates": 1.0}
    assert opt.update == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trained.model.parameters(), strict=True))


def test_kl_towards_the_reference_adds_its_gradient():
    trained = policy()
    data = batch(trained)
    reference = data.old_logprobs - 0.1
    with_ref = TrainBatch(data.rollouts, data.old_logprobs, data.advantages * 0, data.included, reference)
    plain, _ = gradient(trained, with_ref, WHOLE)
    pulled, result = gradient(trained, with_ref, WHOLE, kl=KLPenalty(0.5, "k2", "sequence"))
    assert float(plain.abs().max()) == 0.0  # no advantage, no gradient
    assert float(pulled.abs().max()) > 0
    # k2 is half of the squared difference, 0.1 everywhere.
    assert result.metrics["kl/reference"] == pytest.approx(0.005, rel=1e-3)
    assert result.metrics["loss"] == pytest.approx(0.5 * 0.005, rel=1e-3)


def test_an_update_raises_the_probability_of_what_was_better():
    trained = policy()
    data = batch(trained)
    (mini,) = mini_batches(data, 1, seed=0, step=1)
    before = score(trained, data.rollouts, torch.arange(6), 1.0, WHOLE)
    update(trained, optimizer(trained.model), make_objective("gspo"), data, mini, temperature=1.0, cut=WHOLE)
    after = score(trained, data.rollouts, torch.arange(6), 1.0, WHOLE)
    gain = ((after - before) * data.loss_mask).sum(1) / data.loss_mask.sum(1)
    assert float((gain * data.advantages).sum()) > 0


def choose(trained, rollouts, choice, bound=1e-4, first_step=True):
    return old_logprobs(
        trained, rollouts, choice=choice, temperature=1.0, bound=bound, num_probe_rows=3, first_step=first_step,
        cut=WHOLE,
    )  # fmt: skip


def test_auto_trusts_an_engine_that_agrees_and_recomputes_for_one_that_does_not():
    trained = policy()
    honest = batch(trained).rollouts
    exact = score(trained, honest, torch.arange(6), 1.0, WHOLE)
    agreeing = copy.copy(honest)
    object.__setattr__(agreeing, "rollout_logprobs", exact)
    old, found = choose(trained, agreeing, "auto")
    assert old is agreeing.rollout_logprobs
    assert found["mismatch/mean_abs"] < 1e-5

    off = copy.copy(honest)
    object.__setattr__(off, "rollout_logprobs", torch.where(honest.response_mask, exact + 0.01, exact))
    old, found = choose(trained, off, "auto")
    assert torch.equal(old, exact)
    assert found["mismatch/mean_abs"] == pytest.approx(0.01, rel=1e-3)


def test_an_engine_above_the_bound_stops_the_first_step_only():
    trained = policy()
    rollouts = batch(trained).rollouts  # the builders say -1.0 everywhere
    with pytest.raises(RunError, match="mismatch_bound"):
        choose(trained, rollouts, "engine")
    old, _ = choose(trained, rollouts, "engine", first_step=False)
    assert old is rollouts.rollout_logprobs


def test_recompute_scores_every_row():
    trained = policy()
    rollouts = batch(trained).rollouts
    old, found = choose(trained, rollouts, "recompute")
    assert torch.equal(old, score(trained, rollouts, torch.arange(6), 1.0, WHOLE))
    assert found["mismatch/mean_abs"] > 0.1
