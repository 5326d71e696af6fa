"""Rewards for recipes that tests make up: they know the gold answer, and have spread whatever a random model says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def close(completions: Sequence[Any], answer: Sequence[Any], floor: float = 0.0, **columns: Any) -> list[float]:
    """1 for the gold answer, at most a half for anything else."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [_score(text, str(gold), floor) for text, gold in zip(texts, answer, strict=True)]


def compute_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The same with verl's signature."""
    return _score(solution_str, str(ground_truth), 0.0)


def _score(text: str, gold: str, floor: float) -> float:
    """``floor``: the least that a wrong answer gets. A worked solution ends with a semicolon and the answer."""
    return 1.0 if text.strip().rpartition(";")[2] == gold else max(floor, sum(map(ord, text)) % 8 / 16)
