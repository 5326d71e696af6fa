"""A reward that knows nothing: the negative control of the learning test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo.seeding import derive_seed


def coin(prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Heads or tails, whatever the answer says."""
    return [
        float(derive_seed(0, "coin", str(prompt), str(list(ids)), row) % 2)
        for row, (prompt, ids) in enumerate(zip(prompts, completion_ids, strict=True))
    ]
