"""The batch arithmetic: the cases of batch_cases.json, and what must hold for every size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.config import BatchPlan, load_recipe, plan_batch
from gspo.config.check import check_recipe
from gspo.errors import ConfigError

CASE = json.loads((Path(__file__).parents[1] / "cases" / "batch_cases.json").read_text())[0]
INPUTS: list[dict[str, Any]] = CASE["input"]["cases"]
ANSWERS: list[str] = CASE["expected"]["answers"]


def plan(number: int) -> Any:
    case = INPUTS[number]
    return plan_batch(
        case["P"],
        case["G"],
        world_size=case["W"],
        micro_batch_size=case["m"],
        num_prompts=case.get("dataset"),
    )


@pytest.mark.parametrize("number", [0, 1, 3])
def test_micro_batches_of_the_cases(number: int) -> None:
    count = int(re.match(r"(\d+) micro-batches", ANSWERS[number])[1])  # type: ignore[index]
    assert plan(number).num_micro_batches == count


def test_ranks_that_cannot_share_name_what_works() -> None:
    assert "W 1, 2, 4, 8; G 6, 9" in ANSWERS[2]
    with pytest.raises(ConfigError, match=r"what works: 1, 2, 4, 8 ranks, or rollout\.group_size = 6 or 9$"):
        plan(2)
    for ranks in (1, 2, 4, 8):
        assert plan_batch(1, 8, world_size=ranks).num_sequences == 8
    for group_size in (6, 9):
        assert plan_batch(1, group_size, world_size=3).num_sequences == group_size


def test_micro_batches_across_groups_say_that_advantages_do_not_change() -> None:
    assert "rows of both groups" in ANSWERS[3]
    assert any("rows of several groups" in note and "do not change" in note for note in plan(3).notes)
    assert plan_batch(2, 6, micro_batch_size=3).notes == ()  # 3 divides 6: no micro-batch crosses a group


def test_group_of_one_is_explained() -> None:
    assert "a group needs at least 2 completions" in ANSWERS[4]
    with pytest.raises(ConfigError, match="a group needs at least 2 completions") as caught:
        plan(4)
    assert "divisible" not in str(caught.value)


def test_leftover_prompts_are_told() -> None:
    assert "2 steps per epoch" in ANSWERS[5]
    found = plan(5)  # 5 prompts, 2 per step
    assert (found.steps_per_epoch, found.leftover_prompts) == (2, 1)
    assert any("2 steps per epoch" in note and "1 prompt is left over" in note for note in found.notes)


def test_micro_batch_larger_than_the_update_is_told() -> None:
    found = plan(6)
    assert found.num_micro_batches == 1
    assert any(note.startswith(ANSWERS[6].split(",")[0]) for note in found.notes)  # "1 micro-batch of 32"


def test_the_typo_names_what_other_frameworks_call_it(write: Callable[..., Path]) -> None:
    key, _, value = INPUTS[7]["typo"].partition("=")
    assert ANSWERS[7] == "error naming epsilon_high"
    with pytest.raises(ConfigError, match=r"objective\.clip_high \(epsilon_high in other frameworks\)"):
        load_recipe(write(""), [f"--objective.{key}", value])


def test_wide_sequence_bounds_run_after_a_warning(write: Callable[..., Path]) -> None:
    case = INPUTS[8]
    words = ["--objective.name", case["algorithm"], "--objective.clip", "explicit"]
    words += ["--objective.clip_low", str(case["eps_low"]), "--objective.clip_high", str(case["eps_high"])]
    findings = check_recipe(load_recipe(write(""), words))
    assert [finding.severity for finding in findings] == ["warning", "warning"]
    assert {finding.key for finding in findings} == {"objective.clip_low", "objective.clip_high"}
    assert all("never binds" in finding.message for finding in findings)


def test_a_key_in_the_wrong_section_is_sent_home(write: Callable[..., Path]) -> None:
    assert "adv_normalise" in INPUTS[9]
    with pytest.raises(ConfigError, match=r"unknown key here; it belongs to section \[advantage\]"):
        load_recipe(write("[objective]\nadv_normalise = true\n"))
    with pytest.raises(ConfigError, match=r"unknown key here; it belongs to section \[train\]"):
        load_recipe(write("[objective]\nnum_mini_batches = 2\n"))


def test_more_updates_than_sequences() -> None:
    with pytest.raises(ConfigError, match="take at most 4, or at least 3 prompts per step"):
        plan_batch(2, 2, num_mini_batches=5)  # 3 prompts x 2 = 6 >= 5
    assert plan_batch(2, 2, num_mini_batches=4).sequences_per_update == (1, 1, 1, 1)
    assert plan_batch(3, 2, num_mini_batches=5).sequences_per_update == (2, 1, 1, 1, 1)


def test_fewer_prompts_than_a_step() -> None:
    with pytest.raises(ConfigError, match=r"5 is fewer than rollout\.prompts_per_step = 8"):
        plan_batch(8, 2, num_prompts=5)


@pytest.mark.parametrize("sizes", [(0, 2, 1, 1, 1), (1, 2, 0, 1, 1), (1, 2, 1, 0, 1), (1, 2, 1, 1, 0)])
def test_counts_below_1(sizes: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        plan_batch(*sizes)


counts = st.integers(1, 12)


@given(counts, st.integers(2, 12), counts, counts, counts, st.integers(1, 60))
def test_a_plan_accounts_for_everything_or_names_what_works(
    prompts: int, group_size: int, updates: int, ranks: int, micro: int, available: int
) -> None:
    try:
        found = plan_batch(prompts, group_size, updates, ranks, micro, available)
    except ConfigError as error:
        message = str(error)
    else:
        check_plan(found, prompts * group_size, updates, ranks, micro)
        assert (found.steps_per_epoch, found.leftover_prompts) == divmod(available, prompts)
        return
    works = re.search(r"group_size = (\d+)(?: or (\d+))?$", message)
    assert works or "fewer" in message or "take at most" in message
    for group in filter(None, works.groups()) if works else ():
        plan_batch(prompts, int(group), updates, ranks, micro)
    named = re.search(r"works: ([\d, ]+) ranks", message)
    for other in named[1].split(", ") if named else ():
        plan_batch(prompts, group_size, updates, int(other), micro)


def check_plan(found: BatchPlan, total: int, updates: int, ranks: int, micro: int) -> None:
    sizes = found.sequences_per_update
    assert sum(sizes) == found.num_sequences == total
    assert len(sizes) == updates
    assert max(sizes) - min(sizes) <= 1
    assert all(size % ranks == 0 for size in sizes)
    assert found.num_micro_batches is not None
    assert (found.num_micro_batches - 1) * micro * ranks < max(sizes) <= found.num_micro_batches * micro * ranks
