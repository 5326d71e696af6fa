"""Cold start: next-token loss on the responses of given pairs, packed, until a step count or a held-out pass rate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.logprobs import sequence_logprobs
from gspo.seeding import derive_seed
from gspo.train.optimizer import Optimizer
from gspo.train.schedule import micro_batches
from gspo.types import Sequences

#: Prompt ids and response ids, the end-of-turn token included.
Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class SftSettings:
    """The schedule of a cold start; the names are the recipe's."""

    seed: int
    num_steps: int
    batch_size: int
    micro_batch_tokens: int
    stop_at_pass: float | None
    eval_every: int
    checkpoint_every: int = 0  # 0: none but at its end, which is the caller's


def pair_batches(num_pairs: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of pair numbers: every pair once an epoch, each epoch in an order of its own."""
    queue: list[int] = []
    epoch = 0
    while True:
        while len(queue) < batch_size:
            generator = torch.Generator().manual_seed(derive_seed(seed, "sft", epoch))
            queue += torch.randperm(num_pairs, generator=generator).tolist()
            epoch += 1
        yield queue[:batch_size]
        queue = queue[batch_size:]


def as_sequences(pairs: Sequence[Pair]) -> Sequences:
    """One row a pair."""
    responses = [torch.tensor(response, dtype=torch.long) for _, response in pairs]
    return Sequences(
        prompts=tuple(torch.tensor(prompt, dtype=torch.long) for prompt, _ in pairs),
        prompt_index=torch.arange(len(pairs)),
        token_ids=pad_sequence(responses, batch_first=True),
        lengths=torch.tensor([len(response) for response in responses]),
    )


def sft(
    policy: CausalPolicy,
    optimizer: Optimizer,
    pairs: Sequence[Pair],
    settings: SftSettings,
    *,
    evaluate: Callable[[int], Mapping[str, Any]] | None,
    emit: Callable[..., None],
    phase: Callable[[str, int], None],
    save: Callable[[int], str] | None = None,
    first: int = 0,
) -> int:
    """Trains on ``pairs``; returns the number of updates made.

    The loss of an update is the mean over the response tokens of its batch, counted before the batch is cut.
    Ends early when ``evaluate`` reports pass@1 of at least ``stop_at_pass``.

    Args:
        save: a checkpoint after so many updates -> its path; writes none that is there already.
        first: updates behind the weights of ``policy`` and the state of ``optimizer``.
    """
    batches = itertools.islice(pair_batches(len(pairs), settings.batch_size, settings.seed), first, None)

    def save_if_due(step: int) -> None:
        due = settings.checkpoint_every > 0 and step % settings.checkpoint_every == 0
        if save is not None and due and 0 < step < settings.num_steps:
            emit("checkpoint", step=0, path=save(step))

    save_if_due(first)  # the event comes after the checkpoint that it tells of, and is not in it
    for step in range(first + 1, settings.num_steps + 1):
        phase("sft", step)
        metrics = _sft_update(policy, optimizer, as_sequences([pairs[i] for i in next(batches)]), settings)
        emit("sft", update=step, metrics=metrics)
        if evaluate is not None and settings.stop_at_pass is not None and step % settings.eval_every == 0:
            fields = evaluate(step)
            emit("evaluation", step=step, **fields)
            if fields["metrics"]["pass@1"] >= settings.stop_at_pass:
                return step
        save_if_due(step)
    return settings.num_steps


def _sft_update(
    policy: CausalPolicy, optimizer: Optimizer, sequences: Sequences, settings: SftSettings
) -> dict[str, float]:
    optimizer.zero_grad()
    num_tokens = int(sequences.lengths.sum())
    loss_sum = 0.0
    rows = _by_length(sequences)
    for micro in micro_batches(sequences, rows, micro_batch_size=None, micro_batch_tokens=settings.micro_batch_tokens):
        part = sequences.rows(micro)
        # Padding is 0 in the log-probs, so the sum is over response tokens.
        loss = -sequence_logprobs(policy, part, 1.0).logprobs.sum()
        (loss / num_tokens).backward()
        loss_sum += float(loss.detach())
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.apply()
    return {
        "loss": loss_sum / num_tokens,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "num_tokens": float(num_tokens),
    }


def _by_length(sequences: Sequences) -> Tensor:
    """Rows of similar length side by side."""
    return torch.argsort(sequences.lengths, stable=True)
