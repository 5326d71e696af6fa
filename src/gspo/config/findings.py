"""What a check says about a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
#: What a recipe is read for. ``check`` asks for what the recipe's own sections can be used for.
Command = Literal["train", "sft", "eval", "check"]


@dataclass(frozen=True)
class Finding:
    """One sentence about one key.

    ``related`` are the other keys that it rests on: where one of them is wrong itself, the finding is not reported.
    """

    severity: Severity
    key: str
    message: str
    related: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        return f"{self.key}: {self.message}"
