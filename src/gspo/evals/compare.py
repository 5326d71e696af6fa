"""Two or more evaluations of the same problems, compared problem by problem."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, DataError
from gspo.evals.statistics import PairedDifference, holm, paired_difference
from gspo.events import read_event_log


@dataclass(frozen=True)
class Evaluation:
    """What a comparison needs of an evaluation.json: per problem (scored, passed)."""

    label: str
    name: str
    problems: str  # digest
    identity: Mapping[str, str]
    counts: Mapping[str, tuple[int, int]]

    def rate(self, problem: str) -> float | None:
        """Share of the scored responses that passed; None if none could be scored."""
        scored, passed = self.counts[problem]
        return passed / scored if scored else None


@dataclass(frozen=True)
class Comparison:
    """A later evaluation against the first; ``p_holm`` is adjusted for all comparisons made."""

    label: str
    found: PairedDifference
    p_holm: float
    notes: tuple[str, ...]


def load_evaluations(paths: Sequence[Path], component: str = "") -> list[Evaluation]:
    """The evaluations of directories and files; of a run, those it made itself on its held-out prompts, in order.

    Raises:
        DataError: as ``load_evaluation``; or a run that made none.
    """
    found: list[Evaluation] = []
    for path in paths:
        of_run = path.is_dir() and not (path / "evaluation.json").exists() and (path / "events.jsonl").exists()
        found += _of_run(path) if of_run else [load_evaluation(path, component)]
    return found


def _of_run(path: Path) -> list[Evaluation]:
    """Evaluations of one run are of the same prompts by construction, and of no other's."""
    events = read_event_log(path / "events.jsonl").events
    found = [
        Evaluation(
            f"{path} step {event['step']}",
            event["name"],
            f"held-out prompts of {path}",
            {},
            {str(index): (scored, passed) for index, (scored, passed) in enumerate(event["outcomes"])},
        )
        for event in events
        if event["type"] == "evaluation" and event["name"] != "sft"
    ]
    if not found:
        raise DataError(f"{path}: the run has made no evaluation")
    return found


def load_evaluation(path: Path, component: str = "") -> Evaluation:
    """An evaluation from its directory or JSON file.

    Args:
        component: compare by this grader's verdict instead of the primary one.

    Raises:
        DataError: not there, or not an evaluation that can be compared.
    """
    file = path / "evaluation.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: is not an evaluation ({error})") from error
    if not isinstance(fields, dict) or "metrics" not in fields or not fields.keys() & {"problems", "outcomes"}:
        raise DataError(f"{file}: is not an evaluation; gspo eval writes them as evaluation.json")
    if "problems" in fields:
        identity = dict(fields["identity"])
        counts = {p["id"]: _counts(p, component, file) for p in fields["problems"]}
        problems = identity["data"]
    elif component:
        raise ConfigError(f"{file}: has no component {component!r}; it is an evaluation on a recipe's prompts")
    else:
        identity, problems = {}, str(fields.get("prompts", ""))
        counts = {str(index): (scored, passed) for index, (scored, passed) in enumerate(fields["outcomes"])}
        if not problems:
            raise DataError(f"{file}: does not say on which prompts it is; evaluate again with this version")
    return Evaluation(str(path), str(fields["name"]), problems, identity, counts)


def _counts(problem: Mapping[str, Any], component: str, file: Path) -> tuple[int, int]:
    if not component:
        return problem["num_scored"], problem["num_passed"]
    found = problem.get("components", {})
    if component not in found:
        known = f"it has {', '.join(found)}" if found else "it has none"
        raise ConfigError(f"{file}: problem {problem['id']!r} has no component {component!r}; {known}")
    scored, passed = found[component]
    return scored, passed


def compare(evaluations: Sequence[Evaluation], *, confidence: float = 0.95, seed: int = 0) -> list[Comparison]:
    """Each evaluation after the first, minus the first, paired over the problems that both could score.

    The p-values are of sign-flip permutations over problems, Holm's adjustment over the comparisons beside them.

    Raises:
        ConfigError: fewer than two, other problems, another judge, or no problem that both could score.
    """
    if len(evaluations) < 2:
        raise ConfigError("a comparison needs at least two evaluations: gspo eval compare A.json B.json")
    first = evaluations[0]
    found = []
    for other in evaluations[1:]:
        _refuse_unlike(first, other)
        pairs = [(first.rate(name), other.rate(name)) for name in first.counts]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not both:
            raise ConfigError(f"{first.label} and {other.label} have no problem that both could score")
        before, after = [a for a, _ in both], [b for _, b in both]
        found.append(paired_difference(before, after, confidence=confidence, seed=seed))
    adjusted = holm([one.p_value for one in found])
    return [
        Comparison(other.label, one, p, _differences(first, other))
        for other, one, p in zip(evaluations[1:], found, adjusted, strict=True)
    ]


def _refuse_unlike(first: Evaluation, other: Evaluation) -> None:
    if (first.name, first.problems) != (other.name, other.problems) or first.counts.keys() != other.counts.keys():
        raise ConfigError(
            f"{first.label} ({first.name}) and {other.label} ({other.name}) are of different problems; only "
            "evaluations of the same problems can be paired"
        )
    if first.identity.get("judge policy") != other.identity.get("judge policy"):
        raise ConfigError(
            f"{first.label} and {other.label} were judged by different rules; judge the stored responses of one again: "
            "gspo eval --benchmark NAME --samples DIR/samples.jsonl"
        )


def _differences(first: Evaluation, other: Evaluation) -> tuple[str, ...]:
    """What else than the model is not the same."""
    names = [name for name in ("prompt template", "protocol") if first.identity.get(name) != other.identity.get(name)]
    return tuple(f"the {name} is not the same" for name in names)
