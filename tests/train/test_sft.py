import pytest
import torch

from gspo.policy.logprobs import sequence_logprobs
from gspo.train.sft import SftSettings, as_sequences, pair_batches, sft

from .test_step import optimizer, policy

PAIRS = [([5, 6], [7, 8, 9]), ([6, 5], [9, 8]), ([7, 7], [4])]


def settings(**changes) -> SftSettings:
    values = {"seed": 0, "num_steps": 3, "batch_size": 3, "micro_batch_tokens": 10_000, "stop_at_pass": None,
              "eval_every": 2}  # fmt: skip
    return SftSettings(**(values | changes))


def run(trained, *, evaluate=None, lr=1e-3, **changes):
    events = []
    number = sft(
        trained,
        optimizer(trained.model, learning_rate=lr),
        PAIRS,
        settings(**changes),
        evaluate=evaluate,
        emit=lambda kind, **fields: events.append((kind, fields)),
        phase=lambda name, step: None,
    )
    return number, events


def test_the_loss_is_the_mean_over_response_tokens_whatever_the_cut():
    trained = policy()
    tokens = sequence_logprobs(trained, as_sequences(PAIRS), 1.0).logprobs.detach()
    expected = -float(tokens.sum()) / 6  # three, two and one response tokens
    for limit in (10_000, 5, 1):
        _, events = run(policy(), micro_batch_tokens=limit, num_steps=1)
        assert events[0][1]["metrics"]["loss"] == pytest.approx(expected, abs=1e-5)
        assert events[0][1]["metrics"]["num_tokens"] == 6


def test_it_learns_its_pairs():
    trained = policy()
    run(trained, num_steps=60, lr=3e-3)
    tokens = sequence_logprobs(trained, as_sequences(PAIRS), 1.0).logprobs.detach()
    assert float(tokens.sum()) > -1.0  # about -25 before: six tokens of a hundred each


def test_it_stops_at_the_wanted_pass_rate():
    rates = iter([0.1, 0.5, 0.9])
    number, events = run(
        policy(), num_steps=10, stop_at_pass=0.4, evaluate=lambda step: {"metrics": {"pass@1": next(rates)}}
    )
    assert number == 4  # measured at updates 2 and 4
    assert [fields["step"] for kind, fields in events if kind == "evaluation"] == [2, 4]


def test_every_pair_comes_once_an_epoch_in_an_order_of_its_own():
    batches = pair_batches(6, 4, seed=0)
    taken = [pair for _ in range(6) for pair in next(batches)]
    epochs = [taken[i : i + 6] for i in range(0, 24, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_same_seed_gives_the_same_weights():
    first, second = policy(), policy()
    run(first)
    run(second)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
