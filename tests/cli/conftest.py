from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A recipe that is right."""
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\ntiny = "qwen3"\n[data]\ntask = "arithmetic:addition"\n', encoding="utf-8")
    return path
