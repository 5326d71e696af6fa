"""What a benchmark is: a list of problems, a grader, a protocol. Pure types; running one is ``evals/frame.py``.

::

    files --read--> Imported (problems, layout, what was mapped)
    problems --sampler--> Answers --grader--> Grades --> ProblemResults --> evaluation.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from gspo.errors import ConfigError, DataError
from gspo.types import Message

#: Options of a benchmark as the command line gives them: text by name.
Options = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """One problem. What a model reads is ``prompt``; what the grader reads is ``gold``.

    >>> Problem("2024-I-4", "Find n.", "033", "aime.jsonl:4").id
    '2024-I-4'
    """

    id: str  # unique within the benchmark, stable from run to run: random streams are named by it
    prompt: str | tuple[Message, ...]  # text or chat messages, before the chat template
    gold: Any  # JSON's types: an answer, tests, ...
    place: str  # where it was read: file and line (or row)
    date: str = ""  # ISO, e.g. "2024-10-05"; empty if the data have none
    columns: Mapping[str, Any] = field(default_factory=dict)  # JSON's types; whatever else the grader needs


@dataclass(frozen=True)
class Imported:
    """What an importer made of the files, and what it says about it."""

    problems: tuple[Problem, ...]
    layout: str  # which known layout the files have
    notes: tuple[str, ...] = ()  # sentences: what was mapped to what, what was left out and why
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON's types, into the result: release, window, ...

    @property
    def digest(self) -> str:
        """Of everything that reaches model or grader; the same problems from another file have the same."""
        return digest([[p.id, p.prompt, p.gold, p.date, p.columns] for p in self.problems])


@dataclass(frozen=True)
class SamplingProtocol:
    """How a benchmark is sampled unless the user says otherwise."""

    num_samples: int  # responses per problem
    max_new_tokens: int
    temperature: float = 1.0
    instruction: str = ""  # appended to prompts that are text


@dataclass(frozen=True)
class Answer:
    """One response. ``num_tokens`` and ``stop_reason`` are unknown (None) for samples brought by the user."""

    text: str
    num_tokens: int | None = None
    stop_reason: str | None = None  # values of gspo.types.StopReason


@dataclass(frozen=True)
class Grade:
    """What the grader says of one response.

    ``value`` is 1 for a pass and 0 for a fail; None: it could not be graded (never a fail). ``components`` are
    further verdicts under the same reading, such as those of a second grader; each gets its own statistics.
    """

    value: float | None
    verdict: str = ""  # which rule decided, or how the program ended: counted per problem
    reason: str = ""
    answered: bool = True  # whether the response states an answer at all
    components: Mapping[str, float | None] = field(default_factory=dict)


class Grader(Protocol):
    """Grades responses. ``policy`` says in JSON's types how: recorded in the result and hashed."""

    @property
    def policy(self) -> Mapping[str, Any]: ...

    def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
        """One grade per response; the two sequences are parallel (a problem comes once per response to it)."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ProblemResult:
    """A problem, the responses to it and their grades. Fewer answers than asked for are missing cells."""

    problem: Problem
    answers: tuple[Answer, ...]
    grades: tuple[Grade, ...]


@dataclass(frozen=True)
class Figure:
    """One number of a benchmark's own, such as a rating; texts as they are to be read."""

    name: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class ResultTable:
    """A table of a benchmark's own, on the page of the report; cells are numbers or text."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Findings:
    """What a benchmark adds to the common statistics."""

    metrics: Mapping[str, Any] = field(default_factory=dict)  # numbers by name, into ``metrics``
    figures: tuple[Figure, ...] = ()
    tables: tuple[ResultTable, ...] = ()
    notes: tuple[str, ...] = ()


def no_findings(results: Sequence[ProblemResult], imported: Imported, options: Options) -> Findings:
    """For a benchmark that has only the common statistics."""
    return Findings()


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name.

    Args:
        read: files and options to problems; raises DataError with file, line and column for what it cannot read.
        make_grader: raises InputError if it cannot work here (an extra, a sandbox).
        option_names: options that it knows, each with a description.
        needs_data: whether ``--data`` must be given; else ``read`` gets no paths.
        finish: its own numbers, after all problems are graded.
    """

    name: str
    title: str
    protocol: SamplingProtocol
    read: Callable[[Sequence[Path], Options], Imported]
    make_grader: Callable[[Options, Imported], Grader]
    option_names: Mapping[str, str] = field(default_factory=dict)
    needs_data: bool = True
    finish: Callable[[Sequence[ProblemResult], Imported, Options], Findings] = no_findings

    def load(self, paths: Sequence[Path], options: Options) -> Imported:
        """Checks the options and reads the files.

        Raises:
            ConfigError: an option that there is not, no files where some are needed, or files where none are read.
            DataError: the files cannot be read, or two problems have one id.
        """
        for name in options:
            if name not in self.option_names:
                close = get_close_matches(name, self.option_names, n=1)
                known = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(self.option_names) or 'none'}"
                raise ConfigError(f"benchmark {self.name!r} has no option {name!r}; {known}")
        if self.needs_data and not paths:
            raise ConfigError(f"benchmark {self.name!r} needs its data: --data FILE (docs/evaluation.md says which)")
        if paths and not self.needs_data:
            raise ConfigError(f"benchmark {self.name!r} comes with its problems; leave out --data")
        imported = self.read(paths, options)
        if not imported.problems:
            raise DataError(f"benchmark {self.name!r}: the data hold no problem")
        seen: dict[str, str] = {}
        for problem in imported.problems:
            if problem.id in seen:
                raise DataError(f"{problem.place}: has the id {problem.id!r}, which {seen[problem.id]} has too")
            seen[problem.id] = problem.place
        return imported


def digest(value: Any) -> str:
    """SHA-256 of a value in JSON's types, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def answer_from(fields: Mapping[str, Any]) -> Answer:
    return Answer(str(fields["text"]), fields.get("num_tokens"), fields.get("stop_reason"))


def grade_from(fields: Mapping[str, Any]) -> Grade:
    components = dict(fields.get("components") or {})
    return Grade(fields["value"], fields["verdict"], fields["reason"], bool(fields["answered"]), components)


def fields_of(record: Answer | Grade) -> dict[str, Any]:
    """As JSON can carry it."""
    return asdict(record)
