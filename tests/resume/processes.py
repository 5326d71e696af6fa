"""Runs in processes of their own, and their comparison."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gspo.cli.verify_resume import differences

from .runs import SIGNAL_FILE, outcome


class Server:
    """Runs as forks of one process that has everything imported (tests/resume/server.py)."""

    def __init__(self, signal_file: Path, **environment: str) -> None:
        self.signal_file = signal_file
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.resume.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1", SIGNAL_FILE: str(signal_file)},
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, *words: str) -> int:
        """Process id, which is also the process group."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._line())

    def wait(self) -> int:
        """Exit status; negative for a signal."""
        return int(self._line().removeprefix("status "))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def same_but_for_its_place(run: Path, other: Path) -> None:
    """Equal outcomes, but for the directory's own name in the summary."""
    one, two = outcome(run), outcome(other)
    assert one.pop("summary").keys() == two.pop("summary").keys()
    assert one == two
    assert differences(run, other) == []
