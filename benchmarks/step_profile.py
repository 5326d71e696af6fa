"""Where the time of a step goes: kernels and tensor operations on one side, everything around them on the other.

    python -m benchmarks.step_profile --workload w3 --threads 2

The profiler adds time to every Python call and none to the inside of an operation, so the share of the framework is an
upper bound. Backward passes run in the calling thread and are seen too.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.ours import Ours
from benchmarks.protocol import clock
from benchmarks.step import model_directory
from benchmarks.workloads import WORKLOADS

#: Calls through ctypes are no functions for the profiler: their time is that of the Python line that makes them.
CALLERS_OF_KERNELS = ("gspo/policy/native.py", "gspo/rollout/embedded/library.py")
#: A function of the profiler: file ("~" for one in C), line, name.
Function = tuple[str, int, str]


def kind(function: Function) -> str:
    """Of the time that a function spends in itself."""
    file, _, name = function
    if file.endswith(CALLERS_OF_KERNELS):
        return "kernels"
    if file == "~":
        return "operations" if "torch" in name or "run_backward" in name else "framework"
    return "framework"


def shares(own_seconds: Mapping[Function, float]) -> dict[str, float]:
    """Share of the time by kind."""
    total = sum(own_seconds.values())
    found = dict.fromkeys(("kernels", "operations", "framework"), 0.0)
    for function, seconds in own_seconds.items():
        found[kind(function)] += seconds / total
    return found


def profile(workload: str, rounds: int) -> dict[str, Any]:
    """One profiled step after one that is not counted, and the median of steps without the profiler."""
    with tempfile.TemporaryDirectory() as scratch:
        ours = Ours(WORKLOADS[workload], model_directory(WORKLOADS[workload], Path(scratch)))
        ours.round("")
        plain = []
        for _ in range(rounds):
            start = clock()
            ours.round("")
            plain.append(clock() - start)
        profiler = cProfile.Profile()
        start = clock()
        profiler.runcall(ours.round, "")
        seconds = clock() - start
    own = {function: row[2] for function, row in pstats.Stats(profiler).stats.items()}  # type: ignore[attr-defined]
    largest = sorted(own.items(), key=lambda item: -item[1])[:15]
    return {
        "workload": workload,
        "threads": torch.get_num_threads(),
        "slower_by_profiling": round(seconds / statistics.median(plain), 3),
        "shares": {name: round(share, 4) for name, share in shares(own).items()},
        "largest": [
            {"share": round(value / sum(own.values()), 4), "kind": kind(function), "function": _name(function)}
            for function, value in largest
        ],
    }


def _name(function: Function) -> str:
    file, line, name = function
    return name if file == "~" else f"{'/'.join(Path(file).parts[-3:])}:{line} {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="w3")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="steps without the profiler")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(profile(arguments.workload, arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
