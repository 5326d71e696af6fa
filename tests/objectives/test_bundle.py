from __future__ import annotations

import subprocess
import sys

import pytest

from gspo.objectives.bundle import PAPER_BOUNDS, UNITS, bundle_findings


def severities(*args: object) -> list[str]:
    return [severity for severity, _ in bundle_findings(*args)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PAPER_BOUNDS)
def test_the_paper_bundle_is_clean(name: str) -> None:
    low, high = PAPER_BOUNDS[name] or (None, None)
    num_mini_batches = 1 if name == "pg" else 4
    for unit in (None, UNITS[name][0]):
        assert bundle_findings(name, low, high, unit, num_mini_batches, "auto") == []
        assert bundle_findings(name, None, None, unit, num_mini_batches, "auto") == []


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a_sequence_ratio_with_a_token_mean_is_an_error(name: str) -> None:
    [(severity, message)] = bundle_findings(name, 3e-4, 4e-4, "token", 4, "auto")
    assert severity == "error"
    assert "no longer GSPO" in message
    assert "grpo" in message  # the remedy


def test_bounds_that_never_bind_are_a_warning_with_the_remedy() -> None:
    findings = bundle_findings("gspo", 0.2, 0.2, None, 4, "auto")
    assert [severity for severity, _ in findings] == ["warning", "warning"]
    for (_, message), key in zip(findings, ("clip_low", "clip_high"), strict=True):
        assert message.startswith(f"{key} = 0.2 never binds at sequence level")
        assert "clip_low = 0.0003, clip_high = 0.0004" in message
    # bounds that short answers need are fine
    assert bundle_findings("gspo", 5e-3, 6.7e-3, None, 4, "auto") == []


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_sequence_bounds_on_a_token_ratio_are_a_warning(name: str) -> None:
    findings = bundle_findings(name, 3e-4, 4e-4, None, 4, "auto")
    assert [severity for severity, _ in findings] == ["warning", "warning"]
    assert "name = 'gspo'" in findings[0][1]


def test_bounds_of_an_objective_that_does_not_clip_are_an_error() -> None:
    findings = bundle_findings("pg", 0.2, None, None, 1, "auto")
    assert findings == [("error", "clip_low = 0.2 has no effect: pg does not clip; remove it")]


@pytest.mark.parametrize("old", ["auto", "engine", "recompute"])
@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "ppo"])
def test_one_update_per_batch_makes_the_ratio_one(name: str, old: str) -> None:
    [(severity, message)] = bundle_findings(name, None, None, None, 1, old)
    assert severity == "warning"
    assert "always 1" in message
    assert "num_mini_batches = 4" in message


def test_pg_off_policy_is_a_warning() -> None:
    [(severity, message)] = bundle_findings("pg", None, None, None, 4, "auto")
    assert severity == "warning"
    assert "mini-batches 2 to 4 are off-policy" in message


@pytest.mark.parametrize("value", [0.0, -0.1, float("nan"), float("inf")])
def test_what_is_no_bound_is_an_error(value: float) -> None:
    assert severities("gspo", value, 4e-4, None, 4, "auto") == ["error"]


def test_a_lower_bound_at_zero_has_no_effect() -> None:
    [(severity, message)] = bundle_findings("grpo", 1.0, 0.2, None, 4, "auto")
    assert severity == "error"
    assert "no effect" in message


def test_units_that_an_objective_does_not_have_are_errors() -> None:
    assert severities("ppo", None, None, "sequence", 4, "auto") == ["error"]
    assert severities("pg", None, None, "token", 1, "auto") == ["error"]
    assert severities("grpo", None, None, "token", 4, "auto") == []


def test_errors_come_first() -> None:
    assert severities("gspo", 0.2, 0.2, "token", 1, "auto") == ["error", "warning", "warning", "warning"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    [(severity, message)] = bundle_findings("gpso", None, None, None, 4, "auto")
    assert severity == "error"
    assert "gspo, gspo_token, grpo, ppo, dapo" in message


def test_the_bundle_is_checked_without_torch() -> None:
    code = "import gspo.objectives.bundle, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
