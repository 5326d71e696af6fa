"""Loading: defaults, overrides and their types, [data.eval], and what is written back."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo.config import Recipe, check_recipe, load_recipe, recipe_text
from gspo.config.source import Source, read_source, toml_value
from gspo.errors import ConfigError


def test_defaults_are_the_paper(recipe: Callable[..., Recipe]) -> None:
    plain = recipe()
    assert (plain.objective.name, plain.objective.clip, plain.train.num_mini_batches) == ("gspo", "paper", 4)
    assert plain.objective.kl_coefficient == 0
    assert plain.data.model_fields_set == {"task"}


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.num_steps=7", lambda r: r.train.num_steps, 7),
        ("train.num_steps=1_000", lambda r: r.train.num_steps, 1000),
        ("train.learning_rate=3e-4", lambda r: r.train.learning_rate, 3e-4),
        ("train.learning_rate=.5", lambda r: r.train.learning_rate, 0.5),
        ("train.learning_rate=1", lambda r: r.train.learning_rate, 1.0),
        ("model.gradient_checkpointing=true", lambda r: r.model.gradient_checkpointing, True),
        ("model.gradient_checkpointing=True", lambda r: r.model.gradient_checkpointing, True),
        ("eval.k=[1, 4]", lambda r: r.eval.k, (1, 4)),
        ("train.betas=[0.5, 0.9]", lambda r: r.train.betas, (0.5, 0.9)),
        ('rollout.stop_strings=["\\n", "a=b"]', lambda r: r.rollout.stop_strings, ("\n", "a=b")),
        ("run.name=5", lambda r: r.run.name, "5"),
        ("run.name=none", lambda r: r.run.name, None),
        ("data.instruction=say: a = 1", lambda r: r.data.instruction, "say: a = 1"),
        ("data.task_options={max_digits = 2}", lambda r: r.data.task_options, {"max_digits": 2}),
        ("data.task_options.max_digits=2", lambda r: r.data.task_options, {"max_digits": 2}),
        ("data.task_options.kind=hard", lambda r: r.data.task_options, {"kind": "hard"}),
        ("model.tiny_config.hidden_size=64", lambda r: r.model.tiny_config, {"hidden_size": 64}),
        ("advantage.scale=none", lambda r: r.advantage.scale, "none"),
        ("data.num_prompts=none", lambda r: r.data.num_prompts, None),
        ("train.num-steps=7", lambda r: r.train.num_steps, 7),
        ("data.eval.num_prompts=9", lambda r: r.data.eval.num_prompts, 9),
        ('reward.functions=[{name = "task"}]', lambda r: r.reward.functions[0].name, "task"),
        ("rollout.temperature=0.7", lambda r: r.rollout.temperature, 0.7),
    ],
)
def test_overrides_are_read_by_the_type_of_their_key(
    recipe: Callable[..., Recipe], override: str, read: Callable[[Recipe], object], value: object
) -> None:
    if override == "run.name=none":  # text without None: the key goes back to its default
        value = "run"
    found = read(recipe(override))
    assert found == value
    assert type(found) is type(value)


def test_an_override_wins_over_the_file_and_the_last_one_over_the_first(write: Callable[..., Path]) -> None:
    path = write("[train]\nnum_steps = 3\n")
    assert load_recipe(path, ["--train.num_steps", "4", "--train.num_steps=5"]).train.num_steps == 5


def test_none_makes_room_for_the_other_source(write: Callable[..., Path]) -> None:
    loaded = load_recipe(write(""), ["--model.tiny", "none", "--model.path", "Qwen/Qwen3-0.6B"])
    assert (loaded.model.path, loaded.model.tiny) == ("Qwen/Qwen3-0.6B", None)


def test_words_that_are_no_override(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"'steps' is not an override; write --section\.key value"):
        load_recipe(write(""), ["steps"])


def test_an_injected_line_is_text_and_refused(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        recipe("train.num_steps=3\nlearning_rate = 1")


def test_data_eval_takes_over_what_it_does_not_say(write: Callable[..., Path]) -> None:
    text = 'instruction = "Number only."\ntask_options = { max_digits = 2 }\nseed = 4\nnum_prompts = 99\n'
    same = load_recipe(write(text + "[data.eval]\nnum_prompts = 7\n")).data.eval
    assert same is not None
    assert (same.task, same.task_options, same.instruction) == (
        "arithmetic:addition",
        {"max_digits": 2},
        "Number only.",
    )
    assert (same.num_prompts, same.seed) == (7, None)
    other = load_recipe(write(text + '[data.eval]\ntask = "reasoning_gym:chain_sum"\n')).data.eval
    assert other is not None
    assert (other.task, other.task_options, other.instruction) == ("reasoning_gym:chain_sum", {}, "Number only.")
    assert load_recipe(write(text)).data.eval is None


def test_sft_needs_no_data(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text('[model]\ntiny = "qwen3"\n[sft]\ntask = "arithmetic:addition"\n')
    assert load_recipe(path, command="sft").sft is not None
    checked = load_recipe(path, command="check")
    assert [finding.key for finding in check_recipe(checked, "check")] == ["data.path"]
    assert load_recipe(path, ["--data.system_prompt", "s"], command="sft").data.system_prompt == "s"
    with pytest.raises(ConfigError, match=r"neither data\.path nor data\.task"):
        load_recipe(path, command="train")
    with pytest.raises(ConfigError, match=r"neither data\.path nor data\.task"):
        load_recipe(path, ["--sft.stop_at_pass", "0.4"], command="sft")


def test_sft_needs_its_section(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"has no \[sft\] section"):
        load_recipe(write(""), command="sft")


def test_resolved_text_loads_to_an_equal_recipe(write: Callable[..., Path], tmp_path: Path) -> None:
    text = (
        'instruction = "a \\"b\\"\\n"\ntask_options = { a = [1, 2.5], "b c" = true }\n[data.eval]\nnum_prompts = 3\n'
        '[train]\nnum_steps = 3\nlearning_rate = 3e-4\n[eval]\nk = [1, 2]\n[sft]\ntask = "arithmetic:addition"\n'
        '[[reward.functions]]\nname = "task"\nweight = 2\n[[reward.functions]]\nname = "m:f"\noptions = { x = "y" }\n'
    )
    first = load_recipe(write(text))
    copy = tmp_path / "copy.toml"
    copy.write_text(recipe_text(first))
    second = load_recipe(copy)
    assert second == first
    assert second.train.model_fields_set == first.train.model_fields_set


values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_every_value_survives_being_written_as_toml(value: object) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


def test_lines_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(
        'top = 1\n[a]\nx = """\nno = 1\n"""\ny.z = 2\n'
        '[[b.list]]\nx = 1\n[[b.list]]\n"x" = 2 # c\n[ c . d ] # e\nq = 1\n'
    )
    source: Source = read_source(path)
    lines = {"top": 1, "a": 2, "a.x": 3, "a.y.z": 6, "b.list[0].x": 8, "b.list[1].x": 10, "c.d": 11, "c.d.q": 12}
    for key, line in lines.items():
        assert source.place(key) == f"{path}:{line}", key
    assert source.place("a.no") == f"{path}:2"
    assert source.place("b.list[1].missing") == f"{path}:9"
    assert source.place("nowhere.at.all") == str(path)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\ntiny = "qwen3"\n[data]\ntask = "arithmetic:addition"\n')
    assert load_recipe(path).model.tiny == "qwen3"
