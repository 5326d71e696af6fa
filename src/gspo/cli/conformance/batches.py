"""Cases about recipes: the batch arithmetic is solved or explained, and wrong or doubtful keys are told.

The input is a list of small cases, the expectation a list of sentences. A sentence is checked part by part; what is
not understood of it is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gspo.cli.conformance.implementation import Implementation
from gspo.cli.conformance.model import AnyShape, Case, Check, ExactShape, Sentence, unchecked
from gspo.cli.conformance.plans import plan_checks
from gspo.config.keys import FOREIGN_NAMES, recipe_keys
from gspo.errors import InputError

_PLAN_KEYS = frozenset(("P", "G", "W", "m", "M", "dataset"))
_CLIP_KEYS = {"eps_low": "objective.clip_low", "eps_high": "objective.clip_high"}
#: Where a key is put whose home nobody knows, or on purpose where it is not at home.
_SECTIONS = ("objective", "train", "rollout")


def _batch_cases(case: Case, tested: Implementation) -> list[Check]:
    answers = case.expected.get("answers")
    texts = answers if isinstance(answers, list) else []
    checks: list[Check] = []
    for number, given in enumerate(case.input["cases"], 1):
        label = f"answers/{number}"
        text = texts[number - 1] if number <= len(texts) else None
        if isinstance(given, dict) and isinstance(text, str) and (rule := _rule(given)):
            checks += rule(label, given, text, tested)
        else:
            shown = ", ".join(given) if isinstance(given, dict) else str(given)
            checks.append(unchecked(f"{label} ({shown})"))
    extra = range(len(case.input["cases"]) + 1, len(texts) + 1)
    return [*checks, *(unchecked(f"answers/{number}") for number in extra)]


Rule = Callable[[str, Mapping[str, Any], str, Implementation], list[Check]]


def _rule(given: Mapping[str, Any]) -> Rule | None:
    keys = set(given)
    if {"P", "G"} <= keys <= _PLAN_KEYS and all(type(size) is int for size in given.values()):
        return plan_checks
    if keys == {"typo"}:
        return _typo
    if "algorithm" in keys and keys & _CLIP_KEYS.keys() and keys <= {"algorithm", *_CLIP_KEYS}:
        return _bounds
    if len(keys) == 1 and "wrong section" in str(next(iter(given.values()))):
        return _wrong_section
    return None


def _attempt(tested: Implementation, settings: Mapping[str, str]) -> tuple[list[str], str | None]:
    """(warnings, why it was refused)."""
    try:
        return list(tested.check_recipe(settings)), None
    except InputError as error:
        return [], str(error)


def _homes(name: str) -> list[str]:
    """Our dotted keys for a name, its own or that of other frameworks."""
    own = [key for key in recipe_keys() if key.rpartition(".")[2] == name]
    return own or [FOREIGN_NAMES[foreign] for foreign in (name,) if foreign in FOREIGN_NAMES]


def _typo(label: str, given: Mapping[str, Any], text: str, tested: Implementation) -> list[Check]:
    """``epsilom_high=0.0004`` where ``error naming epsilon_high`` is due: by that name or by ours for it."""
    key, _, value = str(given["typo"]).partition("=")
    sentence = Sentence(text)
    found = sentence.take(r"error naming ([\w.]+)")
    if not found:
        return [unchecked(f"{label}: {text}")]
    homes = _homes(found[1].rpartition(".")[2])
    section = homes[0].rpartition(".")[0] if homes else _SECTIONS[0]
    warnings, refused = _attempt(tested, {key if "." in key else f"{section}.{key}": value})
    names = [found[1], *homes]
    right = refused is not None and any(re.search(rf"(?<![\w]){re.escape(name)}(?!\w)", refused) for name in names)
    got = refused if refused is not None else f"accepted with {len(warnings)} warnings"
    return [Check(f"{label} ({given['typo']})", right, got, text), *_left(label, sentence)]


def _bounds(label: str, given: Mapping[str, Any], text: str, tested: Implementation) -> list[Check]:
    """An algorithm with explicit bounds: accepted in silence, after a warning that names them, or refused."""
    bounds = {ours: str(given[key]) for key, ours in _CLIP_KEYS.items() if key in given}
    settings = {"objective.name": str(given["algorithm"]), "objective.clip": "explicit", **bounds}
    warnings, refused = _attempt(tested, settings)
    concerning = [warning for warning in warnings if any(key.rpartition(".")[2] in warning for key in bounds)]
    got = f"refused: {refused}" if refused is not None else "; ".join(concerning) or "accepted without a warning"
    sentence, name = Sentence(text), f"{label} ({', '.join(f'{key} {value}' for key, value in given.items())})"
    if sentence.take(r"^\s*error:?"):
        checks = [Check(f"{name} refused", refused is not None, got, text)]
    elif sentence.take(r"(runs? )?(without (a |any )?warning|no warning)"):
        checks = [Check(name, refused is None and not concerning, got, text)]
    elif found := sentence.take(
        r"(?:runs )?(?:only )?(?:after )?a warning that ([\d.e+-]+)( never binds)?(?: at sequence level)?"
    ):
        telling = [warning for warning in concerning if float(found[1]) in _numbers(warning)]
        if found[2]:
            telling = [warning for warning in telling if re.search("never (binds|clips)|nothing is clipped", warning)]
        checks = [Check(name, refused is None and bool(telling), got, text)]
    else:
        return [unchecked(f"{label}: {text}")]
    return [*checks, *_left(label, sentence)]


def _numbers(text: str) -> set[float]:
    return {float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", text)}


def _wrong_section(label: str, given: Mapping[str, Any], text: str, tested: Implementation) -> list[Check]:
    """A key where it is not at home; ``X`` stands for its home."""
    [key] = given
    homes = [home.rpartition(".")[0] for home in _homes(key)]
    sentence = Sentence(text)
    found = sentence.take(r"error: unknown key here; it belongs to section \[?(\w[\w.]*)\]?")
    if not homes or not found:
        return [unchecked(f"{label} ({key}): {text}")]
    wrong = next(section for section in _SECTIONS if section not in homes)
    named = homes if found[1] == "X" else [found[1]]
    warnings, refused = _attempt(tested, {f"{wrong}.{key}": "true"})
    told = refused is not None and "unknown key here" in refused
    right = told and any(re.search(rf"section.*\[?\b{re.escape(home)}\b", str(refused)) for home in named)
    got = refused if refused is not None else f"accepted with {len(warnings)} warnings"
    return [Check(f"{label} ({key} in [{wrong}])", right, got, text), *_left(label, sentence)]


def _left(label: str, sentence: Sentence) -> list[Check]:
    return [unchecked(f"{label}: {part}") for part in sentence.left()]


BATCH_SHAPES: tuple[AnyShape, ...] = (ExactShape(frozenset({"cases"}), _batch_cases),)
