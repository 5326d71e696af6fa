"""The contract of every sampling engine: requests in, completions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gspo.types import Completion

#: Called as (index of the request, index of its sample, completion) the moment a response is finished.
OnFinished = Callable[[int, int, Completion], None]


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled; the same for every request of a call.

    Top-k and top-p are left out on purpose: the log-prob of a truncated distribution is not the policy's.
    """

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    record_routing: bool = False  # completions of a mixture of experts carry the experts of each input token

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; a response needs at least 1")
        if not (0 <= self.temperature < float("inf")):
            raise ValueError(f"the temperature is {self.temperature}; it is a finite number of at least 0 (greedy)")
        if "" in self.stop_strings:
            raise ValueError("an empty stop string would end every response at once")


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and the seeds of its responses.

    Response i depends on the prompt, the weights and ``seeds[i]``, not on what else is in the batch.
    """

    prompt_id: str
    token_ids: tuple[int, ...]  # the prompt
    seeds: tuple[int, ...]  # one response per seed, each in [0, 2**63)

    @property
    def num_samples(self) -> int:
        return len(self.seeds)


class Engine(Protocol):
    """Samples responses.

    The same request, seeds and weights give the same tokens, whatever else is in the call, so that a call that failed
    can be made again. The last bits of a log-prob may depend on the rest of the call, unless the engine has an
    attribute ``independent = True``: then finished groups of a call that was broken off are used as they are.

    policy_version: number of optimizer updates behind the weights; the trainer sets it, completions carry it.
    exact: the engine computes log-probs with the very module that trains, so they need no second look.
    """

    policy_version: int

    @property
    def exact(self) -> bool: ...

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        """Completions by request and seed; ``on_finished`` is called once for each.

        A response that the engine gives up on comes back as what there is of it, with stop reason "aborted". An engine
        that waits for something outside its process keeps a time limit of its own.

        Raises:
            EngineError: sampling failed; with its kind, and with what there was of unfinished responses.
            DataError: a prompt is too long.
        """
        ...


def is_independent(engine: Engine) -> bool:
    """Whether every bit of a response is the same whatever else is in its call (see :class:`Engine`)."""
    return bool(getattr(engine, "independent", False))


@dataclass(frozen=True, eq=False)
class PaddedCompletions:
    """N completions as right-padded tensors. Lengths and reasons are the engine's; token values decide nothing."""

    token_ids: Tensor  # (N, T) int64, 0 in padding
    logprobs: Tensor  # (N, T) float32, 0 in padding
    mask: Tensor  # (N, T) bool
    lengths: Tensor  # (N,) int64
    truncated: Tensor  # (N,) bool, the response ran into max_new_tokens
    policy_versions: Tensor  # (N,) int64


def pad_completions(completions: Sequence[Completion]) -> PaddedCompletions:
    """Stacks completions; T is the longest response. An empty response is a row without tokens.

    >>> from gspo.types import StopReason
    >>> two = [
    ...     Completion(torch.tensor([5, 2]), torch.tensor([-0.1, -0.2]), StopReason.EOS, 0),
    ...     Completion(torch.tensor([7]), torch.tensor([-0.3]), StopReason.LENGTH, 0),
    ... ]
    >>> pad_completions(two).mask.int().tolist(), pad_completions(two).truncated.tolist()
    ([[1, 1], [1, 0]], [False, True])
    """
    lengths = torch.tensor([completion.token_ids.numel() for completion in completions], dtype=torch.int64)
    width = int(lengths.max()) if len(completions) else 0
    mask = torch.arange(width) < lengths[:, None]
    token_ids = torch.zeros(len(completions), width, dtype=torch.int64)
    logprobs = torch.zeros(len(completions), width, dtype=torch.float32)
    for row, completion in enumerate(completions):
        length = int(lengths[row])
        token_ids[row, :length] = completion.token_ids
        logprobs[row, :length] = completion.logprobs
    truncated = torch.tensor([completion.stop_reason.truncated for completion in completions], dtype=torch.bool)
    versions = torch.tensor([completion.policy_version for completion in completions], dtype=torch.int64)
    return PaddedCompletions(token_ids, logprobs, mask, lengths, truncated, versions)
