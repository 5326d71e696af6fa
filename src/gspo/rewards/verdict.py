"""What a verifier says, in the process that judges and in the process that asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Judgement:
    """The answer of a pure verifier.

    ``correct is None``: the gold answer itself cannot be read, so nothing was judged.

    >>> Judgement(True, "exact", "7 = 7").correct
    True
    """

    correct: bool | None
    rung: str  # which rule decided
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """The answer of a verifier that ran in a worker process.

    ``value is None`` with a ``failure``: no verdict was reached, and why.
    """

    value: bool | float | None
    seconds: float  # wall clock, the start of a worker left out
    failure: str | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    reason: str = ""  # how the verifier explains the value
    rung: str = ""  # which rule decided, where the verifier says so

    @property
    def ran_into_limit(self) -> bool:
        return self.timed_out or self.out_of_memory
