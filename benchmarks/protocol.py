"""How step.py talks to a worker: JSON lines over stdin and stdout, standard library only.

A worker says ``{"ready": ...}`` once and then answers every line ``go SETTING`` with one measurement, so that several
workers can take turns. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO


def claim_stdout() -> TextIO:
    """The channel to step.py; from now on print() writes to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def say(channel: TextIO, **fields: Any) -> None:
    channel.write(json.dumps(fields) + "\n")


def hear() -> str | None:
    """The setting of the next measurement; None: the run is over."""
    line = sys.stdin.readline()
    return line.removeprefix("go").strip() if line.startswith("go") else None


def clock() -> float:
    """Seconds: of the wall, or of this process's processors where step.py was told that the machine is busy."""
    return time.process_time() if os.environ.get("BENCHMARK_CLOCK") == "cpu" else time.perf_counter()


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Worker:
    """The other end: a process that measures."""

    def __init__(self, python: str, arguments: Sequence[str], threads: int, clock: str = "wall") -> None:
        variables = {
            "BENCHMARK_CLOCK": clock,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        self.ready = self.read()

    def read(self) -> dict[str, Any]:
        """Raises RuntimeError if the worker has died; it has said why on stderr."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.process.args} ended with status {self.process.wait()}")
        return dict(json.loads(line))

    def measure(self, setting: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"go {setting}\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
