"""Cases about answers: math answers against a gold answer, programs against the tests of a problem."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.cli.conformance.implementation import CodeJudge, Implementation
from gspo.cli.conformance.model import AnyShape, Case, Check, ExactShape, Sentence, unchecked

#: Seconds per answer where a case does not say.
LIMIT_SECONDS = 5.0
WORKERS = 2


class _Rows:
    """A list of objects with gold, response and the right verdict."""

    def fits(self, given: Any) -> bool:
        return (
            isinstance(given, list)
            and len(given) > 0
            and all(isinstance(row, dict) and {"gold", "response"} <= row.keys() for row in given)
        )

    def run(self, case: Case, tested: Implementation) -> list[Check]:
        return ExactShape(frozenset(), _math_rows).run(case, tested)


def _math_rows(case: Case, tested: Implementation) -> list[Check]:
    """The expectation names the column with the verdicts; columns that have the name of a fault are its answers."""
    column, left = _column(case, "verdict")
    rows = case.input
    labels = [f"{column}/row {number}" for number in range(1, len(rows) + 1)]
    return [*_judged(case, tested, rows, labels, column, "response"), *map(unchecked, left)]


def _triples(case: Case, tested: Implementation) -> list[Check]:
    """gold, prediction, right; a prediction stands inside a box unless it holds one."""
    rows, labels, left = [], [], []
    for number, row in enumerate(case.input["triples"], 1):
        if not isinstance(row, dict) or not {"gold", "prediction"} <= row.keys():
            left.append(f"right/row {number}")
            continue
        text = str(row["prediction"])
        rows.append({**row, "response": text if "\\boxed" in text else f"\\boxed{{{text}}}"})
        labels.append(f"right/{row.get('id', number)}")
    return [*_judged(case, tested, rows, labels, "right", "prediction"), *map(unchecked, left)]


def _column(case: Case, default: str) -> tuple[str, list[str]]:
    """``column 'verdict'``, and what else is expected."""
    sentence = Sentence(case.remark)
    found = sentence.take(r"(?:column|field) '(\w+)'")
    return found[1] if found else default, sentence.left()


def _judged(
    case: Case,
    tested: Implementation,
    rows: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    column: str,
    shown: str,
) -> list[Check]:
    """One check for each row that states a verdict; without one there is nothing to compare."""
    stated = [(row, label) for row, label in zip(rows, labels, strict=True) if _states(row, column)]
    checks = [unchecked(label) for row, label in zip(rows, labels, strict=True) if not _states(row, column)]
    if not stated:
        return checks
    with tested.math_judge(LIMIT_SECONDS, WORKERS) as judge:
        verdicts = judge([(str(row["gold"]), str(row["response"])) for row, _ in stated])
    for (row, label), got in zip(stated, verdicts, strict=True):
        faults = {name: row[name] for name in case.faults if name in row and name != column}
        name = f"{label} ({_cut(row[shown])} against {_cut(row['gold'])})"
        checks.append(Check(name, got is row[column], got, row[column], None, faults))
    return checks


def _states(row: Mapping[str, Any], column: str) -> bool:
    """Whether a row says right (true), wrong (false) or not to be judged (null)."""
    return column in row and (row[column] is None or isinstance(row[column], bool))


def _cut(text: Any) -> str:
    shown = repr(str(text))
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _programs(case: Case, tested: Implementation) -> list[Check]:
    """Programs with the id of their problem; the rule may state the limits of a test."""
    column, left = _column(case, "verdict")
    problems = case.input["problems"]
    known = [p for p in case.input["programs"] if {"program", "problem"} <= p.keys() and p["problem"] in problems]
    programs = [program for program in known if _states(program, column)]
    unread = [unchecked(f"{column}/{n}") for n, p in enumerate(case.input["programs"], 1) if p not in programs]
    limits = re.search(r"([\d.]+) s and ([\d.]+) GiB per test", case.rule)
    seconds, memory_mb = (float(limits[1]), int(float(limits[2]) * 1024)) if limits else (4.0, 1024)
    pairs = [(str(p["program"]), problems[p["problem"]]) for p in programs]
    checks: list[Check] = []
    if not programs:
        return [*unread, *map(unchecked, left)]
    with tested.code_judge(seconds, memory_mb) as judge:
        for program, got in zip(programs, judge(pairs), strict=True):
            label = f"{column}/{program.get('id', 'program')} ({program.get('why', '')})"
            faults = {name: program[name] for name in case.faults if name in program and name != column}
            checks.append(Check(label, got is program[column], got, program[column], None, faults))
        sentence = Sentence(";".join(left))
        if found := sentence.take(r"(\w+) returns inside the limit"):
            mine = [pair for program, pair in zip(programs, pairs, strict=True) if program.get("id") == found[1]]
            checks += [_in_time(found[0], judge, pair, seconds) for pair in mine]
    return [*checks, *unread, *map(unchecked, sentence.left())]


def _in_time(label: str, judge: CodeJudge, pair: tuple[str, Mapping[str, Any]], seconds: float) -> Check:
    """Processor time decides; on a busy machine the wall clock may show twice as much."""
    bound, start = 2 * seconds + 2, time.perf_counter()
    judge([pair])
    took = time.perf_counter() - start
    return Check(label, took < bound, took, f"under {bound:g} s of wall clock")


ANSWER_SHAPES: tuple[AnyShape, ...] = (
    _Rows(),
    ExactShape(frozenset({"triples"}), _triples),
    ExactShape(frozenset({"problems", "programs"}), _programs),
)
