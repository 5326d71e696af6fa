"""The batch arithmetic: sentences about what P prompts x G responses on W ranks in micro-batches of m come to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.cli.conformance.implementation import Implementation
from gspo.cli.conformance.model import Check, Sentence, unchecked
from gspo.config import BatchPlan
from gspo.errors import InputError

_ORDINALS = {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5}


@dataclass(frozen=True)
class _Sizes:
    prompts: int
    group_size: int
    ranks: int
    micro: int | None
    updates: int
    dataset: int | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Sizes:
        return cls(given["P"], given["G"], given.get("W", 1), given.get("m"), given.get("M", 1), given.get("dataset"))


def _plan(sizes: _Sizes, tested: Implementation, **other: int) -> BatchPlan | str:
    """The plan, or why there is none."""
    try:
        return tested.plan_batch(
            sizes.prompts,
            other.get("G", sizes.group_size),
            num_mini_batches=sizes.updates,
            world_size=other.get("W", sizes.ranks),
            micro_batch_size=other.get("m", sizes.micro),
            num_prompts=sizes.dataset,
        )
    except InputError as error:
        return str(error)


def plan_checks(label: str, given: Mapping[str, Any], text: str, tested: Implementation) -> list[Check]:
    """One case of the arithmetic against its sentence."""
    sizes = _Sizes.of(given)
    label = f"{label} ({', '.join(f'{key} {value}' for key, value in given.items())})"
    plan = _plan(sizes, tested)
    choice = re.fullmatch(r"\s*(?:either (.*?),? or an )?error that names working values\s*(?:\((.*)\))?\s*", text)
    if isinstance(plan, str):
        if choice:
            return _working_values(label, plan, choice[2] or "", sizes, tested)
        if error := re.match(r"\s*error:?\s*", text):
            return _refused(label, plan, text[error.end() :])
        return [Check(label, False, plan, text)]
    if re.match(r"\s*error\b", text):
        return [Check(label, False, "; ".join(plan.notes) or "accepted", text)]
    sentence = Sentence(choice[1] if choice else text)
    checks = [
        *_micro_batches(label, sentence, plan, sizes),
        *_epoch(label, sentence, plan),
        *_crossing(label, sentence, plan, sizes),
        *_other_cut(label, sentence, plan, sizes, tested),
    ]
    return [*checks, *(unchecked(f"{label}: {part}") for part in sentence.left())]


def _refused(label: str, message: str, text: str) -> list[Check]:
    """``a group needs at least 2 completions (not 'must be divisible')``: the words, and words that must not be."""
    sentence = Sentence(text)
    checks = []
    while found := sentence.take(r"\(?not '([^']+)'\)?"):
        absent = found[1].lower() not in message.lower()
        checks.append(Check(f"{label} refusal", absent, message, f"not {found[1]!r}"))
    for words in sentence.left():
        pattern = re.escape(words)
        if re.search(pattern, message, re.IGNORECASE):
            checks.append(Check(label, True, message, words))
        elif re.search(re.sub(r"\d+", r"\\d+", pattern), message, re.IGNORECASE):
            checks.append(Check(label, False, message, words))  # the words with other numbers
        else:
            checks.append(unchecked(f"{label}: refused with other words than {words!r}: {message}"))
    return checks


def _working_values(label: str, message: str, values: str, sizes: _Sizes, tested: Implementation) -> list[Check]:
    """The error's advice names values of the case (``W 1, 2, 4, 8; G 6, 9``), and whatever it names does work."""
    advice = re.split(r"\b(?:works?|working|instead|take|use|try)\b", message)[-1]
    named = [int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.]\d)", advice)]
    listed = {
        letter: [int(number) for number in numbers.split(",")]
        for letter, numbers in re.findall(r"\b([WGm]) (\d+(?:, ?\d+)*)", values)
    }
    letters = list(listed) or ["W", "G"]

    def works(letter: str, number: int) -> bool:
        return not isinstance(_plan(sizes, tested, **{letter: number}), str)

    useless = [number for number in named if not any(works(letter, number) for letter in letters)]
    checks = [Check(f"{label} advice", bool(named) and not useless, message, "names values, and all of them work")]
    for letter, numbers in listed.items():
        told = [number for number in numbers if number in named]
        refused = [number for number in numbers if not works(letter, number)]
        due = f"names {letter} of {', '.join(map(str, numbers))}, which all work"
        checks.append(Check(f"{label} {letter}", bool(told) and not refused, message, due))
    return checks


def _micro_batches(label: str, sentence: Sentence, plan: BatchPlan, sizes: _Sizes) -> list[Check]:
    found = sentence.take(r"(\d+) micro-batch(?:es)?(?: of (\d+))?")
    if not found:
        return []
    checks = [
        Check(f"{label} micro-batches", plan.num_micro_batches == int(found[1]), plan.num_micro_batches, int(found[1]))
    ]
    if found[2]:
        size = min(plan.sequences_per_update[0] // sizes.ranks, sizes.micro or plan.num_sequences)
        checks.append(Check(f"{label} size", size == int(found[2]), size, int(found[2])))
    if sentence.take("(?:said|says|told) so|said so"):
        words = rf"\b{found[1]} micro-batch(es)?" + (rf" of {found[2]}\b" if found[2] else "")
        checks.append(_noted(label, plan, words, found[0]))
    return checks


def _epoch(label: str, sentence: Sentence, plan: BatchPlan) -> list[Check]:
    checks = []
    if found := sentence.take(r"(\d+) steps? per epoch"):
        steps = int(found[1])
        checks.append(Check(f"{label} steps per epoch", plan.steps_per_epoch == steps, plan.steps_per_epoch, steps))
    told = r"(?:the start-up summary says that )?(\d+|no) prompts? (?:is|are) left over(?: (\([a-z ]+\)))?"
    if found := sentence.take(told):
        left = 0 if found[1].lower() == "no" else int(found[1])
        checks.append(Check(f"{label} left over", plan.leftover_prompts == left, plan.leftover_prompts, left))
        if left:
            checks.append(_noted(label, plan, rf"\b{left} prompts? (is|are) left over", "left over"))
        if found[2] == "(carried or dropped)":
            checks.append(_noted(label, plan, "carried|dropped", "carried or dropped"))
        elif found[2]:
            checks.append(unchecked(f"{label}: {found[2].strip('()')}"))
    return checks


def _noted(label: str, plan: BatchPlan, pattern: str, words: str) -> Check:
    """The start-up summary says it."""
    right = any(re.search(pattern, note) for note in plan.notes)
    return Check(f"{label} summary", right, "; ".join(plan.notes) or "nothing said", f"says {words!r}")


def _crossing(label: str, sentence: Sentence, plan: BatchPlan, sizes: _Sizes) -> list[Check]:
    """``the second holds rows of both groups``: by arithmetic, rows in order, and the summary says it."""
    found = sentence.take(r"the (\w+) holds rows of (both|several|\d+) groups")
    if not found:
        return []
    position = _ORDINALS.get(found[1].lower())
    if position is None or sizes.ranks != 1 or sizes.micro is None:
        return [unchecked(f"{label}: {found[0]}")]
    groups = _groups_inside(position, sizes.micro, plan.sequences_per_update, sizes.group_size)
    due = {"both": 2, "several": groups if groups > 1 else 2}.get(found[2].lower()) or int(found[2])
    checks = [Check(f"{label} groups in micro-batch {position}", groups == due, groups, due)]
    return [*checks, _noted(label, plan, "micro-batches hold rows of (several|more than one|both) groups", found[0])]


def _groups_inside(position: int, micro: int, updates: Sequence[int], group_size: int) -> int:
    first, end = (position - 1) * micro, min(position * micro, updates[0])
    return len({row // group_size for row in range(first, end)})


def _other_cut(label: str, sentence: Sentence, plan: BatchPlan, sizes: _Sizes, tested: Implementation) -> list[Check]:
    """``advantages as with m=12``: the cut changes neither the updates nor, says the summary, the advantages."""
    found = sentence.take(r"advantages as with m\s*=\s*(\d+)")
    if not found:
        return []
    other = _plan(sizes, tested, m=int(found[1]))
    if isinstance(other, str):
        return [Check(f"{label} with m={found[1]}", False, other, "a plan")]
    same = other.sequences_per_update == plan.sequences_per_update
    checks = [Check(f"{label} updates", same, list(plan.sequences_per_update), list(other.sequences_per_update))]
    return [*checks, _noted(label, plan, "advantages .*do not change", found[0])]
