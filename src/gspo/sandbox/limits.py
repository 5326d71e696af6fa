"""What a box may use, and how a run in it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from gspo.errors import InputError

STDERR_TAIL_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """The limits of one run.

    Processor time decides; the wall clock is only the outer bound, so that a busy machine fails nobody.

    >>> Limits(cpu_s=2.0).wall_limit_s
    6.0

    Raises:
        InputError: a limit that is not positive.
    """

    cpu_s: float = 4.0  # of all processes together
    wall_s: float | None = None  # default 2 * cpu_s + 2
    memory_mb: int = 1024  # address space of each process, resident memory of all together
    max_processes: int = 64  # processes and threads
    output_kb: int = 4096  # of standard output, and of standard error
    scratch_mb: int = 32  # of /tmp, where there is one

    def __post_init__(self) -> None:
        for name in ("cpu_s", "wall_s", "memory_mb", "max_processes", "output_kb", "scratch_mb"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"the limit {name} is {value}; it must be a positive number")

    @property
    def wall_limit_s(self) -> float:
        return 2 * self.cpu_s + 2 if self.wall_s is None else self.wall_s


class Ending(StrEnum):
    """How a run ended."""

    EXIT = "exit"  # by itself, with an exit status or by a signal
    TIME = "time"  # ran into the limit of processor time or of the wall clock
    MEMORY = "memory"
    OUTPUT = "output"
    FAILURE = "failure"  # ours: the box could not be built, or vanished. Says nothing about the program


@dataclass(frozen=True)
class BoxResult:
    """What came out of one run."""

    ending: Ending
    exit_status: int | None = None  # 128 + signal where a signal ended it; None unless ending is EXIT
    stdout: bytes = b""
    stderr: bytes = b""  # the last ``STDERR_TAIL_BYTES``
    wall_s: float = 0.0
    cpu_s: float = 0.0  # as last seen, about 25 ms coarse
    detail: str = ""  # which limit, or what failed

    @property
    def failed(self) -> bool:
        return self.ending is Ending.FAILURE
