"""What can go wrong, by the boundary it came from.

::

    GspoError                   anything this package raises on purpose
    ├── InputError              the user's input is wrong: one sentence, exit status 2
    │   ├── ConfigError         a recipe, key or value
    │   ├── DataError           a file, column or row
    │   ├── ModelError          a model path, tokenizer or checkpoint
    │   ├── RewardError         a reward function that raises or returns nonsense
    │   └── RunDirectoryError   in use, or not a run directory
    └── RunError                the run itself went wrong: exit status 1
        ├── NumericalError      a non-finite value, named by row and tensor
        └── EngineError         the sampler failed, and how (EngineFailure)

A message names what was wrong, the value, where, and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class GspoError(Exception):
    """Anything this package raises on purpose."""

    exit_status = 1


class InputError(GspoError):
    """The user's input is wrong; found before anything is lost."""

    exit_status = 2


class ConfigError(InputError):
    """A recipe, key or value that cannot work."""


class DataError(InputError):
    """A data file, column or row that cannot be used."""


class ModelError(InputError):
    """A model path, tokenizer or checkpoint that cannot be used."""


class RewardError(InputError):
    """A reward function that raises, or returns something that is not one value per completion."""


class RunDirectoryError(InputError):
    """A run directory that is in use or is not one."""


class RunError(GspoError):
    """The run itself went wrong."""


class NumericalError(RunError):
    """A non-finite value; the message names the tensor and the row."""


class EngineFailure(StrEnum):
    """How an engine failed. Whether the same call may be made again follows from it."""

    OUT_OF_MEMORY = "out_of_memory"  # with fewer responses at a time it may work
    TIMEOUT = "timeout"  # it did not answer in time, and whoever waited has ended it
    CRASHED = "crashed"  # its process or connection is gone
    BAD_NUMBERS = "bad_numbers"  # logits that are not finite: the same weights give them again
    REJECTED = "rejected"  # it does not take this request, now or later
    OTHER = "other"  # not known, so nothing is assumed

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed a second time; the same seeds give the same tokens."""
        return self in (EngineFailure.OUT_OF_MEMORY, EngineFailure.TIMEOUT, EngineFailure.CRASHED)


class EngineError(RunError):
    """The sampling engine failed.

    Args:
        kind: how.
        partial: what there was of responses that were not finished, ``gspo.types.Completion`` with stop reason
            "aborted" by (index of the request, index of its sample).
        request: index of the request that was rejected, where it was one.
    """

    def __init__(
        self,
        message: str,
        kind: EngineFailure = EngineFailure.OTHER,
        *,
        partial: Mapping[tuple[int, int], Any] | None = None,
        request: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.partial = dict(partial or {})
        self.request = request
