"""The key tree, guesses for wrong keys, and the generated page."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.config.document import document
from gspo.config.keys import FOREIGN_NAMES, guess_key, guess_section, recipe_keys, recipe_sections


def test_tree_holds_nested_sections_and_arrays_of_tables() -> None:
    keys = recipe_keys()
    assert {"run.seed", "data.path", "data.eval.path", "reward.functions.weight", "sft.num_steps"} <= keys.keys()
    assert "data.eval" not in keys
    assert "data.eval" in recipe_sections()
    assert keys["reward.functions.weight"].section == "reward.functions"
    assert keys["reward.functions.name"].required
    assert not keys["train.num_steps"].required


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.num_steps", "a whole number greater than 0"),
        ("train.micro_batch_size", "a whole number greater than 0"),
        ("objective.clip_target", "a number from 0 to 1"),
        ("eval.confidence", "a number greater than 0 and less than 1"),
        ("eval.k", "a list of whole numbers greater than 0"),
        ("train.betas", "a list of 2 numbers from 0 to 1"),
        ("rollout.stop_strings", "a list of texts"),
        ("model.tiny", 'one of "qwen3", "qwen3_moe"'),
        ("model.path", "text"),
        ("model.gradient_checkpointing", "true or false"),
        ("data.task_options", "a table, e.g. { name = 1 }"),
    ],
)
def test_what_a_key_expects_in_words(key: str, words: str) -> None:
    assert recipe_keys()[key].expects == words


def test_every_key_is_described() -> None:
    assert [key.name for key in recipe_keys().values() if not key.field.description] == []


def test_foreign_names_lead_to_keys_and_are_not_keys() -> None:
    assert set(FOREIGN_NAMES.values()) <= {*recipe_keys(), *recipe_sections()}
    leaves = {name.rpartition(".")[2] for name in recipe_keys()}
    assert leaves.isdisjoint(FOREIGN_NAMES)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("objective.epsilom_high", "objective.clip_high"),
        ("objective.cliplow", "objective.clip_low"),
        ("objective.beta", "objective.kl_coefficient"),
        ("train.beta", "objective.kl_coefficient"),
        ("train.steps_per_generation", "train.num_mini_batches"),
        ("objective.importance_sampling_level", "objective.name"),
        ("rollout.max-completion-length", "rollout.max_new_tokens"),
        ("advantage.scale_rewards", "advantage.scale"),
        ("sft.learning_rat", "sft.learning_rate"),
        ("train.learning_rat", "train.learning_rate"),
        ("reward.functions.wieght", "reward.functions.weight"),
        ("group_size", "rollout.group_size"),
        ("train.qqqq", None),
    ],
)
def test_guesses(name: str, target: str | None) -> None:
    assert guess_key(name).target == target


def test_a_key_of_two_sections_names_both() -> None:
    assert guess_key("rollout.weight_decay").text == "unknown key here; it belongs to section [train] or [sft]"


def test_guessed_sections() -> None:
    assert guess_section("objectives", []).target == "objective"
    assert guess_section("grpo_config", ["num_generations"]).text.endswith("did you mean rollout.group_size?")
    assert "the sections are run, model" in guess_section("zzz", []).text


@given(st.text(max_size=30))
def test_a_guess_is_always_a_key_or_a_section_or_none(name: str) -> None:
    guess = guess_key(name)
    assert guess.target is None or guess.target in {*recipe_keys(), *recipe_sections()}
    assert guess.text.startswith("unknown key")


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == document(), "run: python -m gspo.config.document > docs/configuration.md"


def test_the_page_has_every_key() -> None:
    text = document()
    for key in recipe_keys().values():
        row = f"| `{key.name.rpartition('.')[2]}` | "
        title = f"## `[[{key.section}]]`" if key.section == "reward.functions" else f"## `[{key.section}]`"
        section = text[text.index(title) :].split("\n## ")[0]
        assert row in section, key.name
