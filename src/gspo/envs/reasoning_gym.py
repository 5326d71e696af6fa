"""Adapter to reasoning-gym: ``task = "reasoning_gym:NAME"``.

The library seeds problem i with ``seed + i``, so neighbouring seeds share nearly all problems. Here the base seed is
derived by hashing, and training and held-out problems are disjoint by construction: a hash of the question decides
which of the two a problem belongs to. No question occurs twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from gspo.errors import DataError, InputError
from gspo.rewards.extraction import visible_text
from gspo.seeding import derive_seed

Split = Literal["train", "eval"]
SCORER = "gspo.envs.reasoning_gym:score"
EVAL_SHARE = 5  # one question of so many is held out
SEARCH_FACTOR = 40  # problems generated at most, per problem wanted
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


def generate(
    name: str, options: Mapping[str, Any] | None = None, *, seed: int = 0, split: Split = "train", num: int = 1000
) -> list[dict[str, Any]]:
    """Rows with ``id``, ``task``, ``prompt`` (the question), ``answer`` and ``task_args``.

    There are fewer than ``num`` rows only where the task has fewer different questions.

    Raises:
        DataError: an unknown name or option, or options that the task refuses.
        InputError: the extra ``tasks`` is not installed.
    """
    options = dict(options or {})
    base = derive_seed(seed, "reasoning_gym", name, split) % 2**31
    size = SEARCH_FACTOR * max(num, 25)
    dataset = _dataset(name, options, base, size)
    rows: dict[str, dict[str, Any]] = {}
    for index in range(size):
        if len(rows) == num:
            break
        entry = dataset[index]
        question = str(entry["question"])
        if split_of(question) == split and question not in rows:
            rows[question] = {
                "id": f"reasoning_gym:{name}/{split}/{seed}/{index}",
                "task": f"reasoning_gym:{name}",
                "prompt": question,
                "answer": entry["answer"],
                "task_args": [name, options, base, size, index],
            }
    if not rows:
        raise DataError(f"reasoning_gym:{name} has too few different questions to hold any out for {split!r}")
    return list(rows.values())


def split_of(question: str) -> Split:
    """Where a question belongs."""
    digest = hashlib.blake2b(" ".join(question.split()).encode(), digest_size=8).digest()
    return "eval" if digest[0] % EVAL_SHARE == 0 else "train"


def extract_answer(text: str) -> str:
    """The answer of a response: after a closed think block, the last ``<answer>`` pair, else all the text, stripped."""
    visible = visible_text(text)
    if visible is None:
        return ""
    tagged = _ANSWER.findall(visible)
    return str(tagged[-1] if tagged else visible).strip()


def score(text: str, name: str, options: Mapping[str, Any], base: int, size: int, index: int) -> float:
    """The task's own score of a response, 0 to 1. The problem is made again from its seed."""
    dataset, entry = _problem(name, json.dumps(options, sort_keys=True), base, size, index)
    return float(dataset.score_answer(extract_answer(text), entry))


@lru_cache(maxsize=4096)
def _problem(name: str, options: str, base: int, size: int, index: int) -> tuple[Any, dict[str, Any]]:
    dataset = _cached_dataset(name, options, base, size)
    return dataset, dataset[index]


@lru_cache(maxsize=16)
def _cached_dataset(name: str, options: str, base: int, size: int) -> Any:
    return _dataset(name, json.loads(options), base, size)


def _dataset(name: str, options: Mapping[str, Any], base: int, size: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise InputError(f"the task reasoning_gym:{name} needs an extra: pip install 'gspo[tasks]'") from error
    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise DataError(f"reasoning_gym has no task {name!r}; the nearest are {', '.join(close)}")
    fields = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for option in options:
        if option not in fields:
            close = get_close_matches(option, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise DataError(f"reasoning_gym:{name} has no option {option!r} (it has {', '.join(sorted(fields))}){hint}")
    try:
        return create_dataset(name, **options, seed=base, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym:{name} refuses the options {dict(options)}: {error}") from error


def preload() -> None:
    """Imports the library, so that the time limit of the first verdict does not pay for it."""
    import reasoning_gym.factory  # noqa: F401
