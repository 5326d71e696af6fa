"""Generated tasks by name: ``arithmetic:addition``, ``reasoning_gym:NAME``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from gspo.data import arithmetic
from gspo.envs import reasoning_gym
from gspo.errors import DataError

Split = Literal["train", "eval"]
DEFAULT_NUM_PROMPTS = 1000
_FAMILIES: Mapping[str, tuple[Callable[..., list[dict[str, Any]]], str]] = {
    "arithmetic": (arithmetic.generate, arithmetic.SCORER),
    "reasoning_gym": (reasoning_gym.generate, reasoning_gym.SCORER),
}


@dataclass(frozen=True)
class Task:
    """Generated problems and how answers to them are scored.

    ``rows`` have ``id``, ``task``, ``prompt``, ``answer`` and ``task_args``; with a worked solution also ``response``.
    ``scorer`` names a function of (text, *task_args) that runs in the verifier processes.
    """

    name: str
    rows: tuple[Mapping[str, Any], ...]
    scorer: str

    def score(self, text: str, row: Mapping[str, Any]) -> float:
        """Scores one response in this process."""
        scorers: dict[str, Callable[..., float]] = {
            arithmetic.SCORER: arithmetic.score_answer,
            reasoning_gym.SCORER: reasoning_gym.score,
        }
        return scorers[self.scorer](text, *row["task_args"])


def make_task(
    name: str,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    split: Split = "train",
    num: int | None = None,
) -> Task:
    """The task of that name with ``num`` (default 1000) problems; "train" and "eval" share none.

    Raises:
        DataError: an unknown name or option.
        InputError: an extra is not installed.
    """
    family, colon, problem = name.partition(":")
    if family not in _FAMILIES or not colon or not problem:
        close = get_close_matches(family, _FAMILIES, n=1)
        hint = f"; did you mean {f'{close[0]}:{problem}'!r}?" if close else ""
        raise DataError(f'there is no task {name!r}; tasks are "arithmetic:addition" and "reasoning_gym:NAME"{hint}')
    generate, scorer = _FAMILIES[family]
    rows = generate(problem, options, seed=seed, split=split, num=num or DEFAULT_NUM_PROMPTS)
    return Task(name, tuple(rows), scorer)
