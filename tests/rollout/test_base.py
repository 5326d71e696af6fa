"""The record an engine hands over, on the worked cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.rollout.base import SamplingParams, pad_completions
from gspo.types import Completion, StopReason

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent.parent / "cases" / "rollout_cases.json").read_text())}
REASONS = {
    "eos": StopReason.EOS,
    "eos (id 3)": StopReason.EOS,
    "length": StopReason.LENGTH,
    "stop string, nothing appended": StopReason.STOP_STRING,
    "empty": StopReason.EMPTY,
}


def completions(rows: list[dict[str, Any]]) -> list[Completion]:
    """What an engine would hand over for the rows: the ids that it produced, not its padded buffer."""
    return [
        Completion(torch.tensor(r["ids"][: r["n"]], dtype=torch.int64), torch.zeros(r["n"]), REASONS[r["reason"]], 4)
        for r in rows
    ]


def test_g08_masks_lengths_and_truncation_come_from_the_engine() -> None:
    case = CASES["G08"]
    padded = pad_completions(completions(case["input"]["rows"]))
    assert padded.mask.int().tolist() == case["expected"]["masks"]
    assert padded.lengths.tolist() == case["expected"]["lengths"]
    assert padded.truncated.tolist() == case["expected"]["truncated"]
    assert padded.mask.int().tolist() != case["known_wrong_answers"]["mask_from_ids_not_equal_pad"]
    # 1 of 7 rows is truncated; the empty row counts as a row. 18 tokens over 7 rows.
    assert float(padded.truncated.double().mean()) == pytest.approx(1 / 7)
    assert float(padded.lengths.double().mean()) == pytest.approx(18 / 7)
    assert padded.policy_versions.tolist() == [4] * 7


def test_g14_ids_are_the_sampled_ones_and_misaligned_logprobs_are_refused() -> None:
    case = CASES["G14"]
    given = case["input"]
    sampled = [given["sampled_ids"], given["second_sampled"]]
    logprobs = [given["sampler_logprobs"], [-1.0] * 4]
    records = [
        Completion(torch.tensor(ids), torch.tensor(values), StopReason.EOS, 0)
        for ids, values in zip(sampled, logprobs, strict=True)
    ]
    padded = pad_completions(records)
    trained = [padded.token_ids[i, : padded.lengths[i]].tolist() for i in range(2)]
    assert trained == case["expected"]["trained_ids"]
    assert padded.lengths.tolist() == case["expected"]["lengths"]
    assert padded.logprobs[0, :2].tolist() == pytest.approx(given["sampler_logprobs"])
    wrong = given["misaligned"]
    with pytest.raises(ValueError, match="3 log-probs for 2 ids"):
        Completion(torch.tensor(wrong["ids"]), torch.tensor(wrong["logprobs"]), StopReason.EOS, 0)


def test_no_completions_is_an_empty_batch() -> None:
    assert pad_completions([]).token_ids.shape == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 4, "temperature": -1.0},
        {"max_new_tokens": 4, "temperature": float("nan")},
        {"max_new_tokens": 4, "stop_strings": ("",)},
    ],
)
def test_sampling_parameters_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens|temperature|stop string"):
        SamplingParams(**wrong)
