"""Programs of tests/cases/attack_programs.txt, judged by root and by an ordinary user, in every isolation there is."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo.rewards.code import judge
from gspo.rewards.problems import read_problem
from gspo.sandbox import open_sandbox

CASES = Path(__file__).parents[1] / "cases"
#: Small for those that may run into them, so that the tests are fast; ample for all others, however busy the machine.
SMALL = {"cpu_s": 0.3, "wall_s": 1.5, "memory_mb": 256}
AMPLE = {"cpu_s": 5.0, "wall_s": 20.0, "memory_mb": 512}
STDIO = {"tests": [["3\n1 2 3\n", "6"], ["5\n1 2 3 4 5\n", "15"]]}
CALL = {"tests": [[[3, [1, 2, 3]], 6], [[5, [1, 2, 3, 4, 5]], 15]], "function": "total"}
ORDINARY_USER = 54321


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    verdicts: tuple[str, ...]
    program: str


def load_programs() -> list[Case]:
    sections = (CASES / "attack_programs.txt").read_text().split("\n=== ")[1:]
    cases = []
    for section in sections:
        head, _, program = section.partition("\n")
        name, kind, verdicts = (part.strip() for part in head.split("|"))
        cases.append(Case(f"{kind} {name}", kind, tuple(v.strip() for v in verdicts.split(",")), program))
    return cases


def judge_all(isolation: str, cases: list[Case], scratch: str) -> dict[str, dict[str, Any]]:
    """Name -> what the judge says; ``scratch`` is where the boxes keep their files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSPO_TEST_TOKEN", "secret-token")
        patch.setattr(tempfile, "tempdir", scratch)
        return _judge_all(isolation, cases)


def _judge_all(isolation: str, cases: list[Case]) -> dict[str, dict[str, Any]]:
    sandbox = open_sandbox(isolation, num_slots=3)
    problems = {"stdio": STDIO, "call": CALL}

    def one(case: Case) -> dict[str, Any]:
        limits = SMALL if "time limit" in case.verdicts else AMPLE
        if "memory limit" in case.verdicts:
            limits = {**limits, "memory_mb": SMALL["memory_mb"]}
        summary = judge(case.program, read_problem({**problems[case.kind], **limits}), sandbox).summary()
        return {"correct": summary.correct, "verdict": summary.rung, "reason": summary.reason}

    with ThreadPoolExecutor(3) as threads:
        return dict(zip([case.name for case in cases], threads.map(one, cases), strict=True))


def as_ordinary_user(function: Callable[[], Any]) -> Any:
    """What the function returns (through JSON) in a forked process of an ordinary user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.setgroups([])
            os.setresgid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
            os.setresuid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
            os.chdir("/")
            answer = {"value": function()}
        except BaseException:  # carried to the parent, which raises it
            answer = {"error": traceback.format_exc()}
        with open(writing, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        answer = json.load(file)
    os.waitpid(pid, 0)
    if "error" in answer:
        raise AssertionError(answer["error"])
    return answer["value"]


def survivors(wait_s: float = 3.0) -> list[str]:
    """Command lines of processes that belong to a box, once those that end by themselves have ended."""
    deadline = time.monotonic() + wait_s
    while (found := _box_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _box_processes() -> list[str]:
    found = []
    for directory in Path("/proc").iterdir():
        try:
            line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if (
            directory.name.isdigit()
            and state != "Z"
            and ("/box" in line.split(" ")[-2:] or "/box/main.py" in line or "gspo-box-" in line)
        ):
            found.append(line)
    return found
