"""Cases about losses: objectives, cuts, exclusions, KL, temperature."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gspo.cli.conformance.implementation import Implementation, Loss
from gspo.cli.conformance.model import Case, Check, Sentence, Shape, compare, refusal, rounding, same_answer, unchecked
from gspo.errors import NumericalError
from gspo.types import ObjectiveOutput


@dataclass(frozen=True, eq=False)
class _Batch:
    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    def rows(self, index: Sequence[int]) -> _Batch:
        chosen = torch.tensor(index, dtype=torch.int64)
        return _Batch(self.logprobs[chosen], self.old[chosen], self.advantages[chosen], self.mask[chosen])

    def token_values(self, values: Tensor) -> list[list[float]]:
        """(N, T) values as ragged lists of the tokens inside the mask."""
        return [row[inside].tolist() for row, inside in zip(values, self.mask, strict=True)]


def _padded(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*(v or 0.0 for v in row), *[0.0] * (width - len(row))] for row in rows], dtype=dtype)


def _length_mask(lengths: Sequence[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def _given_batch(given: Mapping[str, Any], dtype: torch.dtype) -> _Batch:
    new, old = given["new_logprobs"], given["old_logprobs"]
    lengths = given.get("lengths") or [len(row) for row in new]
    width = max(int(given.get("padded_width", 0)), *(len(row) for row in new), 1)
    advantages = torch.tensor(given["advantages"], dtype=dtype)
    return _Batch(_padded(new, width, dtype), _padded(old, width, dtype), advantages, _length_mask(lengths, width))


def _on_policy_batch(given: Mapping[str, Any], dtype: torch.dtype, excluded: Sequence[bool] | None = None) -> _Batch:
    """Any log-probs do, since old = current."""
    lengths = given["lengths"]
    mask = _length_mask(lengths, max(lengths))
    if excluded is not None:
        mask = mask & ~torch.tensor(excluded)[:, None]
    logprobs = -0.5 - torch.arange(mask.numel(), dtype=dtype).reshape(mask.shape) / mask.numel()
    return _Batch(logprobs, logprobs.clone(), torch.tensor(given["advantages"], dtype=dtype), mask)


def _loss_and_gradient(objective: Loss, batch: _Batch, advantages: Tensor | None = None) -> tuple[float, Tensor]:
    """Loss of one undivided batch (0 if nothing enters) and its gradient by the log-probs."""
    leaf = batch.logprobs.clone().requires_grad_()
    out = objective(leaf, batch.old, batch.advantages if advantages is None else advantages, batch.mask)
    loss = out.loss_sum / max(out.count, 1)
    loss.backward()
    return float(loss.detach()), cast(Tensor, leaf.grad)


def _mean(out: ObjectiveOutput, name: str) -> float:
    value, count = out.metrics.get(name, (math.nan, 1))
    return value / count if count else math.nan


def _surrogate(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Log-probs, advantages and bounds: the objective, its gradient and its clip fractions."""
    batch = _given_batch(case.input, dtype)
    bounds = (case.input["eps_low"], case.input["eps_high"])
    checks: list[Check] = []
    for name, objective in (("gspo", tested.gspo(*bounds)), ("gspo_token", tested.gspo_token(*bounds))):
        loss, gradient = _loss_and_gradient(objective, batch)
        single = [
            objective(b.logprobs, b.old, b.advantages, b.mask)
            for b in (batch.rows([n]) for n in range(len(batch.mask)))
        ]
        whole = objective(batch.logprobs, batch.old, batch.advantages, batch.mask)
        answers = {
            "s": [_mean(out, "ratio/mean") for out in single],
            "objective": [-float(out.loss_sum) / max(out.count, 1) for out in single],
            "loss": loss,
            "dloss_dnew_per_token": batch.token_values(gradient),
            "padding_gradient": [*gradient[~batch.mask].tolist(), 0.0],
            "clip_fraction_low": _mean(whole, "clip_fraction/sequence_low"),
            "clip_fraction_high": _mean(whole, "clip_fraction/sequence_high"),
            "clip_fraction_total": _mean(whole, "clip_fraction/sequence"),
        }
        checks += compare(case, dtype, {f"{label}:{name}": got for label, got in answers.items()})
    return checks


def _fills(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """The same batch with things in its padded slots: nothing may change, not by one bit."""
    batch = _given_batch(case.input, dtype)
    bounds = (case.input["eps_low"], case.input["eps_high"])
    checks: list[Check] = []
    losses: dict[str, Loss] = {
        "gspo": tested.gspo(*bounds),
        "gspo_token": tested.gspo_token(*bounds),
        "kl": tested.kl_objective("k3"),
    }
    for loss_name, objective in losses.items():
        clean_loss, clean_gradient = _loss_and_gradient(objective, batch)
        for value in case.input["fill"]:
            for where, dirty, advantages in _dirty_batches(batch, float(value)):
                loss, gradient = _loss_and_gradient(objective, dirty, advantages)
                outside, inside = gradient[~batch.mask], gradient[batch.mask]
                label = f"{loss_name}, {value} in {where}"
                same = [
                    ("gradient_at_masked_slots", not outside.any(), outside.tolist(), "exactly 0"),
                    (
                        "gradient_elsewhere",
                        torch.equal(inside, clean_gradient[batch.mask]),
                        inside.tolist(),
                        "unchanged",
                    ),
                    ("any_nan", not math.isnan(loss) and not gradient.isnan().any(), loss, "no nan"),
                    ("unchanged", loss == clean_loss, loss, clean_loss),
                ]
                checks += [Check(f"{name}/{label}", bool(ok), got, due, dtype) for name, ok, got, due in same]
                if loss_name != "kl":
                    checks += compare(case, dtype, {f"loss:{label}": loss})
    return checks


def _dirty_batches(batch: _Batch, value: float) -> list[tuple[str, _Batch, Tensor]]:
    new, old = (x.masked_fill(~batch.mask, value) for x in (batch.logprobs, batch.old))
    wide = batch.advantages[:, None].expand(batch.mask.shape)
    return [
        ("new_logprobs", _Batch(new, batch.old, batch.advantages, batch.mask), batch.advantages),
        ("old_logprobs", _Batch(batch.logprobs, old, batch.advantages, batch.mask), batch.advantages),
        ("advantages", batch, wide.masked_fill(~batch.mask, value)),
    ]


def _cuts(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Token mean of one batch that is cut into micro-batches and ranks: sums over one global denominator."""
    batch = _on_policy_batch(case.input, dtype)
    objective = tested.token_mean()
    checks: list[Check] = []
    for text in case.input["cuts_to_try"]:
        parts = _parse_cut(text, len(batch.mask))
        if parts is None:
            checks.append(unchecked(f"cut {text!r}"))
            continue
        leaf = batch.logprobs.clone().requires_grad_()
        cut = [(b.old, b.advantages, b.mask, leaf[rows]) for rows, b in ((rows, batch.rows(rows)) for rows in parts)]
        outs = [objective(new, old, advantages, mask) for old, advantages, mask, new in cut]
        count = sum(out.count for out in outs)
        for out in outs:
            (out.loss_sum / count).backward()
        loss = sum(float(out.loss_sum.detach()) for out in outs) / count
        gradient = batch.token_values(cast(Tensor, leaf.grad))
        checks += compare(case, dtype, {f"loss:{text}": loss, f"dloss_dlogprob_per_token:{text}": gradient})
    return checks


def _parse_cut(text: str, num_rows: int) -> list[list[int]] | None:
    """``[0,1],[2,3]``, ``2 ranks: {0,1},{2,3}``, ``one batch of 4`` or ``2 ranks x 2 micro-batches`` (consecutive)."""
    groups = [[int(n) for n in found.split(",")] for found in re.findall(r"[\[{]([\d,\s]+)[\]}]", text)]
    if not groups:
        if re.match(r"one batch", text):
            groups = [list(range(num_rows))]
        elif sizes := re.findall(r"(\d+) (?:ranks?|micro-batch(?:es)?)\b", text):
            number = math.prod(map(int, sizes))
            groups = [chunk.tolist() for chunk in torch.arange(num_rows).tensor_split(number) if len(chunk)]
    return groups if sorted(n for group in groups for n in group) == list(range(num_rows)) else None


def _exclusions(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Rows left out of the loss, above and below the line."""
    excluded = case.input["excluded"]
    checks: list[Check] = []
    for name, objective in (("token_mean", tested.token_mean()), ("sequence_mean", tested.sequence_mean())):
        loss, gradient = _loss_and_gradient(objective, _on_policy_batch(case.input, dtype, excluded))
        lengths = case.input["lengths"]
        per_token = [row[:length].tolist() for row, length in zip(gradient, lengths, strict=True)]
        checks += compare(case, dtype, {name: loss, f"grad_per_token_{name}": per_token})
        if "everything_excluded" in case.expected:
            loss, gradient = _loss_and_gradient(objective, _on_policy_batch(case.input, dtype, [True] * len(excluded)))
            right = loss == 0 and not gradient.any() and not gradient.isnan().any()
            got = [loss, *gradient.flatten().tolist()]
            checks.append(Check(f"everything_excluded/{name}", right, got, "loss 0, gradient exactly 0", dtype))
    if isinstance(case.expected.get("metrics"), str):
        checks += _metrics_of_excluded(case, case.expected["metrics"], tested, dtype)
    return checks


def _metrics_of_excluded(case: Case, text: str, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """``mean length 3.0 over all rows; truncated fraction 0.333333; both unaffected by the exclusion``.

    The excluded rows are those that were truncated.
    """
    lengths, excluded = case.input["lengths"], case.input["excluded"]
    got = tested.response_metrics(lengths, excluded, excluded)
    sentence, checks = Sentence(text), []
    for words, name in ((r"mean length ([\d.]+)(?: over all rows)?", "length/mean"),
                        (r"truncated fraction ([\d.]+)", "truncated_fraction")):  # fmt: skip
        if found := sentence.take(words):
            wanted = found[1].rstrip(".")
            right = same_answer(got[name], float(wanted), max(case.tolerance_in(dtype), rounding(wanted)))
            checks.append(Check(f"metrics/{name}", right, got[name], float(wanted), dtype))
    if sentence.take("(both )?unaffected by the exclusion"):
        kept = tested.response_metrics(lengths, excluded, [False] * len(lengths))
        for name in ("length/mean", "truncated_fraction"):
            checks.append(
                Check(f"metrics/{name}, nothing excluded", kept[name] == got[name], got[name], kept[name], dtype)
            )
    return [*checks, *(unchecked(f"metrics/{part}") for part in sentence.left())]


def _kl(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """k1, k2, k3 against a reference; overflow; masked tokens."""
    given = _kl_batch(case.input, dtype)
    answers: dict[str, Any] = {}
    for estimator in ("k1", "k2", "k3"):
        per_token = tested.kl_per_token(estimator, given.logprobs, given.old)
        loss, gradient = _loss_and_gradient(tested.kl_objective(estimator), given)
        answers[f"{estimator}_per_token"] = given.token_values(per_token)[0]
        answers[f"{estimator}_mean"] = loss
        answers[f"d{estimator}_dpolicy"] = given.token_values(gradient)[0]
    checks = compare(case, dtype, answers)
    if isinstance(case.input.get("overflow"), dict):
        checks += [_kl_overflow(case.input["overflow"], estimator, tested, dtype) for estimator in ("k2", "k3")]
    if isinstance(case.input.get("masked"), dict):
        dirty = _kl_batch(case.input["masked"], dtype)
        for estimator in ("k1", "k2", "k3"):
            objective = tested.kl_objective(estimator)
            want, got = (_loss_and_gradient(objective, batch) for batch in (given, dirty))
            right = want[0] == got[0] and torch.equal(want[1][given.mask], got[1][dirty.mask])
            right = right and not got[1][~dirty.mask].any()
            shown, due = ([loss, *gradient.flatten().tolist()] for loss, gradient in (got, want))
            checks.append(Check(f"masked/{estimator}", right, shown, due, dtype))
    return checks


def _kl_batch(given: Mapping[str, Any], dtype: torch.dtype) -> _Batch:
    policy = torch.tensor([given["policy"]], dtype=dtype)
    mask = torch.tensor([given.get("mask") or [1] * policy.shape[1]]).bool()
    return _Batch(policy, torch.tensor([given["reference"]], dtype=dtype), torch.zeros(1, dtype=dtype), mask)


def _kl_overflow(given: Mapping[str, Any], estimator: str, tested: Implementation, dtype: torch.dtype) -> Check:
    label, due = f"overflow/{estimator}", "finite loss and gradient, or refused with the row named"
    try:
        loss, gradient = _loss_and_gradient(tested.kl_objective(estimator), _kl_batch(given, dtype))
    except NumericalError as error:
        return Check(label, "row 0" in str(error), str(error), due, dtype)
    right = math.isfinite(loss) and bool(torch.isfinite(gradient).all())
    return Check(label, right, [loss, *gradient.flatten().tolist()], due, dtype)


def _temperature(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Log-prob and entropy of the distribution that was sampled from."""
    logits = torch.tensor(case.input["logits"], dtype=dtype)
    token = torch.tensor(case.input["token"])
    checks = []
    ratios = []
    for temperature in case.input["temperatures"]:
        logp, entropy = tested.selected_logprobs(logits, token, temperature)
        sampled = torch.log_softmax(logits / temperature, dim=-1)[token]
        ratios.append(float((logp - sampled).exp()))
        names = (f"T={temperature}", f"T={temperature:g}", f"T={float(temperature)}")
        wanted: Mapping[str, float] = next((case.expected[name] for name in names if name in case.expected), {})
        for name, got in (("logp", float(logp)), ("entropy", float(entropy))):
            if name in wanted:
                right = same_answer(got, wanted[name], case.tolerance_in(dtype))
                checks.append(Check(f"T={temperature}/{name}", right, got, wanted[name], dtype))
    checks += compare(case, dtype, {f"ratio_at_equal_weights:{n}": ratio for n, ratio in enumerate(ratios)})
    if "T=0" in case.expected:
        checks.append(refusal("T=0", lambda: float(tested.selected_logprobs(logits, token, 0.0)[0]), dtype))
    return checks


#: Tried in order: a shape with more keys before one with fewer of them.
LOSS_SHAPES: tuple[Shape, ...] = (
    Shape(frozenset({"fill", "eps_low", "eps_high", "advantages", "old_logprobs", "new_logprobs"}), _fills),
    Shape(frozenset({"eps_low", "eps_high", "advantages", "old_logprobs", "new_logprobs"}), _surrogate),
    Shape(frozenset({"lengths", "advantages", "cuts_to_try"}), _cuts),
    Shape(frozenset({"lengths", "advantages", "excluded"}), _exclusions),
    Shape(frozenset({"policy", "reference"}), _kl),
    Shape(frozenset({"logits", "token", "temperatures"}), _temperature),
)
