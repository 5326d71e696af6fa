"""Our side of a workload: one round is a rollout and its updates, or the updates alone.

Settings of a round: "" as it is; "all" computes rows without signal and the backward pass of clipped rows too (w7);
"half" takes every second row (w6).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.protocol import claim_stdout, clock, hear, peak_resident_bytes, resident_bytes, say
from benchmarks.workloads import (
    CLIP_HIGH,
    CLIP_LOW,
    LEARNING_RATE,
    WORKLOADS,
    Workload,
    forward_flops,
    model_size,
    prompt_texts,
)
from gspo.objectives import make_objective
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.train import step as training
from gspo.train.batch import rollout_batch, train_batch
from gspo.train.optimizer import Optimizer
from gspo.train.schedule import mini_batches
from gspo.train.step import MicroBatching, old_logprobs, score, update
from gspo.types import Completion, Prompt, Rollout, RolloutGroup, Score, StopReason, TrainBatch

CUT = MicroBatching(None, 16384)


class Ours:
    """A loaded policy, its engine and its optimizer."""

    def __init__(self, workload: Workload, path: str) -> None:
        self.workload = workload
        self.policy: CausalPolicy = load_policy(path=path, device="cpu")
        self.size = model_size(self.policy.model.config, sum(p.numel() for p in self.policy.base.layers.parameters()))
        self.engine = EmbeddedEngine(self.policy)
        self.optimizer = Optimizer(
            self.policy.model,
            learning_rate=LEARNING_RATE,
            num_updates=10**6,
            warmup_steps=0,
            schedule="constant",
            betas=(0.9, 0.999),
            adam_eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        self.objective = make_objective("gspo", CLIP_LOW, CLIP_HIGH)
        self.generator = torch.Generator().manual_seed(0)
        self.prompts = self._prompts()
        self.step = 0

    def _prompts(self) -> list[tuple[int, ...]]:
        workload = self.workload
        if workload.rollout:
            return [tuple(self.policy.tokenizer(text)["input_ids"]) for text in prompt_texts(workload)]
        return [self._ids(workload.prompt_length) for _ in range(workload.num_prompts)]

    def _ids(self, length: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, min(self.policy.vocab_size, 100), (length,), generator=self.generator).tolist())

    def sample(self) -> list[list[Completion]]:
        """Responses of exactly the wanted length: nothing stops them."""
        size = self.workload.group_size
        requests = [
            GenerationRequest(
                str(i), ids, tuple(range((self.step * 1000 + i) * size, (self.step * 1000 + i + 1) * size))
            )
            for i, ids in enumerate(self.prompts)
        ]
        return self.engine.generate(requests, SamplingParams(self.workload.lengths[0]))

    def made_up(self) -> list[list[Completion]]:
        lengths, size = self.workload.response_lengths, self.workload.group_size
        rows = []
        for length in lengths:
            ids = torch.tensor(self._ids(length))
            rows.append(Completion(ids, torch.zeros(length), StopReason.LENGTH, 0))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def batch(self, completions: list[list[Completion]], rows: slice = slice(None)) -> TrainBatch:
        """Scored as the workload says."""
        groups = [
            RolloutGroup(
                Prompt(str(i), "", ids),
                tuple(
                    Rollout(
                        c.token_ids, torch.ones(len(c.token_ids), dtype=torch.bool), c.logprobs, "", c.stop_reason, 0,
                        Score(self.workload.reward(i * self.workload.group_size + j)),
                    )
                    for j, c in enumerate(row)
                ),
            )
            for i, (ids, row) in enumerate(list(zip(self.prompts, completions, strict=True))[rows])
        ]  # fmt: skip
        rollouts = rollout_batch(groups)
        everything = torch.arange(len(rollouts.rewards))
        if self.workload.rollout:
            old, _ = old_logprobs(
                self.policy, rollouts, choice="auto", temperature=1.0, bound=CLIP_LOW / 10, num_probe_rows=8,
                first_step=self.step == 0, cut=CUT,
            )  # fmt: skip
        else:
            old = score(self.policy, rollouts, everything, 1.0, CUT)
        included = torch.ones(len(everything), dtype=torch.bool)
        return train_batch(rollouts, old, advantage_scale="group_std", std_floor=1e-4, included=included)

    def updates(self, batch: TrainBatch) -> dict[str, float]:
        """The M updates; returns what they skipped."""
        skipped = {"tokens/skipped_forward": 0.0, "tokens/skipped_backward": 0.0}
        for mini in mini_batches(batch, self.workload.num_mini_batches, seed=0, step=self.step):
            result = update(self.policy, self.optimizer, self.objective, batch, mini, temperature=1.0, cut=CUT)
            for name in skipped:
                skipped[name] += result.metrics.get(name, 0.0)
        return skipped

    def flops(self, batch: TrainBatch) -> float:
        sequences = batch.rollouts.sequences
        prompts = [len(prompt) for prompt in sequences.prompts]
        rows = list(zip(sequences.prompt_index.tolist(), sequences.lengths.tolist(), strict=True))
        return forward_flops(self.size, prompts, rows)

    def round(self, setting: str) -> dict[str, Any]:
        """One measurement."""
        seconds: dict[str, float] = {}
        start = clock()
        completions = self.sample() if self.workload.rollout else self.made_up()
        sampled = clock()
        if self.workload.rollout:
            seconds["rollout"] = sampled - start
        batch = self.batch(completions, slice(None, None, 2) if setting == "half" else slice(None))
        if self.workload.versus == "skipping":
            batch = without_signal_and_clipped(batch, self.workload.group_size)
        prepared = clock()
        if self.workload.rollout:
            seconds["old_logprobs"] = prepared - sampled
        with computing_everything() if setting == "all" else mock.patch.dict({}):
            skipped = self.updates(batch)
        seconds["update"] = clock() - prepared
        seconds["step"] = sum(seconds.values())
        forward = self.flops(batch)
        self.step += 1
        return {
            "seconds": seconds,
            "flops": {"rollout": forward if self.workload.rollout else 0.0, "update": 3 * forward},
            "tokens": int(batch.rollouts.sequences.lengths.sum()),
            "skipped": skipped,
            "peak_bytes": peak_resident_bytes(),
        }


def without_signal_and_clipped(batch: TrainBatch, group_size: int) -> TrainBatch:
    """Every second group without signal; of all responses 30 % beyond their bound, among those with signal."""
    from dataclasses import replace

    rows = torch.arange(len(batch.advantages))
    signal = (rows // group_size) % 2 == 0
    order = torch.argsort((rows * 7919) % 1009 + 10_000 * ~signal)
    clipped = order[: round(0.3 * len(rows))]
    old = batch.old_logprobs.clone()
    # Far outside the band on the side where the minimum takes the constant branch.
    old[clipped] -= 0.05 * batch.advantages[clipped, None].sign()
    advantages = torch.where(signal, batch.advantages, 0.0)
    return replace(batch, advantages=advantages, old_logprobs=old)


@contextmanager
def computing_everything() -> Iterator[None]:
    """No row is skipped: what an update costs without ``train/skipping.py``."""
    everything = mock.patch.object(training, "with_signal", lambda a, _: torch.ones(len(a), dtype=torch.bool))
    with everything, mock.patch.object(training, "rows_to_differentiate", return_value=None):
        yield


def main() -> None:
    channel = claim_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("model")
    arguments = parser.parse_args()
    ours = Ours(WORKLOADS[arguments.workload], arguments.model)
    say(channel, ready="ours", model_bytes=resident_bytes(), torch=torch.__version__)
    while (setting := hear()) is not None:
        say(channel, **ours.round(setting))


if __name__ == "__main__":
    main()
