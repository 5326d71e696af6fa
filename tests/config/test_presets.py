from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.config import load_recipe, recipe_text
from gspo.config.check import check_recipe
from gspo.config.effects import value_of
from gspo.config.keys import recipe_keys
from gspo.config.presets import PRESETS
from gspo.errors import ConfigError

from .conftest import MINIMAL

MOE = MINIMAL.replace('"qwen3"', '"qwen3_moe"')


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_what_is_open_and_only_that(name: str, write: Callable[..., Path]) -> None:
    recipe = load_recipe(write(f'[run]\npreset = "{name}"\n', MOE))
    assert {key: value_of(recipe, key) for key in PRESETS[name]} == dict(PRESETS[name])
    own = load_recipe(write(f'[run]\npreset = "{name}"\n[train]\nold_logprobs = "engine"\nnum_mini_batches = 2\n', MOE))
    assert (own.train.old_logprobs, own.train.num_mini_batches) == ("engine", 2)


def test_the_keys_of_presets_exist() -> None:
    assert {key for preset in PRESETS.values() for key in preset} <= set(recipe_keys())


def test_what_the_presets_are() -> None:
    paper, engine, modern = PRESETS["paper"], PRESETS["paper_5_4"], PRESETS["modern"]
    assert (paper["train.old_logprobs"], engine["train.old_logprobs"]) == ("recompute", "engine")
    assert {k for k in paper if paper[k] != engine[k]} == {"train.old_logprobs"}
    assert all(preset["objective.correction.kind"] == "none" for preset in PRESETS.values())
    assert modern["moe.replay"] == "r3"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("base", [MINIMAL, MOE], ids=["dense", "moe"])
def test_the_resolved_recipe_loads_again_as_the_same_tree(
    name: str, base: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = load_recipe(write(f'[run]\npreset = "{name}"\n', base))
    again = tmp_path / "again.toml"
    again.write_text(recipe_text(recipe), encoding="utf-8")
    assert load_recipe(again) == recipe


def test_an_unknown_preset_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r'run.preset = "papre".*"paper"'):
        load_recipe(write('[run]\npreset = "papre"\n'))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[moe]\nreplay = "r3"\n', ["moe.replay", "no experts"]),
        ('[moe]\nmetrics = "drift"\n', ["moe.metrics", "no effect"]),
        ("[objective]\ntau_positive = 2.0\n", ["objective.tau_positive", "sapo"]),
        ("[objective]\nlength_divisor = 9\n", ["objective.length_divisor", "dr_grpo"]),
        ('[objective]\nname = "sapo"\nclip = "paper"\n', ["objective.clip", "temperatures"]),
        ("[objective.correction]\nhigh = 3.0\n", ["objective.correction.high", "kind"]),
        ('[objective.correction]\nkind = "tis"\nlow = 0.5\n', ["objective.correction.low", "icepop"]),
        (
            '[objective.correction]\nkind = "icepop"\n[train]\nold_logprobs = "engine"\n',
            ["objective.correction.kind", "recompute"],
        ),
        ('[objective.correction]\nkind = "icepop"\nlow = 9.0\n', ["keeps nothing"]),
        ('[objective]\nname = "fspo"\nclip = "calibrated"\n', ["another band"]),
    ],
)
def test_keys_without_effect_are_errors(text: str, parts: list[str], write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(write(text))
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[moe]\nreplay = "r2"\n', "recompute"),
        ('[moe]\nreplay = "r3"\n[rollout]\nengine = "scripted"\nscript = "x.jsonl"\n', "a script has none"),
    ],
)
def test_replay_needs_somebody_who_records(text: str, part: str, write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=part):
        load_recipe(write(text, MOE))


@pytest.mark.parametrize("name", ["dr_grpo", "minirl"])
def test_objectives_without_a_standard_deviation_say_so(name: str, write: Callable[..., Path]) -> None:
    text = f'[objective]\nname = "{name}"\n'
    with_std, without = load_recipe(write(text)), load_recipe(write(text + '[advantage]\nscale = "none"\n'))
    assert any("advantage.scale" in finding.sentence for finding in check_recipe(with_std))
    assert not any("advantage.scale" in finding.sentence for finding in check_recipe(without))


def test_cispo_needs_only_its_upper_bound(write: Callable[..., Path]) -> None:
    text = '[objective]\nname = "cispo"\nclip = "explicit"\nclip_high = 1.5\n'
    assert load_recipe(write(text)).objective.clip_low is None
