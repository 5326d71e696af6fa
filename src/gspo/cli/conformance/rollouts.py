"""Cases about rollouts: masks and lengths from what the engine did, ids that are never re-made, BOS exactly once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gspo.cli.conformance.implementation import EngineRow, Implementation, Loss
from gspo.cli.conformance.model import (
    AnyShape,
    Case,
    Check,
    ExactShape,
    Shape,
    compare,
    same_answer,
    unchecked,
)
from gspo.errors import GspoError
from gspo.objectives.base import Objective
from gspo.types import StopReason


def _engine_rows(case: Case, tested: Implementation, dtype: torch.dtype) -> list[Check]:
    """Masks, lengths and truncation from what the engine says that it did."""
    rows = [_engine_row(row) for row in case.input["rows"]]
    made = tested.engine_rows(rows)
    checks = compare(case, dtype, {"masks": made.mask, "lengths": made.lengths, "truncated": made.truncated})
    checks = [Check(c.field, c.right, c.got, c.expected, dtype, _row_faults(case, c.field)) for c in checks]
    means = {
        "truncated_fraction": sum(made.truncated) / len(rows),
        "mean_length": sum(made.lengths) / len(rows),
    }
    for name, got in means.items():
        if fraction := re.match(r"(\d+)/(\d+)", str(case.expected.get(name, ""))):
            wanted = int(fraction[1]) / int(fraction[2])
            checks.append(Check(name, same_answer(got, wanted, case.tolerance_in(dtype)), got, wanted, dtype))
    if "empty_row" in case.expected:
        mask = torch.tensor(made.mask).bool()
        checks += [_empty_rows(objective, mask, dtype) for objective in (tested.sequence_mean(), tested.token_mean())]
    return checks


def _engine_row(row: Mapping[str, Any]) -> EngineRow:
    reason = str(row["reason"])
    stop = next((r for r in StopReason if reason.replace(" ", "_").startswith(r.value)), None)
    if stop is None:
        raise ValueError(f"stop reason {reason!r} is none of {', '.join(StopReason)}")
    return EngineRow(row["ids"], row["n"], stop)


def _row_faults(case: Case, name: str) -> dict[str, Any]:
    """Faults told as ``row 5 counted as truncated`` or ``row 6 gets length 3``, rows counted from 1, as answers."""
    pattern = {"truncated": r"row (\d+) counted as (truncated)", "lengths": r"row (\d+) gets length (\d+)"}.get(name)
    faults: dict[str, Any] = {}
    for fault, text in case.faults.items():
        if pattern is not None and isinstance(text, str) and (found := re.search(pattern, text)):
            answer = list(case.expected[name])
            if 0 < int(found[1]) <= len(answer):
                answer[int(found[1]) - 1] = True if found[2] == "truncated" else int(found[2])
                faults[fault] = answer
    return faults


def _empty_rows(objective: Objective, mask: torch.Tensor, dtype: torch.dtype) -> Check:
    """The loss with rows without tokens is that without them."""
    kept = mask.any(dim=-1)
    advantages = torch.linspace(-1, 1, len(mask), dtype=dtype)
    got = _loss(objective, mask, advantages, dtype)
    want = _loss(objective, mask[kept], advantages[kept], dtype)
    return Check(f"empty_row/{objective.unit}", same_answer(got, want, 1e-6), got, want, dtype)


def _loss(objective: Loss, mask: torch.Tensor, advantages: torch.Tensor, dtype: torch.dtype) -> float:
    logprobs = torch.full(mask.shape, -1.0, dtype=dtype)
    out = objective(logprobs, logprobs, advantages, mask)
    return float(out.loss_sum) / max(out.count, 1)


def _sampled(case: Case, tested: Implementation) -> list[Check]:
    """Ids that an engine sampled, which text would encode otherwise; log-probs of another number; BOS."""
    given, expected = case.input, case.expected
    samples = [(given["sampled_ids"], given["sampler_logprobs"])]
    if "second_sampled" in given:
        samples.append((given["second_sampled"], [-1.0] * len(given["second_sampled"])))
    toy = _ToyEncoding.read(case.rule)
    step = tested.sampled_step([1, 1, 0], samples, toy.decode if toy else lambda ids: "")
    remade = {"encoded again from text": [toy.encode(toy.decode(ids)) for ids, _ in samples]} if toy else {}
    checks = [
        Check(c.field, c.right, c.got, c.expected, None, remade if c.field == "trained_ids" else {})
        for c in compare(
            case, None, {"trained_ids": step.trained_ids, "lengths": [len(ids) for ids in step.trained_ids]}
        )
    ]
    if "re_encoded_would_be" in expected:
        checks.append(_re_encoded(case, toy, step.trained_ids))
    if "misaligned" in expected and "misaligned" in given:
        checks.append(_misaligned(given["misaligned"], tested))
    if "engine_and_trainer_prompt_ids" in expected:
        same = step.engine_prompt == step.trainer_prompt == [1, 1, 0]
        shown = [step.engine_prompt, step.trainer_prompt]
        checks.append(Check("engine_and_trainer_prompt_ids", same, shown, expected["engine_and_trainer_prompt_ids"]))
    return checks + (_bos(case, tested) if "bos" in given else [])


class _ToyEncoding:
    """``h=0 e=1 he=2, merges (h,e)`` as an encoding."""

    def __init__(self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        from tokenizers import Tokenizer, models

        self._tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges)))
        self._tokens = {number: token for token, number in vocabulary.items()}

    @classmethod
    def read(cls, text: str) -> _ToyEncoding | None:
        vocabulary = {token: int(number) for token, number in re.findall(r"(\w+)=(\d+)", text)}
        merges = re.findall(r"\((\w+),\s*(\w+)\)", text)
        known = all({left, right, left + right} <= vocabulary.keys() for left, right in merges)
        return cls(vocabulary, merges) if vocabulary and merges and known else None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._tokens.get(number, "") for number in ids)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def _re_encoded(case: Case, toy: _ToyEncoding | None, trained: Sequence[Sequence[int]]) -> Check:
    """Encoding the text again gives these ids, and they are not what is trained on."""
    wanted = case.expected["re_encoded_would_be"]
    if toy is None or toy.decode(case.input["sampled_ids"]) != case.input.get("decoded"):
        return unchecked("re_encoded_would_be")
    got = toy.encode(case.input["decoded"])
    return Check("re_encoded_would_be", got == wanted and list(trained[0]) != wanted, got, f"{wanted}, not trained on")


def _misaligned(given: Mapping[str, Any], tested: Implementation) -> Check:
    ids, logprobs = given["ids"], given["logprobs"]
    due = f"refused: {len(logprobs)} log-probs for {len(ids)} ids"
    try:
        got = tested.sampled_step([1], [(ids, logprobs)], lambda ids: "")
    except (GspoError, ValueError) as error:
        numbers = set(re.findall(r"\d+", str(error)))
        return Check("misaligned", {str(len(logprobs)), str(len(ids))} <= numbers, str(error), due)
    return Check("misaligned", False, got.trained_ids, due)


_CHAT = ({"role": "user", "content": "ab"},)
_TEMPLATE = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"


def _bos(case: Case, tested: Implementation) -> list[Check]:
    """A chat prompt through a tokenizer made here for each combination; and text that begins with BOS itself."""
    combinations = [(bool(entry["template_emits"]), bool(entry["tokenizer_adds"])) for entry in case.input["bos"]]
    made = [_tokenizer(*combination) for combination in combinations]
    prompts = [list(tested.render_prompt(tokenizer, _CHAT)) for tokenizer in made]
    counts = [ids.count(tokenizer.bos_token_id) for ids, tokenizer in zip(prompts, made, strict=True)]
    checks = compare(case, None, {"bos_count": counts})
    if "bos_rule" in case.expected:
        first = [ids[0] == tokenizer.bos_token_id for ids, tokenizer in zip(prompts, made, strict=True)]
        due = [count > 0 for count in counts]
        checks.append(Check("bos_rule/bos is the first id where there is one", first == due, first, due))
        tokenizer = _tokenizer(False, True)
        tokenizer.chat_template = None
        count = list(tested.render_prompt(tokenizer, "<bos>ab")).count(tokenizer.bos_token_id)
        checks.append(Check("bos_rule/text that begins with BOS", count == 1, count, 1))
    return checks


def _tokenizer(template_emits: bool, tokenizer_adds: bool) -> Any:
    """A character tokenizer with a chat template, of which one, both or neither writes BOS."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(("<bos>", "<eos>", "<turn>", "a", "b"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    split: Callable[..., Any] = pre_tokenizers.Split
    tokenizer.pre_tokenizer = split(Regex(r"[\s\S]"), behavior="isolated")
    if tokenizer_adds:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", additional_special_tokens=["<turn>"]
    )
    fast.chat_template = ("<bos>" if template_emits else "") + _TEMPLATE
    return fast


ROLLOUT_SHAPES: tuple[AnyShape, ...] = (
    Shape(frozenset({"rows"}), _engine_rows),
    ExactShape(frozenset({"sampled_ids", "sampler_logprobs"}), _sampled),
)
