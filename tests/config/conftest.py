from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.config import Recipe, load_recipe

#: The least that is a recipe: everything else has a default.
MINIMAL = '[model]\ntiny = "qwen3"\n[data]\ntask = "arithmetic:addition"\n'


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a recipe; sections of ``text`` come after the minimal ones."""

    def write(text: str = "", base: str = MINIMAL) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(base + text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def recipe(write: Callable[[str], Path]) -> Callable[..., Recipe]:
    """The minimal recipe with the given ``section.key=value`` overrides."""

    def recipe(*overrides: str) -> Recipe:
        return load_recipe(write(""), [f"--{override}" for override in overrides])

    return recipe
