"""Studies of the package, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.config.load import load_recipe
from gspo.errors import ConfigError
from gspo.study.load import (
    cells,
    exploration_cells,
    load_study,
    overrides_of,
    recipe_file_text,
    recipe_tree,
    study_names,
)
from tests.study.builders import TREE, study


def toml(value: Any) -> str:
    from gspo.config.source import toml_value

    return toml_value(value)


@pytest.fixture
def write(tmp_path: Path):
    def write(file_name: str = "made-up", **changes: Any) -> str:
        tree = {**TREE, **changes}
        path = tmp_path / f"{file_name}.toml"
        path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in tree.items() if value is not None))
        return str(path)

    return write


@pytest.mark.parametrize("name", study_names())
def test_every_study_of_the_package_loads_and_each_of_its_recipes_is_good(name, tmp_path):
    loaded = load_study(name)
    kinds = {}
    for quick in (False, True) if loaded.study.quick else (False,):
        for cell in cells(loaded.study, quick=quick):
            kinds.setdefault((cell.arm, *cell.levels.values(), quick), (cell, quick))
    seen = set()
    for cell, quick in kinds.values():
        tree = recipe_tree(loaded.study, overrides_of(loaded.study, cell, quick=quick)[0])
        text = recipe_file_text(tree)
        if text not in seen:
            seen.add(text)
            (tmp_path / "recipe.toml").write_text(text)
            load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize("name", study_names())
def test_every_study_says_what_the_paper_showed_and_where(name):
    study = load_study(name).study
    assert any(mark in study.paper.source for mark in ("arXiv", "nobody"))
    assert len(study.regime) > 200
    assert study.quick is None or set(study.quick.seeds) <= set(range(100))
    explored = set(study.exploration.seeds) if study.exploration else set()
    assert not explored & set(study.seeds), "a seed that was explored is not confirmatory"


def test_the_digest_is_of_the_bytes(write):
    one = load_study(write())
    assert one.digest == load_study(write()).digest
    assert one.digest != load_study(write(alpha=0.01)).digest


def test_a_name_that_is_nearly_right_is_guessed():
    with pytest.raises(ConfigError, match="did you mean 'stability'"):
        load_study("stabilty")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": []}, "seeds"),
        ({"colour": 1}, "colour"),
        ({"verdict": {"needs": ["b-a"]}}, "there is no contrast 'b-a'; there is a-b"),
        ({"controls": [{**TREE["controls"][0], "arm": "c"}]}, "there is no arm 'c'"),
        ({"controls": [{**TREE["controls"][0], "measure": "m"}]}, "there is no measure 'm'"),
        ({"contrasts": [{**TREE["contrasts"][0], "against": "c"}]}, "there is no arm 'c'"),
        ({"contrasts": [{**TREE["contrasts"][0], "margin": 0.1}]}, "a margin belongs to"),
        ({"contrasts": [{**TREE["contrasts"][0], "alternative": "equivalent"}]}, "a margin belongs to"),
        ({"contrasts": [{**TREE["contrasts"][0], "where": {"size": "9"}}]}, "there is no level '9'"),
        ({"arms": [TREE["arms"][0], TREE["arms"][0]]}, "arm 'a' occurs twice"),
        ({"arms": [{**TREE["arms"][0], "axes": ["depth"]}]}, "there is no axis 'depth'"),
        ({"measures": [{**TREE["measures"][0], "function": "f"}]}, "there is no function 'f'"),
        ({"figures": [{**TREE["figures"][0], "y": "path"}]}, "there is no strip 'path'"),
        ({"figures": [{**TREE["figures"][0], "x": "size"}]}, 'x belongs to kind = "points"'),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_reason(write, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_study(write(**changes))


def test_a_file_of_another_name_is_refused(write):
    with pytest.raises(ConfigError, match="calls itself 'made-up'"):
        load_study(write("other"))


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("seeds = [0,\n")
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read as a study"):
        load_study(str(path))


def test_cells_are_crossed_seed_by_seed():
    found = cells(study())
    assert len(found) == 6 * (2 + 2 + 1)
    assert [cell.place for cell in found[:5]] == [
        "a+size=1+seed=0",
        "a+size=4+seed=0",
        "b+size=1+seed=0",
        "b+size=4+seed=0",
        "plain+seed=0",
    ]
    assert {cell.seed for cell in found[:5]} == {0}


def test_the_quick_version_keeps_its_seeds_and_levels():
    assert [cell.place for cell in cells(study(), quick=True)] == ["a+size=1+seed=0", "b+size=1+seed=0", "plain+seed=0"]
    with pytest.raises(ConfigError, match="no \\[quick\\] version"):
        cells(study(quick=None), quick=True)


def test_explored_cells_are_their_own():
    explored = {"text": "t", "seeds": [100], "arms": [{"name": "try", "label": "t"}]}
    assert [cell.place for cell in exploration_cells(study(exploration=explored))] == ["try+seed=100"]
    assert not exploration_cells(study(exploration=None))


def test_an_arm_overrules_its_levels_and_the_quick_version_overrules_both():
    tree = study(
        axes=[
            {"name": "size", "label": "s", "levels": [{"name": "1", "value": 1, "overrides": {"train.num_steps": 3}}]}
        ],
        arms=[{"name": "a", "label": "A", "axes": ["size"], "overrides": {"train.num_steps": 5, "options.x": 1}}],
        quick={"seeds": [0], "overrides": {"train.num_steps": 2}},
    )
    (cell,) = cells(tree, quick=True)
    assert overrides_of(tree, cell, quick=False) == ({"train.num_steps": 5}, {"x": 1})
    assert overrides_of(tree, cell, quick=True)[0] == {"train.num_steps": 2}


def test_none_takes_a_key_out_and_the_base_stays_as_it_was():
    base = study()
    tree = recipe_tree(base, {"data.num_prompts": "none", "train.num_steps": 3})
    assert tree["data"] == {"task": "arithmetic:addition"}
    assert tree["train"] == {"num_steps": 3}
    assert base.recipe["data"]["num_prompts"] == 40


def test_a_recipe_is_written_as_toml_that_loads(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_file_text(recipe_tree(study(), {"data.eval": {"num_prompts": 3}})))
    assert load_recipe(path).data.eval.num_prompts == 3
    assert json.dumps(TREE["recipe"]) == json.dumps(study().recipe)
