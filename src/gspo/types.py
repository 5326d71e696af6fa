"""The vocabulary: one frozen type per stage of a step, in the order in which a step makes them.

Names of sizes: B prompts, G responses per prompt, N = B * G sequences (prompt-major), T the longest
response of the batch, p and t the lengths of one prompt and one response.

Every per-token tensor is aligned with the token it belongs to: ``x[n, t]`` belongs to
``token_ids[n, t]``. The shift between logits and targets exists in ``policy/logprobs.py`` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

#: One chat message, ``{"role": ..., "content": ...}``.
Message = Mapping[str, Any]
#: What an objective sums over.
Unit = Literal["sequence", "token"]
#: A metric before it is divided: (sum, count). Sums and counts add up over micro-batches and ranks.
Metric = tuple[float, float]


class StopReason(StrEnum):
    """Why the engine stopped a response. Decided by the engine, never read off token values."""

    EOS = "eos"  # sampled one of the stop token ids (the token is part of the response)
    STOP_STRING = "stop_string"  # a stop string appeared
    LENGTH = "length"  # ran into max_new_tokens: the response is truncated
    EMPTY = "empty"  # nothing was generated
    ABORTED = "aborted"  # the engine failed or gave up on it: what there is of it is no answer, and is not scored

    @property
    def truncated(self) -> bool:
        return self is StopReason.LENGTH


@dataclass(frozen=True)
class Prompt:
    """One task instance.

    >>> Prompt(id="train/0", content="2+2=", token_ids=(5, 9, 5, 3), columns={"answer": "4"}).id
    'train/0'
    """

    id: str  # unique within the run; groups are told apart by it
    content: str | tuple[Message, ...]  # as the user's data had it: text or chat messages
    token_ids: tuple[int, ...]  # (p,) what both the engine and the trainer read
    task: str = ""  # e.g. "reasoning_gym:chain_sum"; empty for a file
    columns: Mapping[str, Any] = field(default_factory=dict)  # free columns, reach the reward


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine sampled: one record that always travels whole."""

    token_ids: Tensor  # (t,) int64, the sampled ids, stop token included
    logprobs: Tensor  # (t,) float32, of the distribution that was sampled from
    stop_reason: StopReason
    policy_version: int  # number of optimizer updates behind the weights that sampled it
    routing: Tensor | None = None  # (p + t - 1, L, K) uint8 or int16, experts of each input token; see policy/moe/

    def __post_init__(self) -> None:
        ids, logprobs = self.token_ids.shape, self.logprobs.shape
        if len(ids) != 1 or ids != logprobs:
            raise ValueError(
                f"a completion has {self.logprobs.numel()} log-probs for {self.token_ids.numel()} ids; "
                "each sampled id needs exactly one"
            )
        routing, shortest = self.routing, max(ids.numel() - 1, 0)
        if routing is not None and (routing.dim() != 3 or routing.shape[0] < shortest):
            raise ValueError(
                f"a completion of {ids.numel()} ids has routes {tuple(routing.shape)}; they are (prompt and response "
                "tokens but the last, layers, experts per token)"
            )


@dataclass(frozen=True)
class Score:
    """What the rewards say of one rollout. ``value is None``: it could not be scored."""

    value: float | None  # weighted sum of the components
    components: Mapping[str, float | None] = field(default_factory=dict)  # by reward name, unweighted
    failure: str | None = None  # why there is no value; never an exception turned into 0


@dataclass(frozen=True, eq=False)
class Rollout:
    """One response of a group, scored."""

    token_ids: Tensor  # (t,) int64, everything after the prompt
    response_mask: Tensor  # (t,) bool, the tokens that the policy itself sampled
    rollout_logprobs: Tensor  # (t,) float32
    text: str  # decoded, special tokens left out: what the rewards read
    stop_reason: StopReason
    policy_version: int
    score: Score
    routing: Tensor | None = None  # as in Completion


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """The G responses to one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def has_signal(self) -> bool:
        """Whether at least two of its scored rollouts differ in reward."""
        values = {r.score.value for r in self.rollouts if r.score.value is not None}
        return len(values) > 1


@dataclass(frozen=True, eq=False)
class Sequences:
    """Prompts and their responses as the policy reads them; the prompt of a group is stored once.

    Three sequences over two prompts::

        prompts      = (tensor([5, 9]), tensor([7]))
        prompt_index = tensor([0, 0, 1])
        token_ids    = tensor([[3, 4, 2], [6, 2, 0], [8, 2, 0]])   # right-padded with 0
        lengths      = tensor([3, 2, 2])
    """

    prompts: tuple[Tensor, ...]  # each (p,) int64
    prompt_index: Tensor  # (N,) int64, which prompt a row answers
    token_ids: Tensor  # (N, T) int64, response tokens, right-padded
    lengths: Tensor  # (N,) int64, response tokens of each row

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def rows(self, index: Tensor) -> Sequences:
        """The given rows (a view of the prompts, T cut to the longest response that is left)."""
        lengths = self.lengths[index]
        width = int(lengths.max()) if lengths.numel() else 0
        used, prompt_index = torch.unique(self.prompt_index[index], return_inverse=True)
        prompts = tuple(self.prompts[i] for i in used.tolist())
        return Sequences(prompts, prompt_index, self.token_ids[index, :width], lengths)


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """N rollouts as tensors, prompt-major."""

    sequences: Sequences
    response_mask: Tensor  # (N, T) bool, False on padding and on tokens the policy did not sample
    rollout_logprobs: Tensor  # (N, T) float32
    rewards: Tensor  # (N,) float64, nan = could not be scored
    group_ids: Tensor  # (N,) int64
    truncated: Tensor  # (N,) bool
    policy_versions: Tensor  # (N,) int64
    routing: tuple[Tensor, ...] | None = None  # per row (p + t - 1, L, K), recorded by the engine; None: not recorded


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """A rollout batch with what the objectives need besides."""

    rollouts: RolloutBatch
    old_logprobs: Tensor  # (N, T) float32, denominator of the ratio
    advantages: Tensor  # (N,) float32
    included: Tensor  # (N,) bool, rows that enter the loss, numerator and denominator alike
    ref_logprobs: Tensor | None = None  # (N, T) float32; None when the run has no KL term

    @property
    def loss_mask(self) -> Tensor:
        """(N, T) bool: the tokens that enter the loss."""
        return self.rollouts.response_mask & self.included[:, None]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The rows of one optimizer update, with the GLOBAL number of units in it."""

    index: int  # 0 .. M-1 within the rollout batch
    rows: Tensor  # (n,) int64, into the train batch
    counts: Mapping[Unit, int]  # over all micro-batches and ranks, before any cut


@dataclass(frozen=True, eq=False)
class ObjectiveOutput:
    """A sum, never a mean: who calls owns the denominator.

    ``loss_sum / count`` is the loss of one undivided batch.
    """

    loss_sum: Tensor  # () float32 (float64 for float64 inputs)
    unit: Unit
    count: int  # units of this call that enter the loss
    metrics: Mapping[str, Metric]


def add_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Adds sums and counts by name."""
    total: dict[str, Metric] = {}
    for part in parts:
        for name, (value, count) in part.items():
            old = total.get(name, (0.0, 0.0))
            total[name] = (old[0] + value, old[1] + count)
    return total


def mean_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """sum / count by name; a metric without units is left out."""
    return {name: value / count for name, (value, count) in metrics.items() if count}
