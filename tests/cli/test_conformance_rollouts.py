"""Rollouts and pass@k as cases: right, wrong with the fault named, and other numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.conformance import Implementation
from gspo.cli.conformance.implementation import EngineRow, ResponseTensors, SampledStep
from gspo.types import StopReason

from .test_conformance import run, verdict, write

OURS = Implementation()
FOLDER = Path(__file__).parents[1] / "cases"


def case_named(file: str, name: str) -> dict[str, Any]:
    return next(case for case in json.loads((FOLDER / file).read_text()) if case["id"] == name)


@pytest.mark.parametrize(("file", "count"), [("rollout_cases.json", 2), ("evaluation_cases.json", 1)])
def test_this_package_is_right(file: str, count: int) -> None:
    status, text = run(FOLDER / file)
    assert status == 0, text
    assert f"{count} cases: {count} right" in text
    assert "not checked" not in text


# Masks, lengths, truncation (G08).


def reader(length: Callable[[EngineRow], int], truncated: Callable[[EngineRow], bool] | None = None) -> Any:
    """Reads engine rows with another idea of length or of truncation."""

    def read(rows: Sequence[EngineRow]) -> ResponseTensors:
        lengths = [length(row) for row in rows]
        mask = [[int(position < n) for position in range(len(row.ids))] for row, n in zip(rows, lengths, strict=True)]
        cut = truncated or (lambda row: row.stop_reason is StopReason.LENGTH)
        return ResponseTensors(mask, lengths, [cut(row) for row in rows])

    return read


def not_pad(rows: Sequence[EngineRow]) -> ResponseTensors:
    made = OURS.engine_rows(rows)
    return replace(made, mask=[[int(token != 2) for token in row.ids] for row in rows])


def first_pad_is_eos(row: EngineRow) -> int:
    """A stop string appended nothing, but the pad after it looks like an end-of-text token."""
    return row.num_generated + (row.stop_reason is StopReason.STOP_STRING)


def no_eos_id_2(row: EngineRow) -> bool:
    """Takes a response for truncated unless it ends with the one stop id it knows of, or with a stop string."""
    if row.stop_reason in (StopReason.STOP_STRING, StopReason.EMPTY):
        return False
    return 2 not in row.ids[: row.num_generated]


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (not_pad, "mask_from_ids_not_equal_pad"),
        (reader(lambda row: row.num_generated, no_eos_id_2), "single_eos_id"),
        (reader(first_pad_is_eos), "first_pad_taken_as_eos"),
    ],
)
def test_a_faulty_reader_of_engine_rows_is_named(read: Any, fault: str, tmp_path: Path) -> None:
    file = write(tmp_path / "c.json", case_named("rollout_cases.json", "G08"))
    status, text = run(file, implementation=replace(OURS, engine_rows=read))
    assert status == 1
    assert f"this is the answer of the fault {fault!r}" in text


# Ids and BOS (G14).


def re_encodes(
    prompt_ids: Sequence[int],
    samples: Sequence[tuple[Sequence[int], Sequence[float]]],
    decode: Callable[[Sequence[int]], str],
) -> SampledStep:
    """Trains on the ids of the decoded text."""
    step = OURS.sampled_step(prompt_ids, samples, decode)
    return replace(step, trained_ids=[[7] if decode(ids) == "hello" else list(ids) for ids, _ in samples])


def cuts(prompt_ids: Sequence[int], samples: Any, decode: Any) -> SampledStep:
    """Cuts log-probs to the ids instead of refusing."""
    return OURS.sampled_step(prompt_ids, [(ids, values[: len(ids)]) for ids, values in samples], decode)


def loses_prompt(prompt_ids: Sequence[int], samples: Any, decode: Any) -> SampledStep:
    return replace(OURS.sampled_step(prompt_ids, samples, decode), trainer_prompt=list(prompt_ids)[1:])


def adds_bos_always(tokenizer: Any, content: Any) -> list[int]:
    """Lets the tokenizer add BOS in front of what the template wrote."""
    text = content if isinstance(content, str) else tokenizer.apply_chat_template(list(content), tokenize=False)
    return list(tokenizer(text)["input_ids"])


def never_adds_bos(tokenizer: Any, content: Any) -> list[int]:
    text = content if isinstance(content, str) else tokenizer.apply_chat_template(list(content), tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("faulty", "told"),
    [
        ({"sampled_step": re_encodes}, "this is the answer of the fault 'encoded again from text'"),
        ({"sampled_step": re_encodes}, "lengths: got [1, 1], expected [2, 4]"),
        ({"sampled_step": cuts}, "misaligned: got [[4, 6]], expected refused: 3 log-probs for 2 ids"),
        ({"sampled_step": loses_prompt}, "engine_and_trainer_prompt_ids: got"),
        ({"render_prompt": adds_bos_always}, "bos_count: got [2, 1, 1, 0], expected [1, 1, 1, 0]"),
        ({"render_prompt": adds_bos_always}, "bos_rule/text that begins with BOS: got 2, expected 1"),
        ({"render_prompt": never_adds_bos}, "bos_count: got [1, 0, 1, 0], expected [1, 1, 1, 0]"),
    ],
)
def test_faulty_rollouts_are_told(faulty: dict[str, Any], told: str, tmp_path: Path) -> None:
    file = write(tmp_path / "c.json", case_named("rollout_cases.json", "G14"))
    status, text = run(file, implementation=replace(OURS, **faulty))
    assert status == 1
    assert told in text


def test_other_ids_another_encoding_and_another_order(tmp_path: Path) -> None:
    """a=0 b=1 ab=2 aba=3: "aba" is [3]; sampled as [0, 1, 0]. Text "ab" sampled as [0, 1] would be [2]."""
    case = {
        "id": "mine",
        "rule": "toy BPE: a=0 b=1 ab=2 aba=3, merges (a,b) (ab,a)",
        "input": {
            "sampled_ids": [0, 1, 0],
            "sampler_logprobs": [-0.5, -0.25, -3.0],
            "decoded": "aba",
            "second_sampled": [0, 1],
            "bos": [
                {"template_emits": False, "tokenizer_adds": False},
                {"template_emits": True, "tokenizer_adds": True},
            ],
            "misaligned": {"ids": [1, 2, 3], "logprobs": [-1.0]},
        },
        "expected": {
            "trained_ids": [[0, 1, 0], [0, 1]],
            "lengths": [3, 2],
            "re_encoded_would_be": [3],
            "bos_count": [0, 1],
            "misaligned": "refused: 1 log-probs for 3 ids",
        },
    }
    assert verdict(case, tmp_path) == "right"
    for key, value in (
        ("trained_ids", [[3], [2]]), ("lengths", [1, 1]), ("re_encoded_would_be", [2, 0]), ("bos_count", [0, 2]),
    ):  # fmt: skip
        assert verdict({**case, "expected": {**case["expected"], key: value}}, tmp_path) == "wrong"
    no_rule = {**case, "rule": ""}
    assert verdict(no_rule, tmp_path) == "right"
    assert "not checked: re_encoded_would_be" in run(write(tmp_path / "c.json", no_rule))[1]


# pass@k (G10).


def with_replacement(n: int, c: int, k: int) -> float:
    if k > n:
        return 1.0
    return 1 - (1 - c / n) ** k


def pooled(counts: Sequence[tuple[int, int]], k: int) -> float:
    n, c = (sum(column) for column in zip(*counts, strict=True))
    return 1 - comb(n - c, k) / comb(n, k)


@pytest.mark.parametrize(
    ("faulty", "fault"),
    [
        ({"pass_at_k": with_replacement}, "4,1,4 by drawing with replacement"),
        ({"pass_at_k": with_replacement}, "2,0,5 by the usual shortcut"),
        ({"pass_at_k_mean": pooled}, "dataset pass@2 pooled as n=16,c=7"),
        ({"pass_at_k_mean": pooled}, "greedy pass@10 with problems fed as samples"),
    ],
)
def test_a_faulty_pass_rate_is_named(faulty: dict[str, Any], fault: str, tmp_path: Path) -> None:
    file = write(tmp_path / "c.json", case_named("evaluation_cases.json", "G10"))
    status, text = run(file, implementation=replace(OURS, **faulty))
    assert status == 1
    assert f"this is the answer of the fault {fault!r}" in text


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        ("8 problems, 1 greedy sample each, 3 solved", "pass@1 = 0.375; pass@2 refused (n=1)", "pass@1 = 0.376"),
        ("3 problems, 1 greedy sample each, 2 solved", "pass@1 = 0.667", "pass@1 = 0.666"),  # 2/3, as written
        ("3 problems, 1 greedy sample each, 1 solved", "pass@1 = 0.333333", "pass@1 refused"),
        ("4 problems, 2 greedy samples each, 1 solved", "pass@2 = 0.25; pass@3 refused", "pass@2 refused"),
    ],
)
def test_greedy_samples_with_other_numbers(given: str, right: str, wrong: str, tmp_path: Path) -> None:
    case = {"id": "a", "input": {"n_c_k": [], "greedy": given}, "expected": {"greedy": right}}
    assert verdict(case, tmp_path) == "right"
    assert verdict({**case, "expected": {"greedy": wrong}}, tmp_path) == "wrong"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("8 problems, some solved", "pass@1 = 0.3"), ("8 problems, 1 greedy sample each, 3 solved", "much")],
)
def test_sentences_about_greedy_samples_that_are_not_understood(given: str, expected: str, tmp_path: Path) -> None:
    case = {"id": "a", "input": {"n_c_k": [], "greedy": given}, "expected": {"greedy": expected}}
    assert verdict(case, tmp_path) == "not understood"
    assert "not checked: greedy" in run(write(tmp_path / "c.json", case))[1]
