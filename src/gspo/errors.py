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
        └── EngineError         the sampler failed

A message names what was wrong, the value, where, and the remedy.
"""

from __future__ import annotations


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


class EngineError(RunError):
    """The sampling engine failed."""
