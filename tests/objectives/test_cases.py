"""Worked numbers of tests/cases that the runner of ``gspo conformance`` does not compare: the named variants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gspo.objectives import GRPO, GSPO, Objective

from .helpers import Batch, loss_and_gradient

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent.parent / "cases" / "objective_cases.json").read_text())}


def batch_of(case: dict) -> Batch:
    given = case["input"]
    width = given["padded_width"]
    new, old = (
        torch.tensor([row + [0.0] * (width - len(row)) for row in given[key]], dtype=torch.float64)
        for key in ("new_logprobs", "old_logprobs")
    )
    mask = torch.arange(width) < torch.tensor(given["lengths"])[:, None]
    return Batch(new, old, torch.tensor(given["advantages"], dtype=torch.float64), mask)


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (GRPO(3e-4, 4e-4), "token_level_seq_mean"),
        (GRPO(3e-4, 4e-4, "token"), "token_level_token_mean"),
        (GSPO(0.2, 0.2), "no_clip_or_eps_0p2"),
    ],
)
def test_another_bundle_gives_the_answer_named_after_it(objective: Objective, name: str) -> None:
    loss, _ = loss_and_gradient(objective, batch_of(CASES["G01"]))
    assert loss.item() == pytest.approx(CASES["G01"]["known_wrong_answers"][name], abs=1e-9)


def test_the_paper_bundle_gives_the_right_one() -> None:
    loss, _ = loss_and_gradient(GSPO(), batch_of(CASES["G01"]))
    assert loss.item() == pytest.approx(CASES["G01"]["expected"]["loss"], abs=1e-9)
