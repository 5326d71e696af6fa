from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.cli.conformance import Implementation, conformance, read_cases, run_case
from gspo.cli.conformance.losses import _parse_cut
from gspo.cli.conformance.model import same_answer
from gspo.errors import DataError
from gspo.objectives import GRPO, GSPO, Objective
from gspo.objectives.kl import k3
from gspo.types import ObjectiveOutput

CASES = Path(__file__).parent.parent / "cases" / "objective_cases.json"
OURS = Implementation()


def run(*files: Path, implementation: Implementation | None = None) -> tuple[int, str]:
    out = io.StringIO()
    return conformance(files, out, implementation), out.getvalue()


def write(path: Path, *cases: dict[str, Any]) -> Path:
    path.write_text(json.dumps(cases))
    return path


def verdict(case: dict[str, Any], tmp_path: Path, tested: Implementation = OURS) -> str:
    [parsed] = read_cases(write(tmp_path / "one.json", case))
    return run_case(parsed, tested).word


def case_named(name: str) -> dict[str, Any]:
    return next(c for c in json.loads(CASES.read_text()) if c["id"] == name)


def test_this_package_is_right_on_every_objective_case() -> None:
    status, text = run(CASES)
    assert status == 0, text
    assert "8 cases: 8 right, 0 wrong, 0 not understood" in text
    assert "not checked" not in text
    assert "not offered: a/ddof1_eps_1e_4, a/ddof0, b/ddof0, e/ddof0" in text


class TokenWeighted:
    """A sequence ratio whose responses weigh by their length: the most common fault."""

    name = "gspo"
    unit = "token"

    def __init__(self, clip_low: float, clip_high: float) -> None:
        self.inner = GSPO(clip_low, clip_high)

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> ObjectiveOutput:
        lengths = mask.sum(-1)
        losses = [self.inner(*(x[n : n + 1] for x in (logprobs, old, advantages, mask))) for n in range(len(mask))]
        total = torch.stack([out.loss_sum * n for out, n in zip(losses, lengths, strict=True)]).sum()
        return ObjectiveOutput(total, "token", int(lengths.sum()), self.inner(logprobs, old, advantages, mask).metrics)


class MaskByMultiplication:
    """Removes padding by multiplying, so a nan stays."""

    name = "gspo"
    unit = "sequence"

    def __init__(self, clip_low: float, clip_high: float) -> None:
        self.inner = GSPO(clip_low, clip_high)

    def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> ObjectiveOutput:
        clean = self.inner(logprobs, old, advantages, mask)
        return replace(clean, loss_sum=clean.loss_sum + ((logprobs - old) * ~mask * 0.0).sum())


def mean_of_means(objective: Objective) -> Objective:
    """Gives a mean where a sum is due: micro-batches of unlike size weigh alike."""

    class Mean:
        name, unit = objective.name, objective.unit

        def __call__(self, *args: Tensor) -> ObjectiveOutput:
            out = objective(*args)
            return replace(out, loss_sum=out.loss_sum / out.count, count=1)

    return Mean()


def reversed_k3(logprobs: Tensor, reference: Tensor, advantages: Tensor, mask: Tensor) -> ObjectiveOutput:
    """Policy and reference in each other's place."""
    return ObjectiveOutput(k3(policy=reference, reference=logprobs)[mask].sum(), "token", int(mask.sum()), {})


@pytest.mark.parametrize(
    ("faulty", "case", "fault"),
    [
        ({"gspo": TokenWeighted}, "G01", "token_weighted_sequence_ratio"),
        ({"gspo": lambda low, high: GSPO(1.0, 1e9)}, "G01", "no_clip_or_eps_0p2"),
        ({"gspo": GRPO}, "G01", "token_level_seq_mean"),
        ({"gspo_token": lambda low, high: GRPO(low, high, "token")}, "G01", "token_level_token_mean"),
        ({"gspo": MaskByMultiplication}, "G02", "TRL_1_16_0"),
        ({"token_mean": lambda: mean_of_means(GRPO(unit="token"))}, "G03", "mean_of_micro_means"),
        ({"kl_objective": lambda estimator: reversed_k3}, "G06", "reversed_arguments"),
    ],
)
def test_a_faulty_implementation_is_wrong_and_its_fault_is_named(
    faulty: dict[str, Any], case: str, fault: str, tmp_path: Path
) -> None:
    cases = [case_named("G01"), case_named(case)] if case == "G02" else [case_named(case)]
    status, text = run(write(tmp_path / "c.json", *cases), implementation=replace(OURS, **faulty))
    assert status == 1
    assert f"this is the answer of the fault {fault!r}" in text


def test_faulty_advantages_are_wrong_and_named(tmp_path: Path) -> None:
    def none_is_zero(rewards: Any, ids: Any, scale: str) -> Tensor:
        values = torch.as_tensor([0.0 if r is None or r != r else float(r) for r in rewards], dtype=torch.float64)
        return OURS.group_advantages(values, ids, scale)

    def position(rewards: Any, ids: Any, scale: str) -> Tensor:
        return OURS.group_advantages(rewards, [n // 3 for n in range(len(ids))], scale)

    for faulty, name, fault in ((none_is_zero, "G04", "b_none_counted_as_0"), (position, "G05", "rows_reshaped_by_3")):
        file = write(tmp_path / "c.json", case_named(name))
        status, text = run(file, implementation=replace(OURS, group_advantages=faulty))
        assert status == 1
        assert f"the fault {fault!r}" in text


def test_a_forgotten_temperature_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "c.json", case_named("G07"))
    forgets = replace(
        OURS, selected_logprobs=lambda logits, token, temperature: OURS.selected_logprobs(logits, token, 1.0)
    )
    status, text = run(file, implementation=forgets)
    assert status == 1
    assert "ratio_if_one_side_forgets_T_0p7" in text
    assert "T=0 in float64: got" in text  # it does not refuse either


def test_excluded_rows_that_stay_in_the_denominator_are_named(tmp_path: Path) -> None:
    class KeepsRows:
        name, unit = "gspo", "sequence"

        def __call__(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> ObjectiveOutput:
            return replace(GSPO()(logprobs, old, advantages, mask), count=len(mask))

    file = write(tmp_path / "c.json", case_named("G09"))
    status, text = run(file, implementation=replace(OURS, sequence_mean=KeepsRows))
    assert status == 1
    assert "sequence_mean_over_3" in text


def test_cases_are_told_by_shape_and_computed_from_their_input(tmp_path: Path) -> None:
    """Other ids and numbers; the expected values are worked out here.

    Row 0: d = [0.1, 0.3], s = e^0.2, A = 1, high bound 1.1: objective 1.1, cut.
    Row 1: d = [-0.2], s = e^-0.2, A = 3, not cut. loss = -(1.1 + 3 e^-0.2) / 2.
    """
    s0, s1 = 2.718281828459045**0.2, 2.718281828459045**-0.2
    case = {
        "id": "mine",
        "input": {
            "eps_low": 0.1,
            "eps_high": 0.1,
            "advantages": [1.0, 3.0],
            "lengths": [2, 1],
            "padded_width": 4,
            "old_logprobs": [[-1.0, -1.0], [-1.0]],
            "new_logprobs": [[-0.9, -0.7], [-1.2]],
        },
        "expected": {
            "s": [s0, s1],
            "objective": [1.1, 3 * s1],
            "loss": -(1.1 + 3 * s1) / 2,
            "dloss_dnew_per_token": [0.0, -3 * s1 / 2],
            "clip_fraction_high": 0.5,
            "clip_fraction_low": 0.0,
        },
        "tolerance": "1e-6 absolute in float32, 1e-9 in float64",
    }
    assert verdict(case, tmp_path) == "right"
    for key, value in (("loss", 0.0), ("s", [s0, s0]), ("dloss_dnew_per_token", [1e-5, -3 * s1 / 2])):
        assert verdict({**case, "expected": {**case["expected"], key: value}}, tmp_path) == "wrong"


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        (
            {"lengths": [1, 3], "advantages": [1.0, 1.0], "cuts_to_try": ["[1],[0]", "2 ranks"]},
            {"loss": -1.0},
            {"loss": 1},
        ),
        (
            {"lengths": [1, 3], "advantages": [5.0, 1.0], "excluded": [True, False]},
            {"token_mean": -1.0, "sequence_mean": -1.0, "everything_excluded": "loss 0"},
            {"token_mean": -2.0},
        ),
        ({"x": [0, 2], "y": [None, "inf"]}, {"x": {"centered": [-1, 1]}, "y": "refused"}, {"x": {"centered": [1, -1]}}),
        ({"z": ["3 x 0.3", "5 x 0.7"]}, {"z": "every advantage is exactly 0"}, None),
        (
            {"ids": [1, 2, 1, 2], "rewards": [0, 5, 2, 5]},
            {"first": [-(0.5**0.5), 0, 0.5**0.5, 0]},
            {"first": [1, 0, 1, 0]},
        ),
        ({"policy": [-1.0], "reference": [-3.0]}, {"k1_mean": 2.0, "k2_mean": 2.0}, {"k1_mean": -2.0}),
        (
            {"logits": [0.0, 0.0], "token": 0, "temperatures": [3]},
            {"T=3": {"entropy": 0.693147181}},
            {"T=3": {"logp": 0}},
        ),
        ({"n_c_k": [[4, 2, 1], [1, 0, 2]]}, {"values": [0.5, "refused"]}, {"values": [0.4, "refused"]}),
        (
            {"rows": [{"ids": [4, 0, 0], "n": 1, "reason": "eos"}, {"ids": [4, 5, 6], "n": 3, "reason": "length"}]},
            {"masks": [[1, 0, 0], [1, 1, 1]], "lengths": [1, 3], "truncated": [False, True], "mean_length": "4/2 = 2"},
            {"truncated": [True, True]},
        ),
    ],
)
def test_each_shape_can_be_right_and_wrong(
    given: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any] | None, tmp_path: Path
) -> None:
    assert verdict({"id": "a", "input": given, "expected": right}, tmp_path) == "right"
    if wrong is not None:
        assert verdict({"id": "a", "input": given, "expected": wrong}, tmp_path) == "wrong"


def test_what_is_not_understood_is_said_and_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    strange = {"id": "X1", "title": "of another kind", "input": {"moon": 1}, "expected": {"tide": 2}}
    status, text = run(write(tmp_path / "a.json", strange))
    assert status == 1
    assert "X1     not understood  of another kind (input: moon)" in text
    status, text = run(write(tmp_path / "b.json", strange, case_named("G01")))
    assert status == 0
    assert "2 cases: 1 right, 0 wrong, 1 not understood" in text


def test_expectations_that_nothing_checks_are_listed(tmp_path: Path) -> None:
    case = case_named("G01")
    case["expected"]["colour"] = "blue"
    _, text = run(write(tmp_path / "a.json", case))
    assert "not checked: colour" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("[{", "is not JSON"),
        ('{"id": 1}', "is not a list of cases"),
        ('[{"id": "b", "input": {"base": "a"}, "expected": {}}]', "refers to case 'a'"),
    ],
)
def test_an_unreadable_file_is_exit_status_2_and_the_others_still_run(
    content: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_cases(file)
    status, text = run(file, write(tmp_path / "good.json", case_named("G01")))
    assert status == 2
    assert message in text
    assert "1 cases: 1 right" in text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one batch of 4", [[0, 1, 2, 3]]),
        ("[0],[1],[2],[3]", [[0], [1], [2], [3]]),
        ("2 ranks: {0,1},{2,3}", [[0, 1], [2, 3]]),
        ("2 ranks x 2 micro-batches", [[0], [1], [2], [3]]),
        ("[3],[0,1,2]", [[3], [0, 1, 2]]),
        ("[0],[1]", None),  # rows are missing
        ("as you like", None),
    ],
)
def test_cuts_are_read(text: str, parts: list[list[int]] | None) -> None:
    assert _parse_cut(text, 4) == parts


def test_a_variant_that_another_implementation_offers_is_checked(tmp_path: Path) -> None:
    """[0, 2]: mean 1, population std 1, so ddof0 gives [-1, 1]; ddof1 gives [-1, 1] / sqrt(2)."""

    def population(rewards: Any, ids: Any, scale: str) -> Tensor:
        got = OURS.group_advantages(rewards, ids, "group_std" if scale == "population" else scale)
        return got * (len(got) / (len(got) - 1)) ** 0.5 if scale == "population" else got

    case = {
        "id": "a",
        "input": {"a": [0, 2]},
        "expected": {"a": {"ddof0": [-1.0, 1.0], "ddof1": [-(0.5**0.5), 0.5**0.5]}},
    }
    offers = replace(OURS, group_advantages=population, scales={**OURS.scales, "ddof0": "population"})
    assert verdict(case, tmp_path, offers) == "right"
    status, text = run(write(tmp_path / "c.json", case), implementation=offers)
    assert status == 0
    assert "not offered" not in text
    case["expected"] = {"a": {"ddof0": [-0.5, 0.5]}}
    assert verdict(case, tmp_path, offers) == "wrong"
    status, text = run(write(tmp_path / "c.json", case))  # nothing else is asked, and we do not offer it
    assert status == 1
    assert "not understood" in text
    assert "not offered: a/ddof0" in text


def test_metrics_that_move_with_the_exclusion_are_wrong(tmp_path: Path) -> None:
    def kept_only(lengths: Any, truncated: Any, excluded: Any) -> dict[str, float]:
        kept = [row for row in range(len(lengths)) if not excluded[row]]
        return OURS.response_metrics([lengths[n] for n in kept], [truncated[n] for n in kept], [False] * len(kept))

    case = case_named("G09")
    status, text = run(write(tmp_path / "c.json", case), implementation=replace(OURS, response_metrics=kept_only))
    assert status == 1
    assert "metrics/truncated_fraction in float64: got 0, expected 0.333333" in text
    # 5 rows of 1 + 2 + 3 + 4 + 10 = 20 tokens, 2 of 5 truncated
    other = {
        "id": "b",
        "input": {"lengths": [1, 2, 3, 4, 10], "advantages": [1.0] * 5, "excluded": [False, True, False, False, True]},
        "expected": {
            "metrics": "mean length 4 over all rows; truncated fraction 0.4; both unaffected by the exclusion"
        },
    }
    assert verdict(other, tmp_path) == "right"
    other["expected"] = {"metrics": "mean length 4.1 over all rows; the moon is full"}
    assert verdict(other, tmp_path) == "wrong"
    assert "not checked: metrics/moon is full" in run(write(tmp_path / "c.json", other))[1]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"id": None, "input": 5, "expected": [1]},
        {"input": []},
        {"input": [{"gold": "1"}, 3]},
        {"input": {"rows": 5}, "expected": {"masks": 1}},
        {"input": {"rows": [{"ids": [1], "n": 1, "reason": "tired"}]}, "expected": {"lengths": [1]}},
        {"input": {"lengths": "abc", "advantages": None, "excluded": {}}, "expected": {"token_mean": 0}},
        {"input": {"n_c_k": [[1, 1], ["a", 2, 3]]}, "expected": {"values": [1.0, None]}},
        {"input": {"n_c_k": [], "greedy": "many"}, "expected": {"greedy": "some"}},
        {"input": {"ids": "x", "rewards": 3}, "expected": {"first": [0.0]}},
        {"input": {"cases": 7}, "expected": {"answers": "x"}},
        {"input": {"cases": [1, {"P": "x", "G": 2}, {"P": 1}, {}]}, "expected": {"answers": [1, "2", "3", "4"]}},
        {"input": {"triples": [{"gold": 1}, 4]}},
        {"input": {"problems": {}, "programs": [{"program": "x", "problem": "P", "verdict": True}]}},
        {"input": {"problems": 3, "programs": 4}},
        {"input": {"items": [[1]], "limit_seconds": "x"}, "expected": {"verdicts": [True]}},
        {"input": {"items": [], "limit_seconds": 1}, "expected": {}},
        {"input": {"sampled_ids": 1, "sampler_logprobs": 2}, "expected": {"trained_ids": 3}},
        {"input": {"policy": "x", "reference": {}}, "known_wrong_answers": {"a": None, "b": [{}]}},
    ],
)
def test_no_malformed_case_is_right_or_a_traceback(case: dict[str, Any], tmp_path: Path) -> None:
    status, text = run(write(tmp_path / "c.json", case))
    assert status == 1, text
    assert "1 cases: 0 right" in text


def test_what_the_stream_cannot_write_is_escaped(tmp_path: Path) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    conformance([write(tmp_path / "c.json", {"id": "a", "title": "\ud800 − é", "input": {}})], out)
    out.flush()
    assert b"\\ud800 \\u2212 \\xe9" in raw.getvalue()


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    cases = [
        {"id": "a", "input": {"base": "b"}, "expected": {"values": [0.5]}},
        {"id": "b", "input": {"base": "c", "n_c_k": [[4, 2, 1]]}},
        {"id": "c", "input": {"n_c_k": [[1, 1, 1]], "dataset": [[1, 1]]}},
    ]
    first = read_cases(write(tmp_path / "c.json", *cases))[0]
    assert first.input == {"n_c_k": [[4, 2, 1]], "dataset": [[1, 1]]}
    assert run_case(first, OURS).word == "right"


def test_same_answer_compares_numbers_lists_and_leading_numbers_of_text() -> None:
    assert same_answer(0.25, 0.2500001, 1e-6)
    assert not same_answer(0.25, 0.26, 1e-6)
    assert same_answer([0.0, 0.0], 0.0, 1e-6)
    assert not same_answer([1e-9, 0.0], 0.0, 1e-6, exact_zero=True)
    assert not same_answer([1.0], [1.0, 2.0], 1e-6)
    assert not same_answer([], 0.0, 1e-6)
    assert same_answer(-0.25, "-0.25 (measured)", 1e-6)
    assert same_answer(float("nan"), "nan loss", 1e-6)
    assert not same_answer(float("nan"), 0.0, 1e-6)
    assert not same_answer("text", "text", 1e-6)
    assert not same_answer(0.0, None, 1e-6)
    assert not same_answer(0.0, {}, 1e-6)
