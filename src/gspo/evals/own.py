"""Our own small sets as benchmarks: they need no data of anybody else's, and mean nothing beyond themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo.data.sets import set_path
from gspo.evals.benchmark import Benchmark, Imported, Options, Problem, SamplingProtocol
from gspo.evals.graders import CodeGrader, IntegerGrader
from gspo.evals.tables import read_records
from gspo.sandbox import open_sandbox


def _read(name: str) -> Imported:
    problems = tuple(
        Problem(
            id=record.text("id"),
            prompt=record.text("prompt"),
            gold=record.get("answer"),
            place=record.place,
            date=str(record.values.get("date") or ""),
        )
        for record in read_records(set_path(name))
    )
    return Imported(problems, f"gspo.data.sets: {name}", (f"{len(problems)} problems made by gspo.data.sets",))


def _read_integers(paths: Sequence[Path], options: Options) -> Imported:
    return _read("integers")


def _read_programs(paths: Sequence[Path], options: Options) -> Imported:
    return _read("programs")


def _integers(options: Options, imported: Imported) -> IntegerGrader:
    return IntegerGrader()


def _programs(options: Options, imported: Imported) -> CodeGrader:
    return CodeGrader(open_sandbox())


OWN_INTEGERS: Final = Benchmark(
    name="own-integers",
    title="Own integers",
    protocol=SamplingProtocol(num_samples=8, max_new_tokens=1024),
    read=_read_integers,
    make_grader=_integers,
    needs_data=False,
)
OWN_PROGRAMS: Final = Benchmark(
    name="own-programs",
    title="Own programs",
    protocol=SamplingProtocol(num_samples=8, max_new_tokens=1024),
    read=_read_programs,
    make_grader=_programs,
    needs_data=False,
)
