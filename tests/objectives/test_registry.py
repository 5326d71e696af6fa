from __future__ import annotations

import pytest

import gspo.objectives
from gspo.errors import ConfigError
from gspo.objectives import (
    GRPO,
    GSPO,
    LUSPO,
    PPO,
    SAPO,
    DrGRPO,
    GSPOToken,
    Objective,
    PolicyGradient,
    make_objective,
)
from gspo.objectives.bundle import PAPER_BOUNDS


@pytest.mark.parametrize("name", PAPER_BOUNDS)
def test_each_name_makes_its_objective_with_the_paper_bounds(name: str) -> None:
    objective = make_objective(name, length_divisor=64)
    assert isinstance(objective, Objective)
    assert objective.name == name
    if PAPER_BOUNDS[name] is not None:
        assert (objective.clip_low, objective.clip_high) == PAPER_BOUNDS[name]  # type: ignore[attr-defined]


def test_bounds_and_unit_are_passed_on() -> None:
    assert make_objective("gspo", 1e-3, 2e-3) == GSPO(1e-3, 2e-3)
    assert make_objective("gspo_token", 1e-3, 2e-3, "sequence") == GSPOToken(1e-3, 2e-3)
    assert make_objective("grpo", 0.1, 0.3, "token") == GRPO(0.1, 0.3, "token")
    assert make_objective("ppo", clip_high=0.3) == PPO(0.2, 0.3)
    assert make_objective("pg") == PolicyGradient()
    # suspicious, so the check of a recipe warns; but it computes
    assert make_objective("gspo", 0.2, 0.2) == GSPO(0.2, 0.2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gpso",), "no objective 'gpso'"),
        (("gspo", None, None, "token"), "no longer GSPO"),
        (("pg", 0.2, 0.2), "pg does not clip"),
        (("sapo", 0.2, 0.2), "sapo does not clip"),
        (("dapo", None, None, "sequence"), "dapo has no unit 'sequence'"),
        (("dr_grpo",), "needs a length_divisor"),
    ],
)
def test_what_the_name_does_not_have_is_refused(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_objective(*args)  # type: ignore[arg-type]


def test_weights_by_token_make_gspo_its_token_form_and_are_refused_where_they_cannot_be() -> None:
    assert make_objective("gspo", 1e-3, 2e-3, weighs_tokens=True) == GSPOToken(1e-3, 2e-3)
    assert make_objective("luspo", weighs_tokens=True) == LUSPO()
    with pytest.raises(ConfigError, match="gmpo has one advantage per response"):
        make_objective("gmpo", weighs_tokens=True)


def test_options_of_sapo_and_dr_grpo_are_passed_on() -> None:
    assert make_objective("sapo", tau_positive=2.0, tau_negative=3.0) == SAPO(2.0, 3.0)
    assert make_objective("dr_grpo", 0.1, 0.3, length_divisor=7) == DrGRPO(7, 0.1, 0.3)


def test_every_exported_name_is_there() -> None:
    for name in gspo.objectives.__all__:
        assert getattr(gspo.objectives, name) is not None
    assert set(gspo.objectives.__all__) <= set(dir(gspo.objectives))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gspo.objectives.nothing
