"""A benchmark of the user's own: a file of problems and the name of a verifier.

Each row has ``prompt`` (text or chat messages) and ``answer`` (or verl's ``reward_model.ground_truth``), and may have
``id`` and ``date``. Verifiers: math, number, exact_match, integer, code, or ``module:function``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from gspo.data.prompts import prompt_content
from gspo.errors import ConfigError, DataError, InputError
from gspo.evals.benchmark import Benchmark, Grader, Imported, Options, Problem, SamplingProtocol
from gspo.evals.graders import CodeGrader, IntegerGrader, RewardGrader, VerifierGrader, integer_of
from gspo.evals.tables import Record, read_all
from gspo.rewards.builtin import VERIFIERS, build_rewards
from gspo.rewards.gold import gold_of
from gspo.rewards.problems import read_problem
from gspo.sandbox import open_sandbox

NAMED: Final = (*VERIFIERS, "integer", "code")


def read(paths: Sequence[Path], options: Options) -> Imported:
    """The problems of the files.

    Raises:
        ConfigError: no verifier is named, or an unknown one.
        DataError: a row without prompt or answer, or with tests that cannot be read; names file, line and column.
    """
    verifier = _verifier(options)
    records = read_all(paths)
    problems = tuple(_problem(record, verifier, index) for index, record in enumerate(records))
    have_ids = sum(record.values.get("id") is not None for record in records)
    if 0 < have_ids < len(records):
        raise DataError(f"{have_ids} of {len(records)} rows have an id; give one to all of them, or to none")
    ids = "id from 'id'" if have_ids else "ids are row numbers"
    return Imported(problems, "custom", (f"prompt from 'prompt', gold from {_gold_name(records[0])!r}, {ids}",))


def _verifier(options: Options) -> str:
    name = options.get("verifier", "")
    if not name:
        raise ConfigError(f"--benchmark custom needs --verifier NAME: {', '.join(NAMED)}, or module:function")
    if name not in NAMED and ":" not in name:
        close = get_close_matches(name, NAMED, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(NAMED)}, or module:function"
        raise ConfigError(f"there is no verifier {name!r}; {hint}")
    return name


def _gold_name(record: Record) -> str:
    return "answer" if record.values.get("answer") is not None else "reward_model.ground_truth"


def _problem(record: Record, verifier: str, index: int) -> Problem:
    prompt = prompt_content(record.get("prompt"), record.place, "prompt")
    gold = gold_of(record.values, "answer")
    if gold is None:
        raise record.fault("answer", "is missing")
    if verifier == "code":
        try:
            read_problem(gold)
        except (DataError, InputError) as error:
            raise record.fault(_gold_name(record), str(error)) from error
    if verifier == "integer":
        value = integer_of(str(gold))
        if value is None:
            raise record.fault(_gold_name(record), f"is {gold!r}, which is no integer")
        gold = str(value)
    name = record.values.get("id")
    columns = {key: value for key, value in record.values.items() if key not in ("prompt", "answer", "id", "date")}
    date = str(record.values.get("date") or "")
    return Problem(str(index + 1) if name is None else str(name), prompt, gold, record.place, date, columns)


@dataclass(frozen=True)
class _Named:
    """One entry of ``[[reward.functions]]``."""

    name: str
    weight: float = 1.0
    kind: str = "trl"
    options: Mapping[str, Any] = field(default_factory=dict)


def make_grader(options: Options, imported: Imported) -> Grader:
    """The grader of a verifier's name; every gold answer has been read by it.

    Raises:
        InputError: an extra is not installed, or programs cannot be isolated here.
        DataError: a gold answer that the verifier cannot read; names file and line.
    """
    name = _verifier(options)
    makers: dict[str, Callable[[], Grader]] = {
        "integer": IntegerGrader,
        "code": lambda: CodeGrader(open_sandbox()),
    }
    if name in makers:
        return makers[name]()
    if name in VERIFIERS:
        return _checked(name, imported)
    return RewardGrader(build_rewards([_Named(name)]), {"verifier": name})


def _checked(name: str, imported: Imported) -> VerifierGrader:
    if name == "math" and not all(map(importlib.util.find_spec, ("math_verify", "mpmath", "sympy"))):
        raise InputError("the verifier 'math' needs an extra: pip install 'gspo[math]'")
    grader = VerifierGrader(name)
    for problem in imported.problems:
        reason = grader.unreadable(str(problem.gold))
        if reason:
            grader.close()
            raise DataError(f"{problem.place}, column 'answer': {reason}")
    return grader


CUSTOM: Final = Benchmark(
    name="custom",
    title="Custom",
    protocol=SamplingProtocol(num_samples=8, max_new_tokens=4096),
    read=read,
    make_grader=make_grader,
    option_names={"verifier": f"who judges: {', '.join(NAMED)}, or module:function"},
)
