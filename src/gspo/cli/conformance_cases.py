"""The shapes of case that ``gspo conformance`` understands: each a function from an input to checked answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gspo.advantages import Scale, constant_groups, group_advantages
from gspo.errors import GspoError, InputError, NumericalError
from gspo.objectives.base import Objective
from gspo.objectives.grpo import GRPO
from gspo.objectives.gspo import GSPO, GSPOToken
from gspo.objectives.kl import Estimator, KLPenalty, k1, k2, k3
from gspo.objectives.ratios import selected_logprobs
from gspo.types import Completion, ObjectiveOutput, StopReason


def _kl_objective(estimator: str) -> Objective:
    return KLPenalty(1.0, cast(Estimator, estimator), "token")


def _kl_per_token(estimator: str, policy: Tensor, reference: Tensor) -> Tensor:
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](policy, reference)


def _group_advantages(rewards: Tensor | Sequence[float | None], ids: Sequence[Any], scale: str) -> Tensor:
    return group_advantages(rewards, ids, scale=cast(Scale, scale))


def _pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    from gspo.evals.passk import pass_at_k

    return pass_at_k(num_samples, num_correct, k)


@dataclass(frozen=True)
class Implementation:
    """What is tested; by default this package. A test puts a faulty part in its place."""

    gspo: Callable[[float, float], Objective] = GSPO
    gspo_token: Callable[[float, float], Objective] = GSPOToken
    sequence_mean: Callable[[], Objective] = GSPO
    token_mean: Callable[[], Objective] = lambda: GRPO(unit="token")
    kl_objective: Callable[[str], Objective] = _kl_objective
    kl_per_token: Callable[[str, Tensor, Tensor], Tensor] = _kl_per_token
    group_advantages: Callable[..., Tensor] = _group_advantages
    constant_groups: Callable[..., int] = constant_groups
    selected_logprobs: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = selected_logprobs
    pass_at_k: Callable[[int, int, int], float] = _pass_at_k


@dataclass(frozen=True)
class Case:
    """One worked case; ``input`` is complete, ``faults`` is flat."""

    id: str
    title: str
    input: Mapping[str, Any]
    expected: Mapping[str, Any]
    faults: Mapping[str, Any]
    tolerance: str

    def tolerance_in(self, dtype: torch.dtype) -> float:
        """Absolute. ``1e-6 absolute in float32, 1e-9 in float64`` unless the case says otherwise."""
        precision = "float32" if dtype == torch.float32 else "float64"
        stated = re.search(rf"(\d[\d.e+-]*)[^,;\d]*in {precision}", self.tolerance)
        number = stated or re.match(r"\s*(\d[\d.e+-]*)", self.tolerance)
        default = 1e-6 if dtype == torch.float32 else 1e-9
        # Expected numbers are written with nine decimals.
        return (float(number[1]) if number else default) + 6e-10


@dataclass(frozen=True)
class Check:
    """One answer against one expectation; ``right is None``: could not be read, not run."""

    field: str
    right: bool | None
    got: Any
    expected: Any
    dtype: torch.dtype = field(default=torch.float64)


Handler = Callable[[Case, Implementation, torch.dtype], list[Check]]


@dataclass(frozen=True)
class Shape:
    """An input belongs to a shape by the keys that it has."""

    keys: frozenset[str]
    handler: Handler

    def fits(self, given: Mapping[str, Any]) -> bool:
        return self.keys <= given.keys()


def same_answer(got: Any, expected: Any, tolerance: float, exact_zero: bool = False) -> bool:
    """Whether numbers agree; one expected number stands for every entry of a list. Text is read for a number."""
    if isinstance(got, list | tuple):
        wanted = expected if isinstance(expected, list | tuple) else [expected] * len(got)
        return len(got) > 0 and len(got) == len(wanted) and all(
            same_answer(g, w, tolerance, exact_zero) for g, w in zip(got, wanted, strict=True)
        )  # fmt: skip
    if isinstance(got, str) or isinstance(expected, list | tuple):
        return False
    if isinstance(expected, str):
        if not math.isfinite(got):
            return ("nan" if math.isnan(got) else "inf") in re.split(r"[^a-z]+", expected.lower())
        number = re.match(r"\s*(-?\d+(\.\d+)?(e[+-]?\d+)?)\b", expected)
        return number is not None and abs(got - float(number[1])) <= tolerance
    if exact_zero and expected == 0:
        return got == 0
    return math.isfinite(got) and abs(got - expected) <= tolerance


def _compare(
    case: Case, dtype: torch.dtype, answers: Mapping[str, Any], exact: str = "grad|dloss|padding"
) -> list[Check]:
    """Checks the answers whose name (up to a colon) is expected; names that match ``exact`` must be 0 where 0 is due."""
    checks = []
    for label, got in answers.items():
        name = label.split(":")[0]
        if name in case.expected:
            wanted = case.expected[name]
            right = same_answer(got, wanted, case.tolerance_in(dtype), re.search(exact, name) is not None)
            checks.append(Check(label.replace(":", "/", 1), right, got, wanted, dtype))
    return checks


# --- objectives ---------------------------------------------------------------------------------------------------


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
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=dtype)


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


def _loss_and_gradient(objective: Objective, batch: _Batch, advantages: Tensor | None = None) -> tuple[float, Tensor]:
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
        checks += _compare(case, dtype, {f"{label}:{name}": got for label, got in answers.items()})
    return checks


def _fills(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """The same batch with things in its padded slots: nothing may change, not by one bit."""
    batch = _given_batch(case.input, dtype)
    bounds = (case.input["eps_low"], case.input["eps_high"])
    checks: list[Check] = []
    for objective in (tested.gspo(*bounds), tested.gspo_token(*bounds), tested.kl_objective("k3")):
        clean_loss, clean_gradient = _loss_and_gradient(objective, batch)
        for value in case.input["fill"]:
            for where, dirty, advantages in _dirty_batches(batch, float(value)):
                loss, gradient = _loss_and_gradient(objective, dirty, advantages)
                outside, inside = gradient[~batch.mask], gradient[batch.mask]
                label = f"{objective.name}, {value} in {where}"
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
                if not objective.name.startswith("kl"):
                    checks += _compare(case, dtype, {f"loss:{label}": loss})
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
            checks.append(Check(f"cut {text!r}", None, None, None, dtype))
            continue
        leaf = batch.logprobs.clone().requires_grad_()
        cut = [(b.old, b.advantages, b.mask, leaf[rows]) for rows, b in ((rows, batch.rows(rows)) for rows in parts)]
        outs = [objective(new, old, advantages, mask) for old, advantages, mask, new in cut]
        count = sum(out.count for out in outs)
        for out in outs:
            (out.loss_sum / count).backward()
        loss = sum(float(out.loss_sum.detach()) for out in outs) / count
        gradient = batch.token_values(cast(Tensor, leaf.grad))
        checks += _compare(case, dtype, {f"loss:{text}": loss, f"dloss_dlogprob_per_token:{text}": gradient})
    return checks


def _parse_cut(text: str, num_rows: int) -> list[list[int]] | None:
    """``[0,1],[2,3]``, ``2 ranks: {0,1},{2,3}``, ``one batch of 4`` or ``2 ranks x 2 micro-batches`` (consecutive)."""
    groups = [[int(n) for n in found.split(",")] for found in re.findall(r"[\[{]([\d,\s]+)[\]}]", text)]
    if not groups:
        if re.match(r"one batch", text):
            groups = [list(range(num_rows))]
        elif sizes := re.match(r"(\d+) ranks?(?: x (\d+) micro-batch(?:es)?)?$", text):
            number = int(sizes[1]) * int(sizes[2] or 1)
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
        checks += _compare(case, dtype, {name: loss, f"grad_per_token_{name}": per_token})
        if "everything_excluded" in case.expected:
            loss, gradient = _loss_and_gradient(objective, _on_policy_batch(case.input, dtype, [True] * len(excluded)))
            right = loss == 0 and not gradient.any() and not gradient.isnan().any()
            got = [loss, *gradient.flatten().tolist()]
            checks.append(Check(f"everything_excluded/{name}", right, got, "loss 0, gradient exactly 0", dtype))
    return checks


# --- advantages ---------------------------------------------------------------------------------------------------

#: Named variants of expected advantages that this package has.
_SCALES = {"centered": "none", "ddof1": "group_std", "leave_one_out": "leave_one_out"}


def _reward_groups(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Named groups of rewards, each one group; or lists of constant groups written ``8 x 0.95``."""
    checks: list[Check] = []
    for name, rewards in case.input.items():
        wanted_name = next((e for e in case.expected if name == e or name.startswith(f"{e}_")), name)
        if any(isinstance(r, str) and re.match(r"\d+ x ", r) for r in rewards):
            checks += _constant(wanted_name, rewards, tested, dtype)
        elif any(isinstance(r, str) or (r is not None and math.isinf(r)) for r in rewards):
            checks.append(_infinite(wanted_name, [None if r is None else float(r) for r in rewards], tested, dtype))
        elif wanted_name in case.expected:
            wanted = case.expected[wanted_name]
            variants = wanted if isinstance(wanted, dict) else dict.fromkeys(_SCALES, wanted)
            for variant, values in variants.items():
                checks.append(_variant(case, f"{wanted_name}/{variant}", variant, rewards, values, tested, dtype))
    return checks


def _variant(
    case: Case,
    label: str,
    variant: str,
    rewards: list[float | None],
    values: Any,
    tested: Implementation,
    dtype: torch.dtype,
) -> Check:
    if variant not in _SCALES:
        return Check(label, None, None, None, dtype)
    got = tested.group_advantages(_rewards(rewards, dtype), [0] * len(rewards), _SCALES[variant]).tolist()
    if isinstance(values, list) and len(values) != len(rewards):  # one value for each distinct reward
        got = [got[rewards.index(r)] for r in dict.fromkeys(rewards)]
    return Check(label, same_answer(got, values, case.tolerance_in(dtype), exact_zero=True), got, values, dtype)


def _rewards(rewards: Sequence[float | None], dtype: torch.dtype) -> Tensor | list[float | None]:
    """A tensor of the dtype; in float32 with None kept, as reward functions return it."""
    if dtype == torch.float32 and None in rewards:
        return list(rewards)
    return torch.tensor([math.nan if r is None else r for r in rewards], dtype=dtype)


def _repeated(text: str) -> tuple[str, int]:
    """``8 x 0.95`` or ``p0 x8``: the value and how often."""
    if found := re.fullmatch(r"\s*(\d+) x (\S+)\s*", text):
        return found[2], int(found[1])
    if found := re.fullmatch(r"\s*(\S+) x\s?(\d+)\s*", text):
        return found[1], int(found[2])
    return text.strip(), 1


def _constant(label: str, groups: Sequence[str], tested: Implementation, dtype: torch.dtype) -> list[Check]:
    repeated = [_repeated(text) for text in groups]
    rewards = torch.tensor([float(value) for value, number in repeated for _ in range(number)], dtype=dtype)
    ids = [name for name, (_, number) in enumerate(repeated) for _ in range(number)]
    zeros = [0.0] * len(ids)
    checks = []
    for scale in ("group_std", "none", "batch_std", "leave_one_out"):
        got = tested.group_advantages(rewards, ids, scale).tolist()
        checks.append(Check(f"{label}/{scale}", got == zeros, got, "exactly 0", dtype))
    count = tested.constant_groups(rewards, ids)
    return [*checks, Check(f"{label}/constant groups", count == len(groups), count, len(groups), dtype)]


def _infinite(label: str, rewards: list[float | None], tested: Implementation, dtype: torch.dtype) -> Check:
    """Refused with the row named, or taken as unscored."""
    row = next(n for n, r in enumerate(rewards) if r is not None and math.isinf(r))
    due = f"refused with row {row} named, or finite advantages with 0 there"
    try:
        got = tested.group_advantages(_rewards(rewards, dtype), [0] * len(rewards), "group_std").tolist()
    except InputError as error:
        return Check(label, re.search(rf"\brow {row}\b", str(error)) is not None, str(error), due, dtype)
    return Check(label, all(map(math.isfinite, got)) and got[row] == 0, got, due, dtype)


def _group_ids(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Rows that name their group: any sizes, any order."""
    checks = _one_group_case(case, "first", case.input, tested, dtype)
    for name, given in case.input.items():
        if isinstance(given, dict) and {"ids", "rewards"} <= given.keys():
            checks += _one_group_case(case, name, given, tested, dtype)
    return checks


def _one_group_case(
    case: Case, name: str, given: Mapping[str, Any], tested: Implementation, dtype: torch.dtype
) -> list[Check]:
    ids, rewards = _expanded(given["ids"]), [_number(r) for r in _expanded(given["rewards"])]
    got = tested.group_advantages(_rewards(rewards, dtype), ids, "group_std")
    checks = []
    wanted = case.expected.get(name)
    if isinstance(wanted, list):
        right = same_answer(got.tolist(), wanted, case.tolerance_in(dtype), exact_zero=True)
        checks.append(Check(name, right, got.tolist(), wanted, dtype))
    elif isinstance(wanted, str) and "exactly 0" in wanted:
        checks.append(Check(name, not got.any() and not got.isnan().any(), got.tolist(), wanted, dtype))
    if "shuffled" in case.expected:
        for seed in range(4):
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
            shuffled = [rewards[n] for n in order]
            moved = tested.group_advantages(_rewards(shuffled, dtype), [ids[n] for n in order], "group_std")
            right = same_answer(moved.tolist(), got[order].tolist(), case.tolerance_in(dtype))
            checks.append(Check(f"shuffled/{name}", right, moved.tolist(), got[order].tolist(), dtype))
    return checks


def _expanded(values: Any) -> list[Any]:
    """A list as it is; ``"p0 x8, p1 x8"`` written out."""
    if isinstance(values, str):
        pairs = [_repeated(part) for part in values.split(",")]
        return [value for value, number in pairs for _ in range(number)]
    return list(values)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


# --- KL, temperature, pass@k, masks -------------------------------------------------------------------------------


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
    checks = _compare(case, dtype, answers)
    if isinstance(case.input.get("overflow"), dict):
        checks += [_kl_overflow(case.input["overflow"], estimator, tested, dtype) for estimator in ("k2", "k3")]
    if isinstance(case.input.get("masked"), dict):
        dirty = _kl_batch(case.input["masked"], dtype)
        for estimator in ("k1", "k2", "k3"):
            objective = tested.kl_objective(estimator)
            want, got = (_loss_and_gradient(objective, batch) for batch in (given, dirty))
            right = want[0] == got[0] and torch.equal(want[1][given.mask], got[1][dirty.mask])
            right = right and not got[1][~dirty.mask].any()
            shown = [[loss, *gradient.flatten().tolist()] for loss, gradient in (got, want)]
            checks.append(Check(f"masked/{estimator}", right, *shown, dtype))
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
        wanted = next(
            (case.expected[f"T={t}"] for t in (temperature, f"{temperature:g}") if f"T={t}" in case.expected), {}
        )
        for name, got in (("logp", float(logp)), ("entropy", float(entropy))):
            if name in wanted:
                right = same_answer(got, wanted[name], case.tolerance_in(dtype))
                checks.append(Check(f"T={temperature}/{name}", right, got, wanted[name], dtype))
    checks += _compare(case, dtype, {f"ratio_at_equal_weights:{n}": ratio for n, ratio in enumerate(ratios)})
    if "T=0" in case.expected:
        checks.append(_refusal("T=0", lambda: float(tested.selected_logprobs(logits, token, 0.0)[0]), dtype))
    return checks


def _refusal(label: str, call: Callable[[], float], dtype: torch.dtype) -> Check:
    try:
        got: Any = call()
    except InputError as error:
        return Check(label, True, str(error), "refused", dtype)
    return Check(label, False, got, "refused", dtype)


def _pass_rates(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """(n, c, k) triples, and pass@k of a data set as the mean over its problems."""
    checks = []
    for triple, wanted in zip(case.input["n_c_k"], case.expected.get("values", []), strict=False):
        label = "values/" + ",".join(map(str, triple))
        if isinstance(wanted, str):
            n, c, k = triple
            checks.append(_refusal(label, lambda n=n, c=c, k=k: tested.pass_at_k(n, c, k), dtype))  # type: ignore[misc]
        else:
            got = tested.pass_at_k(*triple)
            checks.append(Check(label, same_answer(got, wanted, case.tolerance_in(dtype)), got, wanted, dtype))
    for name, wanted in (case.expected.get("dataset") or {}).items():
        counts = case.input["dataset"]
        got = sum(tested.pass_at_k(n, c, int(name.split("@")[1])) for n, c in counts) / len(counts)
        right = same_answer(got, wanted, case.tolerance_in(dtype))
        checks.append(Check(f"dataset/{name}", right, got, wanted, dtype))
    return checks


def _engine_rows(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Masks, lengths and truncation from what the engine says that it did."""
    rows = case.input["rows"]
    completions = [_completion(row) for row in rows]
    width = max(len(row["ids"]) for row in rows)
    lengths = [len(completion.token_ids) for completion in completions]
    truncated = [completion.stop_reason.truncated for completion in completions]
    mask = _length_mask(lengths, width)
    checks = _compare(case, dtype, {"masks": mask.int().tolist(), "lengths": lengths, "truncated": truncated})
    for name, got in (("truncated_fraction", sum(truncated) / len(rows)), ("mean_length", sum(lengths) / len(rows))):
        if fraction := re.match(r"(\d+)/(\d+)", str(case.expected.get(name, ""))):
            wanted = int(fraction[1]) / int(fraction[2])
            checks.append(Check(name, same_answer(got, wanted, case.tolerance_in(dtype)), got, wanted, dtype))
    if "empty_row" in case.expected:
        checks += [_empty_rows(objective, mask, dtype) for objective in (tested.sequence_mean(), tested.token_mean())]
    return checks


def _completion(row: Mapping[str, Any]) -> Completion:
    ids = torch.tensor(row["ids"][: row["n"]], dtype=torch.int64)
    reason = str(row["reason"])
    stop = next((r for r in StopReason if reason.replace(" ", "_").startswith(r.value)), None)
    if stop is None:
        raise ValueError(f"stop reason {reason!r} is none of {', '.join(StopReason)}")
    return Completion(ids, torch.full((len(ids),), -1.0), stop, 0)


def _empty_rows(objective: Objective, mask: Tensor, dtype: torch.dtype) -> Check:
    """The loss with rows without tokens is that without them."""
    logprobs = torch.full(mask.shape, -1.0, dtype=dtype)
    batch = _Batch(logprobs, logprobs, torch.linspace(-1, 1, len(mask), dtype=dtype), mask)
    kept = torch.nonzero(mask.any(dim=-1)).squeeze(-1).tolist()
    got, want = _loss_and_gradient(objective, batch)[0], _loss_and_gradient(objective, batch.rows(kept))[0]
    return Check(f"empty_row/{objective.unit}", same_answer(got, want, 1e-6), got, want, dtype)


class _NamedRewardGroups(Shape):
    """Every value is a flat list of rewards, None or text, under a free name."""

    def fits(self, given: Mapping[str, Any]) -> bool:
        return bool(given) and all(
            isinstance(rewards, list)
            and rewards
            and all(r is None or isinstance(r, int | float) or _is_reward_text(r) for r in rewards)
            for rewards in given.values()
        )


def _is_reward_text(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(\d+ x )?[+-]?(inf|nan|\d[\d.e+-]*)", value) is not None


#: The more keys, the earlier: the first shape that fits is taken.
SHAPES: tuple[Shape, ...] = (
    Shape(frozenset({"fill", "eps_low", "eps_high", "advantages", "old_logprobs", "new_logprobs"}), _fills),
    Shape(frozenset({"eps_low", "eps_high", "advantages", "old_logprobs", "new_logprobs"}), _surrogate),
    Shape(frozenset({"lengths", "advantages", "cuts_to_try"}), _cuts),
    Shape(frozenset({"lengths", "advantages", "excluded"}), _exclusions),
    Shape(frozenset({"ids", "rewards"}), _group_ids),
    Shape(frozenset({"policy", "reference"}), _kl),
    Shape(frozenset({"logits", "token", "temperatures"}), _temperature),
    Shape(frozenset({"n_c_k"}), _pass_rates),
    Shape(frozenset({"rows"}), _engine_rows),
    _NamedRewardGroups(frozenset(), _reward_groups),
)
