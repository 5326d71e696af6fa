"""An engine that fails as a test says, in front of one that works."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gspo.errors import EngineError, EngineFailure
from gspo.rollout.base import GenerationRequest, OnFinished, SamplingParams
from gspo.types import Completion, StopReason

#: What goes wrong in one call: given how many responses it was asked for, after how many of them, and what is raised.
Fault = tuple[int, Callable[[], BaseException]]


class SeededEngine:
    """Ids and log-probs that follow from prompt, seed and weights alone; counts calls and responses."""

    exact = True

    def __init__(self, *, independent: bool = False) -> None:
        self.independent = independent
        self.policy_version = 0
        self.calls: list[list[tuple[str, int]]] = []

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        self.calls.append([(request.prompt_id, seed) for request in requests for seed in request.seeds])
        groups = [[self._completion(r.token_ids, seed, params) for seed in r.seeds] for r in requests]
        for index, group in enumerate(groups):
            for sample, completion in enumerate(group):
                if on_finished is not None:
                    on_finished(index, sample, completion)
        return groups

    def _completion(self, prompt: tuple[int, ...], seed: int, params: SamplingParams) -> Completion:
        ids = (torch.arange(1 + seed % params.max_new_tokens) * (seed + sum(prompt))) % 97
        reason = StopReason.LENGTH if len(ids) == params.max_new_tokens else StopReason.EOS
        return Completion(ids, -(1.0 + self.policy_version) / (2.0 + ids), reason, self.policy_version)


class FaultyEngine(SeededEngine):
    """Breaks off the calls that have a fault, after some responses have been handed out."""

    def __init__(self, *faults: Fault | None, independent: bool = False, partial: bool = False) -> None:
        super().__init__(independent=independent)
        self.faults = list(faults)
        self.partial = partial

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        fault = self.faults.pop(0) if self.faults else None
        left = [fault[0] if fault is not None else len(requests) * 1000]

        def finished(index: int, sample: int, completion: Completion) -> None:
            if fault is not None and left[0] == 0:
                error = fault[1]()
                if self.partial and isinstance(error, EngineError):
                    half = len(completion.token_ids) // 2
                    error.partial[index, sample] = Completion(
                        completion.token_ids[:half], completion.logprobs[:half], StopReason.ABORTED, self.policy_version
                    )
                raise error
            left[0] -= 1
            if on_finished is not None:
                on_finished(index, sample, completion)

        return super().generate(requests, params, finished)


def failing(kind: EngineFailure, message: str = "no more", **fields: int) -> Callable[[], EngineError]:
    return lambda: EngineError(message, kind, **fields)
