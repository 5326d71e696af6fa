"""Any recipe is either refused by ``gspo check`` with a message, or it runs.

A few examples, always the same, in the suite; ``GSPO_RECIPES=3000`` draws so many, others each time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings

from gspo import launch
from gspo.config import load_recipe
from gspo.config.keys import recipe_keys
from gspo.errors import ConfigError, NumericalError
from gspo.events import read_events

from .drawing import BASE, BUNDLES, KEYS, Tree, recipe_toml, recipes, values, write_files

NUM = int(os.environ.get("GSPO_RECIPES", "0"))


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of its own as the working directory, with the files that recipes name."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="gspo-recipe-") as name:
        write_files(Path(name))
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def refused_or_runs(tree: Tree) -> str:
    """What became of it, in a word; a failure is anything that is neither."""
    with folder() as place:
        path = place / "recipe.toml"
        path.write_text(recipe_toml(tree), encoding="utf-8")
        try:
            recipe = load_recipe(path, command="train", inspect=True)
        except ConfigError as error:
            return "refused" if str(error).strip() else "refused without a word"
        try:
            launch.train(recipe, run_dir=place / "run", command=["gspo", "train"])
        except NumericalError:  # a learning rate of one half has consequences
            return "diverged"
        steps = [event["step"] for event in read_events(place / "run" / "events.jsonl") if event["type"] == "step"]
        assert steps == list(range(1, recipe.train.num_steps + 1))
        return "runs"


@settings(
    max_examples=NUM or 25,
    derandomize=NUM == 0,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(recipes())
def test_any_recipe_is_refused_or_runs(tree: Tree) -> None:
    found = refused_or_runs(tree)
    assert found in ("runs", "refused", "diverged")
    event(found)


@pytest.mark.parametrize("index", range(0, len(BUNDLES), 1 if NUM else 4))
def test_what_belongs_together_runs(index: int) -> None:
    tree = {name: value for name, value in {**BASE, **BUNDLES[index]}.items() if value is not None}
    assert refused_or_runs(tree) == "runs"


def test_every_key_can_be_drawn() -> None:
    drawn = {key.name for key in KEYS} | {"reward.functions"}
    assert {name if not name.startswith("reward.functions") else "reward.functions" for name in recipe_keys()} == drawn
    for key in KEYS:
        assert values(key) is not None
