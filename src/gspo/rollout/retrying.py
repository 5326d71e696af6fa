"""An engine that is asked again when it fails, where that is safe; how often it failed is kept.

| kind | what is done |
|---|---|
| timeout, crashed | the call is made again: with the same seeds the same tokens come |
| out_of_memory | the same, in halves, quarters, ... of the call |
| rejected, bad_numbers, other | not made again: the answer would be the same |

An engine that is ``independent`` is asked only for the responses that did not come; another one for the whole call, so
that a log-prob has the same last bits as without the failure (but for calls that had to be cut). When retries do not
help, the failure is raised, or, with ``keep``, the finished responses are returned and the others are "aborted".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field, replace

import torch

from gspo.errors import EngineError, EngineFailure, GspoError, NumericalError
from gspo.rollout.base import Engine, GenerationRequest, OnFinished, SamplingParams, is_independent
from gspo.types import Completion, StopReason

#: What may come out of an engine that failed; ``failure_kind`` tells which of them are failures of the engine.
_RAISED = (GspoError, RuntimeError, OSError, MemoryError, EOFError)
#: What torch says on a CPU that has no memory left, where it has no type of its own for it.
_NO_MEMORY = ("can't allocate memory", "not enough memory")
_REMEDIES: Mapping[EngineFailure, str] = {
    EngineFailure.OUT_OF_MEMORY: "lower rollout.max_slots or rollout.prompts_per_call",
    EngineFailure.TIMEOUT: "look whether the engine is overloaded; raise its time limit",
    EngineFailure.CRASHED: "look at the engine's own log, and for the kernel's out-of-memory messages (dmesg)",
    EngineFailure.REJECTED: "look at the prompt that is named",
}


@dataclass(frozen=True)
class Failure:
    """One call of the engine that failed."""

    kind: EngineFailure
    message: str
    retried: bool  # whether it was made again


@dataclass(eq=False)
class FailureLog:
    """The failures of a run; each is told as it happens.

    Args:
        tell: called with each failure.
    """

    tell: Callable[[Failure], None] = lambda failure: None
    failures: list[Failure] = field(default_factory=list)

    def note(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.tell(failure)

    @property
    def counts(self) -> dict[str, int]:
        """Failures and retries so far."""
        return {"failures": len(self.failures), "retries": sum(failure.retried for failure in self.failures)}


class RetryingEngine:
    """See the module's text.

    Args:
        max_retries: further attempts of one call.
        keep: when these do not help, return what is finished instead of raising.
    """

    def __init__(self, engine: Engine, log: FailureLog, *, max_retries: int, keep: bool) -> None:
        self._engine = engine
        self._log = log
        self._max_retries = max_retries
        self._keep = keep

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._engine.policy_version = version

    @property
    def exact(self) -> bool:
        return self._engine.exact

    @property
    def independent(self) -> bool:
        return is_independent(self._engine)

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        """See :class:`gspo.rollout.base.Engine`.

        Raises:
            EngineError: the call failed for good; names the kind and the usual remedy.
            NumericalError: the policy's logits are not finite.
        """
        call = _Call(requests, on_finished)
        num_parts, attempt = 1, 0
        while True:  # until it is answered or given up on
            try:
                for asked, part in call.open_parts(num_parts, whole=not self.independent):
                    call.take(self._engine.generate(part, params, call.receiving(asked)))
                return call.result(self.policy_version)
            except _RAISED as error:
                kind = failure_kind(error)
                if kind is None:
                    raise
                call.take_partial(error)
                again = kind.is_retryable and attempt < self._max_retries
                if self._keep and isinstance(error, EngineError) and error.request is not None:
                    again = call.leave_out(error.request)
                self._log.note(Failure(kind, str(error), again))
                attempt += 1
                if kind is EngineFailure.OUT_OF_MEMORY:
                    num_parts *= 2
                if not again:
                    return self._give_up(call, error, kind, attempt)

    def _give_up(self, call: _Call, error: BaseException, kind: EngineFailure, attempts: int) -> list[list[Completion]]:
        if self._keep and call.num_finished and (kind.is_retryable or kind is EngineFailure.REJECTED):
            return call.result(self.policy_version)
        if isinstance(error, NumericalError):
            raise error
        times = f"{attempts} times" if attempts > 1 else "once"
        remedy = f"; {_REMEDIES[kind]}" if kind in _REMEDIES else ""
        raise EngineError(f"the engine failed {times} ({kind}): {error}{remedy}", kind) from error


def failure_kind(error: BaseException) -> EngineFailure | None:
    """How an engine failed that raised this; None for what is no failure of an engine."""
    if isinstance(error, EngineError):
        return error.kind
    if isinstance(error, NumericalError):
        return EngineFailure.BAD_NUMBERS
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return EngineFailure.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return EngineFailure.OUT_OF_MEMORY
    if isinstance(error, TimeoutError):
        return EngineFailure.TIMEOUT
    if isinstance(error, ConnectionError | EOFError | BrokenExecutor):
        return EngineFailure.CRASHED
    return None


#: Where a response belongs: index of its request, index of its sample.
Place = tuple[int, int]


class _Call:
    """What has come of one call, over all attempts."""

    def __init__(self, requests: Sequence[GenerationRequest], on_finished: OnFinished | None) -> None:
        self._requests = requests
        self._on_finished = on_finished
        self._finished: dict[Place, Completion] = {}
        self._partial: dict[Place, Completion] = {}
        self._told: set[Place] = set()
        self._left_out: set[int] = set()  # requests that the engine does not take
        self._asked: Sequence[Sequence[Place]] = ()  # of the part that is being asked for

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def open_parts(self, num_parts: int, *, whole: bool) -> list[tuple[list[list[Place]], list[GenerationRequest]]]:
        """What is to be asked, in about ``num_parts`` calls: where each response belongs, and the requests.

        whole: ask for every response again, the finished ones too.
        """
        wanted: list[tuple[list[Place], GenerationRequest]] = []
        for index, request in enumerate(self._requests):
            places = [(index, sample) for sample in range(request.num_samples)]
            if not whole:
                places = [place for place in places if place not in self._finished]
            if index not in self._left_out and (places or whole):
                seeds = tuple(request.seeds[sample] for _, sample in places)
                wanted.append((places, replace(request, seeds=seeds)))
        size = max(1, -(-len(wanted) // num_parts))
        chunks = [wanted[first : first + size] for first in range(0, len(wanted), size)]
        return [([places for places, _ in chunk], [request for _, request in chunk]) for chunk in chunks]

    def receiving(self, asked: Sequence[Sequence[Place]]) -> OnFinished:
        """Keeps what comes while the engine works, and hands it on."""
        self._asked = asked

        def finished(index: int, sample: int, completion: Completion) -> None:
            place = asked[index][sample]
            if completion.stop_reason is StopReason.ABORTED:
                self._partial[place] = completion
            else:
                self._finished.setdefault(place, completion)
                self._tell(place, completion)

        return finished

    def take(self, groups: Sequence[Sequence[Completion]]) -> None:
        """Checks and keeps what the engine returned.

        Raises:
            EngineError: another number of completions than was asked for.
        """
        wanted, given = [len(places) for places in self._asked], [len(group) for group in groups]
        if wanted != given:
            raise EngineError(f"the engine gave {given} completions for requests of {wanted}")
        for places, group in zip(self._asked, groups, strict=True):
            for place, completion in zip(places, group, strict=True):
                aborted = completion.stop_reason is StopReason.ABORTED
                (self._partial if aborted else self._finished)[place] = completion

    def take_partial(self, error: BaseException) -> None:
        """Keeps what the failed call had of unfinished responses."""
        if isinstance(error, EngineError):
            for (index, sample), completion in error.partial.items():
                self._partial[self._asked[index][sample]] = completion

    def leave_out(self, index: int) -> bool:
        """Does not ask for this request of the part again; whether there is anything left to ask for."""
        self._left_out.add(self._asked[index][0][0])
        return len(self._left_out) < len(self._requests)

    def result(self, policy_version: int) -> list[list[Completion]]:
        """By request and seed; what did not come to its end is aborted."""
        routes = next((c.routing[:0] for c in self._finished.values() if c.routing is not None), None)
        none = torch.zeros(0, dtype=torch.int64)
        nothing = Completion(none, torch.zeros(0), StopReason.ABORTED, policy_version, routes)

        def completion(place: Place) -> Completion:
            partial = self._partial.get(place, nothing)
            if routes is not None and partial.routing is None:  # cannot be replayed
                partial = nothing
            return self._finished.get(place, partial)

        groups = [
            [completion((index, sample)) for sample in range(request.num_samples)]
            for index, request in enumerate(self._requests)
        ]
        for index, group in enumerate(groups):
            for sample, found in enumerate(group):
                self._tell((index, sample), found)
        return groups

    def _tell(self, place: Place, completion: Completion) -> None:
        if place not in self._told:
            self._told.add(place)
            if self._on_finished is not None:
                self._on_finished(*place, completion)
