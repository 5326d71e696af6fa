"""Cases about evaluation: pass@k."""

from __future__ import annotations

import torch

from gspo.cli.conformance.implementation import Implementation
from gspo.cli.conformance.model import (
    AnyShape,
    Case,
    Check,
    Sentence,
    Shape,
    refusal,
    rounding,
    same_answer,
    unchecked,
)


def _pass_rates(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """(n, c, k) triples, pass@k of a data set as the mean over its problems, and greedy samples."""
    checks = []
    for triple, wanted in zip(case.input["n_c_k"], case.expected.get("values", []), strict=False):
        label = "values/" + ",".join(map(str, triple))
        if isinstance(wanted, str):
            checks.append(refusal(label, lambda triple=triple: tested.pass_at_k(*triple), dtype))  # type: ignore[misc]
        else:
            got = tested.pass_at_k(*triple)
            checks.append(Check(label, same_answer(got, wanted, case.tolerance_in(dtype)), got, wanted, dtype))
    for name, wanted in (case.expected.get("dataset") or {}).items():
        counts = [(n, c) for n, c in case.input["dataset"]]
        got = tested.pass_at_k_mean(counts, int(name.split("@")[1]))
        right = same_answer(got, wanted, case.tolerance_in(dtype))
        checks.append(Check(f"dataset/{name}", right, got, wanted, dtype))
    if "greedy" in case.expected:
        checks += _greedy(case, tested, dtype)
    return checks


def _greedy(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """``164 problems, 1 greedy sample each, 50 solved`` and ``pass@1 = 0.304878; pass@10 refused (n=1)``."""
    given = Sentence(str(case.input.get("greedy", "")))
    problems, samples, solved = (
        given.take(words) for words in (r"(\d+) problems", r"(\d+) greedy samples? each", r"(\d+) solved")
    )
    if not (problems and samples and solved) or given.left():
        return [unchecked("greedy")]
    n = int(samples[1])  # greedy samples of a problem are all the same
    counts = [(n, n)] * int(solved[1]) + [(n, 0)] * (int(problems[1]) - int(solved[1]))
    sentence, checks = Sentence(str(case.expected["greedy"])), []
    while found := sentence.take(r"pass@(\d+) = (\d+(?:\.\d+)?)"):
        got, tolerance = tested.pass_at_k_mean(counts, int(found[1])), rounding(found[2])
        right = same_answer(got, float(found[2]), max(tolerance, case.tolerance_in(dtype)))
        checks.append(Check(f"greedy/pass@{found[1]}", right, got, float(found[2]), dtype))
    while found := sentence.take(r"pass@(\d+) refused( \(n\s*=\s*\d+\))?"):
        k = int(found[1])
        checks.append(refusal(f"greedy/pass@{k}", lambda k=k: tested.pass_at_k_mean(counts, k), dtype))  # type: ignore[misc]
    return [*checks, *(unchecked(f"greedy/{part}") for part in sentence.left())]


EVALUATION_SHAPES: tuple[AnyShape, ...] = (Shape(frozenset({"n_c_k"}), _pass_rates),)
