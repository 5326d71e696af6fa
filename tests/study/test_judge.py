"""From made-up results to a verdict."""

from __future__ import annotations

import pytest

from gspo.study.judge import excluded_seeds, judge
from tests.study.builders import TREE, results, run, study

SEEDS = range(6)


def two_arms(a, b, control=0.0):
    """Runs whose arms differ by a(seed) - b(seed), the same at both sizes."""
    runs = [run(arm, seed, of(seed), size) for seed in SEEDS for size in ("1", "4") for arm, of in (("a", a), ("b", b))]
    return results([*runs, *(run("plain", seed, control) for seed in SEEDS)])


def contrast(**changes):
    return {**TREE["contrasts"][0], **changes}


def test_a_claim_that_every_seed_bears_out_is_supported():
    found = judge(study(), two_arms(lambda s: 2.0 + s, lambda s: 1.0 + s))
    assert found.word == "supported"
    (judged,) = found.contrasts
    assert judged.p_value == judged.adjusted == 1 / 64
    assert judged.interval.value == 1.0
    assert judged.num_holding == 6


def test_the_contrary_is_not_supported():
    found = judge(study(), two_arms(lambda s: 1.0, lambda s: 2.0))
    assert (found.word, found.contrasts[0].outcome) == ("not supported", "refuted")


def test_seeds_that_disagree_leave_it_open():
    found = judge(study(), two_arms(lambda s: (-1.0) ** s, lambda s: 0.0))
    assert (found.word, found.contrasts[0].outcome) == ("not reproduced at this scale", "undecided")
    assert found.contrasts[0].num_holding == 3


def test_a_control_that_fails_voids_even_a_clear_result():
    found = judge(study(), two_arms(lambda s: 2.0, lambda s: 1.0, control=0.7))
    assert found.word == "void"
    assert "low" in found.reason


def test_a_control_without_runs_has_failed():
    runs = two_arms(lambda s: 2.0, lambda s: 1.0)
    found = judge(study(), results([r for r in runs.runs if r.cell.arm != "plain"]))
    assert found.word == "void"


def test_a_quick_version_has_no_verdict():
    assert judge(study(), two_arms(lambda s: 2.0, lambda s: 1.0).model_copy(update={"quick": True})).word.startswith(
        "smoke"
    )


def test_levels_are_averaged_within_a_seed_and_paired():
    runs = [run("a", s, {"1": 1.0, "4": 3.0}[size], size) for s in SEEDS for size in ("1", "4")]
    runs += [run("b", s, 0.0, "1") for s in SEEDS] + [run("b", s, 1.0, "4") for s in SEEDS]
    (judged,) = judge(study(), results(runs)).contrasts
    assert judged.differences == (1.5,) * 6  # ((1 - 0) + (3 - 1)) / 2


def test_where_restricts_to_a_level():
    runs = [run("a", s, {"1": 1.0, "4": 3.0}[size], size) for s in SEEDS for size in ("1", "4")]
    runs += [run("b", s, 0.0, size) for s in SEEDS for size in ("1", "4")]
    (judged,) = judge(study(contrasts=[contrast(where={"size": "4"})]), results(runs)).contrasts
    assert judged.differences == (3.0,) * 6


def test_an_arm_without_levels_stands_beside_all_levels():
    runs = [run("a", s, {"1": 1.0, "4": 3.0}[size], size) for s in SEEDS for size in ("1", "4")]
    runs += [run("plain", s, 0.5) for s in SEEDS]
    (judged,) = judge(study(contrasts=[contrast(against="plain")]), results(runs)).contrasts
    assert judged.differences == (1.5,) * 6


def test_several_contrasts_are_adjusted_together():
    four = [contrast(name=f"c{i}") for i in range(4)]
    found = judge(study(contrasts=four, verdict={"needs": ["c0"]}), two_arms(lambda s: 2.0, lambda s: 1.0))
    assert found.contrasts[0].adjusted == 4 / 64  # above 0.05: six seeds cannot carry four one-sided contrasts
    assert found.word == "not reproduced at this scale"


def test_a_contrast_without_another_arm_tests_the_measure_itself():
    own = contrast(against=None, null=1.5)
    found = judge(study(contrasts=[own]), two_arms(lambda s: 2.0, lambda s: 0.0))
    assert found.contrasts[0].outcome == "holds"


def test_a_seed_is_excluded_by_its_measure_and_named():
    runs = two_arms(lambda s: 2.0 + s, lambda s: 1.0 + s)
    limited = study(exclusions=[{"measure": "score", "high": 6.5}])
    assert list(excluded_seeds(limited, runs)) == [5]
    found = judge(limited, runs)
    assert found.contrasts[0].adjusted == 1 / 32
    assert "outside" in found.excluded[5]


def test_runs_without_a_value_drop_their_seed_only():
    runs = two_arms(lambda s: None if s == 2 else 2.0, lambda s: 1.0)
    assert len(judge(study(), runs).contrasts[0].differences) == 5


def test_a_contrast_without_any_value_is_no_support():
    found = judge(study(), two_arms(lambda s: None, lambda s: 1.0))
    assert (found.contrasts[0].outcome, found.word) == ("no data", "not reproduced at this scale")


def test_a_slope_is_a_measure_of_its_arm():
    runs = [run("a", s, 3.0 * float(size) ** 0.5, size) for s in SEEDS for size in ("1", "4")]
    own = contrast(measure="growth", against=None, alternative="equivalent", null=0.5, margin=0.1)
    (judged,) = judge(study(contrasts=[own]), results(runs)).contrasts
    assert judged.interval.value == pytest.approx(0.5)
    assert judged.outcome == "holds"


def test_failed_runs_are_counted():
    runs = two_arms(lambda s: 2.0, lambda s: 1.0)
    failed = run("a", 0, None, "1", status="failed")
    found = judge(study(), runs.model_copy(update={"runs": (*runs.runs[1:], failed)}))
    assert found.num_failed == 1
