"""Batch arithmetic and recipes as cases: right, wrong, other numbers, and sentences that are not understood."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.conformance import Implementation
from gspo.config import BatchPlan, plan_batch
from gspo.errors import ConfigError

from .test_conformance import run, write

OURS = Implementation()
CASES = Path(__file__).parents[1] / "cases" / "batch_cases.json"


def outcome(tmp_path: Path, given: Any, text: str, tested: Implementation = OURS, **more: Any) -> tuple[int, str]:
    case = {"id": "x", "input": {"cases": [given]}, "expected": {"answers": [text]}, **more}
    return run(write(tmp_path / "c.json", case), implementation=tested)


def test_this_package_is_right_on_the_batch_cases() -> None:
    status, text = run(CASES)
    assert status == 0, text
    assert "1 cases: 1 right" in text
    # every sentence is read, but for one remark in brackets about another case
    assert [line.strip() for line in text.splitlines() if "not checked" in line] == [
        "not checked: answers/9: G01: clip fraction 0"
    ]


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        ({"P": 3, "G": 4, "W": 1, "m": 5}, "3 micro-batches", "2 micro-batches"),  # 12 rows in cuts of 5
        ({"P": 6, "G": 4, "W": 2, "m": 3}, "4 micro-batches", "8 micro-batches"),  # 12 rows per rank
        ({"P": 6, "G": 4, "W": 2, "m": 3}, "4 micro-batches of 3", "4 micro-batches of 12"),
        ({"P": 2, "G": 4, "W": 1, "m": 50}, "1 micro-batch of 8, said so", "1 micro-batch of 50, said so"),
        ({"P": 2, "G": 4, "W": 1, "m": 4}, "2 micro-batches", "2 micro-batches, said so"),  # nothing to say
        (
            {"P": 3, "G": 1, "W": 1, "m": 1},
            "error: a group needs at least 2 completions (not 'must be divisible')",
            "error: a group needs at least 3 completions",
        ),
        ({"P": 3, "G": 2, "W": 1, "m": 1}, "6 micro-batches", "error: a group needs at least 2 completions"),
        ({"P": 3, "G": 1, "W": 1, "m": 1}, "error: a group needs at least 2 completions", "3 micro-batches"),
        (
            {"P": 3, "G": 2, "W": 1, "m": 2, "dataset": 11},  # 11 = 3 x 3 + 2
            "3 steps per epoch, and the start-up summary says that 2 prompts are left over (carried or dropped)",
            "4 steps per epoch, and the start-up summary says that 2 prompts are left over",
        ),
        (
            {"P": 3, "G": 2, "W": 1, "m": 2, "dataset": 11},
            "3 steps per epoch",
            "the start-up summary says that 1 prompt is left over",
        ),
        (
            {"P": 3, "G": 2, "W": 1, "m": 2, "dataset": 9},
            "3 steps per epoch; no prompt is left over",
            "1 prompt is left over",
        ),
        (
            {"P": 2, "G": 9, "W": 1, "m": 5},  # rows 5..9 hold the end of group 0 (0..8) and the start of group 1
            "4 micro-batches; the second holds rows of both groups; advantages as with m=18",
            "4 micro-batches; the first holds rows of both groups",
        ),
        (
            {"P": 1, "G": 10, "W": 4, "m": 1},  # 10 rows: 1, 2, 5 ranks; G 8 and 12 by 4 ranks
            "either 3 micro-batches with 2 empty rows, or an error that names working values (W 1, 2, 5; G 8, 12)",
            "either 3 micro-batches with 2 empty rows, or an error that names working values (W 1, 3; G 8, 12)",
        ),
        (
            {"P": 1, "G": 10, "W": 4, "m": 1},
            "error that names working values (W 1, 2, 5, 10; G 8)",  # one of each is enough
            "error that names working values (W 10)",  # works, but is not what we name
        ),
        (
            {"P": 1, "G": 8, "W": 2, "m": 1},
            "4 micro-batches",
            "error that names working values (W 1)",  # nothing to refuse
        ),
        (
            {"P": 1, "G": 8, "W": 1, "m": 1},
            "either 8 micro-batches with no zero-mask row, or an error that names working values (W 1)",
            "either 9 micro-batches with no zero-mask row, or an error that names working values (W 1)",
        ),
        ({"typo": "temperatur=0.7"}, "error naming temperature", "error naming group_size"),
        ({"typo": "num_generation=8"}, "error naming num_generations", "error naming dropout"),
        ({"typo": "max_grad_nrm=2"}, "error naming max_grad_norm", "error naming learning_rate"),
        (
            {"algorithm": "gspo", "eps_low": 0.3, "eps_high": 0.3},
            "runs only after a warning that 0.3 never binds at sequence level",
            "runs without a warning",
        ),
        (
            {"algorithm": "gspo", "eps_low": 0.0003, "eps_high": 0.0004},
            "runs without a warning",
            "runs only after a warning that 0.0003 never binds at sequence level",
        ),
        (
            {"algorithm": "grpo", "eps_low": 0.2, "eps_high": 0.2},
            "no warning",
            "runs only after a warning that 0.2 never binds at sequence level",
        ),
        ({"algorithm": "gspo", "eps_low": -1, "eps_high": 0.3}, "error", "runs without a warning"),
        (
            {"learning_rate": "set in the wrong section"},
            "error: unknown key here; it belongs to section X",
            "error: unknown key here; it belongs to section [rollout]",
        ),
        (
            {"kl_coef": "set in the wrong section"},
            "error: unknown key here; it belongs to section [objective]",
            "error: unknown key here; it belongs to section [train]",
        ),
    ],
)  # fmt: skip
def test_sentences_with_other_numbers(given: dict[str, Any], right: str, wrong: str, tmp_path: Path) -> None:
    status, text = outcome(tmp_path, given, right)
    assert status == 0, text
    status, text = outcome(tmp_path, given, wrong)
    assert status == 1
    assert "1 wrong" in text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"P": 3, "G": 4, "W": 1, "m": 5}, "as many as the moon has craters"),
        ({"P": 3, "G": 1, "W": 1, "m": 1}, "error: something else entirely"),
        ({"P": 3, "G": 4, "colour": 5}, "3 micro-batches"),
        ({"P": 2.5, "G": 4}, "3 micro-batches"),
        ({"P": 4, "G": 9, "W": 2, "m": 5}, "the second holds rows of both groups"),  # whose second?
        ({"typo": "a=1"}, "a shrug"),
        ({"algorithm": "gspo", "eps_low": 0.1}, "a shrug"),
        ({"unheard_of": "set in the wrong section"}, "error: unknown key here; it belongs to section X"),
        ({"moon": 1}, "tide"),
        (7, "8"),
    ],
)
def test_sentences_that_are_not_understood_are_never_right(given: Any, sentence: str, tmp_path: Path) -> None:
    status, text = outcome(tmp_path, given, sentence)
    assert status == 1
    assert "0 right, 0 wrong, 1 not understood" in text
    assert "not checked: answers/1" in text


def test_the_part_of_a_sentence_that_is_not_understood_is_listed(tmp_path: Path) -> None:
    status, text = outcome(tmp_path, {"P": 3, "G": 4, "W": 1, "m": 5}, "3 micro-batches and the loss is blue")
    assert status == 0
    assert "answers/1 (P 3, G 4, W 1, m 5): loss is blue" in text
    case = {
        "id": "x",
        "input": {"cases": [{"P": 3, "G": 4, "m": 5}]},
        "expected": {"answers": ["3 micro-batches", "b"]},
    }
    assert "not checked: answers/2" in run(write(tmp_path / "c.json", case))[1]


def faulty_plan(change: Mapping[str, Any] | None = None, message: str = "") -> Implementation:
    """A plan with some fields changed, or another message in place of ours."""

    def plan(*args: Any, **options: Any) -> BatchPlan:
        try:
            return replace(plan_batch(*args, **options), **(change or {}))
        except ConfigError as error:
            raise ConfigError(message or str(error)) from error

    return replace(OURS, plan_batch=plan)


@pytest.mark.parametrize(
    ("tested", "number"),
    [
        (faulty_plan({"num_micro_batches": 7}), 1),
        (faulty_plan({"notes": ()}), 4),  # says nothing about rows of several groups
        (faulty_plan({"notes": ()}), 6),
        (faulty_plan({"leftover_prompts": 0}), 6),
        (faulty_plan({"notes": ()}), 7),
        (faulty_plan(message="the batch must be divisible by the group"), 5),
        (faulty_plan(message="8 sequences do not fit 3 ranks"), 3),  # names nothing that works
        (faulty_plan(message="what works: 5 ranks"), 3),  # 8 rows on 5 ranks do not
    ],
)
def test_a_faulty_plan_is_wrong(tested: Implementation, number: int, tmp_path: Path) -> None:
    status, text = run(CASES, implementation=tested)
    assert status == 1
    assert f"answers/{number} " in text


def test_a_faulty_plan_is_named(tmp_path: Path) -> None:
    """8 rows: 8 micro-batches of 1. One that forgets the ranks has 16 for 2 ranks of 8."""
    given = {"P": 2, "G": 8, "W": 2, "m": 1}
    faults = {"ranks forgotten": 16}
    tested = faulty_plan({"num_micro_batches": 16})
    status, text = outcome(tmp_path, given, "8 micro-batches", tested, known_wrong_answers=faults)
    assert status == 1
    assert "got 16, expected 8; this is the answer of the fault 'ranks forgotten'" in text
    words = {"divisibility": "must be divisible"}
    tested = faulty_plan(message="the batch must be divisible by the group")
    text = outcome(
        tmp_path, {"P": 2, "G": 1}, "error: at least 2 (not 'must be divisible')", tested, known_wrong_answers=words
    )[1]
    assert "this is the answer of the fault 'divisibility'" in text


def test_faulty_recipes_are_wrong() -> None:
    def silent(settings: Mapping[str, str]) -> Sequence[str]:
        return []

    def gruff(settings: Mapping[str, str]) -> Sequence[str]:
        raise ConfigError("no")

    for check in (silent, gruff):
        status, text = run(CASES, implementation=replace(OURS, check_recipe=check))
        assert status == 1
        for number in (8, 9, 10):
            assert f"answers/{number} " in text


def test_the_cases_are_not_told_by_their_order(tmp_path: Path) -> None:
    [case] = json.loads(CASES.read_text())
    case["input"]["cases"].reverse()
    case["expected"]["answers"].reverse()
    assert run(write(tmp_path / "c.json", case))[0] == 0
    case["expected"]["answers"].reverse()
    assert run(write(tmp_path / "c.json", case))[0] == 1
