"""Verifiers under load: does memory stay flat, do hanging answers hold up the others, what does a box cost?

    python benchmarks/verifiers.py memory [--calls 100000]
    python benchmarks/verifiers.py hanging
    python benchmarks/verifiers.py overhead [--isolation bubblewrap] [--runs 200]

Each prints one line of JSON; ``memory`` and ``hanging`` end with status 1 if the promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from gspo.rewards.pool import VerifierPool
from gspo.sandbox import open_sandbox

MATH = "gspo.rewards.math:verify"
ORDINARY = [
    ("\\frac{1}{2}", "So it is \\boxed{0.5}."),
    ("7", "The answer is 8."),
    ("(1, 2)", "\\boxed{(1,2)}"),
    ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}"),
    ("x^2-1", "\\boxed{(x-1)(x+1)}"),
    ("\\int_0^1 x dx", "\\boxed{\\frac{1}{2}}"),
]
HANGING = [
    ("5", "\\boxed{\\dfrac{5^{\\left(5^{\\left(5^{\\left(5^5\\right)}\\right)} - 4\\right)} - 5}{16}}"),
    ("5", "\\boxed{9^{9^{9^{9}}}}"),
    ("5", "\\boxed{2^{35184372088832}}"),
    ("5", "\\boxed{\\int_0^1 x^{x^{x^{x}}} \\sin(x^{99}) dx}"),
]


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def memory(calls: int) -> bool:
    """Growth of the worker and of this process between a tenth of the calls and all of them."""
    with VerifierPool(1, 10.0, preload=["gspo.rewards.math"]) as pool:
        batch = ORDINARY * (1000 // len(ORDINARY))
        done, start, marks = 0, time.perf_counter(), []
        while done < calls:
            pool.run(MATH, batch)
            done += len(batch)
            if done >= calls / 10:
                marks.append((resident_mb(pool.process_ids[0]), resident_mb(os.getpid())))
        seconds = time.perf_counter() - start
    worker, own = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    said = {"calls": done, "calls_per_s": round(done / seconds), "worker_growth_mb": round(worker, 1)}
    print(
        json.dumps({"benchmark": "memory", **said, "own_growth_mb": round(own, 1), "worker_mb": round(marks[-1][0], 1)})
    )
    return worker < 30 and own < 30


def hanging() -> bool:
    """Hanging answers among a thousand ordinary ones, two workers, a limit of 3 s."""
    with VerifierPool(2, 3.0, preload=["gspo.rewards.math"]) as pool:
        pool.run(MATH, ORDINARY)
        items = HANGING + ORDINARY * (1000 // len(ORDINARY))
        start = time.perf_counter()
        verdicts = pool.run(MATH, items)
        seconds = time.perf_counter() - start
    slowest = max(verdict.seconds for verdict in verdicts)
    right = all(not verdict.value for verdict in verdicts[: len(HANGING)])
    said = {"items": len(items), "seconds": round(seconds, 2), "slowest_s": round(slowest, 2)}
    print(json.dumps({"benchmark": "hanging", **said, "timeouts": sum(verdict.timed_out for verdict in verdicts)}))
    return right and slowest < 3.5


def overhead(isolation: str, runs: int) -> bool:
    """Wall time of a program that prints one number, in a fresh box each time."""
    sandbox = open_sandbox(isolation)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        result = sandbox.run_python({"main.py": "print(1)"})
        times.append(1000 * (time.perf_counter() - start))
        if result.stdout != b"1\n":
            raise SystemExit(f"the box failed: {result}")
    quantiles = statistics.quantiles(times, n=20)
    said = {"isolation": sandbox.isolation, "runs": runs, "median_ms": round(statistics.median(times), 1)}
    print(json.dumps({"benchmark": "overhead", **said, "p95_ms": round(quantiles[-1], 1)}))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "hanging", "overhead"))
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--isolation", default="auto")
    options = parser.parse_args()
    if options.what == "memory":
        return 0 if memory(options.calls) else 1
    if options.what == "hanging":
        return 0 if hanging() else 1
    return 0 if overhead(options.isolation, options.runs) else 1


if __name__ == "__main__":
    sys.exit(main())
