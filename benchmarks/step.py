"""Measures workloads and prints one JSON line each: ratios, their spread, utilisation, memory.

    python -m benchmarks.step --workload w1 --peer trl --json results.jsonl

Both sides take turns, A B A B, each in its own process; the first pair is not counted. ``--peer none`` measures our
side alone. The workloads w6 and w7 compare our side with itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm import gemm_flops_per_second
from benchmarks.protocol import Worker
from benchmarks.workloads import WORKLOADS, Workload
from gspo.policy.causal_lm import load_policy

ROOT = Path(__file__).resolve().parent.parent
PEERS = {name: (ROOT / f".venv-{name}/bin/python", ROOT / f"benchmarks/peer_{name}.py") for name in ("trl", "vllm")}
#: The other setting of our side, by what a workload compares.
OTHER_SETTING = {"lengths": "half", "skipping": "all"}


def measure(
    workload: Workload, peer: str, threads: int, rounds: int | None = None, clock: str = "wall"
) -> dict[str, Any]:
    """One workload. Raises RuntimeError if a side dies, SystemExit with the remedy if the peer is not installed."""
    with tempfile.TemporaryDirectory() as scratch:
        model = model_directory(workload, Path(scratch))
        workers = [Worker(sys.executable, ["-m", "benchmarks.ours", workload.name, model], threads, clock)]
        settings = ["", OTHER_SETTING.get(workload.versus, "")]
        if workload.versus == "peer" and peer != "none":
            workers.append(_peer(peer, workload, model, threads, clock))
        compared = len(workers) > 1 or workload.versus != "peer"
        try:
            gemm, pairs = [], []
            for number in range((rounds or workload.rounds) + 1):
                gemm.append(gemm_flops_per_second(0.5))
                pair = [workers[0].measure(settings[0])]
                if compared:
                    pair.append(workers[-1].measure(settings[1]))
                if number:
                    pairs.append(pair)
        finally:
            for worker in workers:
                worker.close()
    return _report(workload, peer, threads, gemm, pairs, [worker.ready for worker in workers])


def _peer(peer: str, workload: Workload, model: str, threads: int, clock: str) -> Worker:
    python, script = PEERS[peer]
    if not python.exists():
        raise SystemExit(f"{python} does not exist; `make bench-venv-{peer}` builds it")
    return Worker(str(python), [str(script), workload.name, model], threads, clock)


def model_directory(workload: Workload, directory: Path) -> str:
    """A model directory that both sides load, so that they have the same weights."""
    if workload.path is not None:
        if not (ROOT / workload.path).is_dir():
            raise SystemExit(f"{workload.path} does not exist; `make smollm2` builds it")
        return str(ROOT / workload.path)
    load_policy(tiny=workload.tiny, tiny_config=workload.tiny_config, device="cpu").save(directory)
    return str(directory)


def _report(
    workload: Workload,
    peer: str,
    threads: int,
    gemm: Sequence[float],
    pairs: Sequence[Sequence[dict[str, Any]]],
    ready: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    rate = statistics.median(gemm)
    result: dict[str, Any] = {
        "workload": workload.name,
        "what": workload.what,
        "versus": workload.versus if workload.versus != "peer" else peer,
        "num_pairs": len(pairs),
        "gemm_gflops": round(rate / 1e9, 1),
        "gemm_spread": _spread(gemm),
        "threads": threads,
        "machine": f"{platform.machine()}, {torch.__version__}",
        "versions": [{k: v for k, v in side.items() if k != "model_bytes"} for side in ready],
    }
    for place, name in enumerate(("ours", "other")[: len(pairs[0])]):
        sides = [pair[place] for pair in pairs]
        result[name] = _side(sides, rate, pairs, ready[min(place, len(ready) - 1)])
    if len(pairs[0]) > 1:
        stages = [s for s in pairs[0][1]["seconds"] if s in pairs[0][0]["seconds"]]
        ratios = {s: [pair[1]["seconds"][s] / pair[0]["seconds"][s] for pair in pairs] for s in stages}
        result["ratio"] = {s: {"median": _round(statistics.median(r)), "spread": _spread(r)} for s, r in ratios.items()}
    result |= _against_ourselves(workload, pairs)
    return result


def _side(
    sides: Sequence[dict[str, Any]], rate: float, pairs: Sequence[Sequence[dict[str, Any]]], ready: dict[str, Any]
) -> dict[str, Any]:
    """One side's rates; the arithmetic that a step must do is counted by our side for both."""
    found: dict[str, Any] = {"peak_mb": round(max(side["peak_bytes"] for side in sides) / 1e6)}
    found["peak_above_model_mb"] = round(found["peak_mb"] - ready["model_bytes"] / 1e6)
    for stage in ("rollout", "update"):
        if stage not in sides[0]["seconds"]:
            continue
        seconds = [side["seconds"][stage] for side in sides]
        flops = [side.get("flops", pair[0]["flops"])[stage] for side, pair in zip(sides, pairs, strict=True)]
        done = [f / s / rate for f, s in zip(flops, seconds, strict=True)]
        tokens = [side["tokens"] / s for side, s in zip(sides, seconds, strict=True)]
        found[stage] = {
            "utilisation": _round(statistics.median(done)),
            "tokens_per_s": round(statistics.median(tokens)),
            "seconds_spread": _spread(seconds),
        }
    return found


def _against_ourselves(workload: Workload, pairs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    if workload.versus == "skipping":
        saved = []
        for ours, everything in pairs:
            forward = ours["skipped"]["tokens/skipped_forward"] / ours["tokens"]
            backward = ours["skipped"]["tokens/skipped_backward"] / ours["tokens"] - forward
            needless = forward + 2 / 3 * backward  # a backward pass is two thirds of the arithmetic
            saved.append((1 - ours["seconds"]["update"] / everything["seconds"]["update"]) / needless)
        return {"saved_of_needless": {"median": _round(statistics.median(saved)), "spread": _spread(saved)}}
    if workload.versus == "lengths":
        slopes = []
        for whole, half in pairs:
            seconds = whole["seconds"]["update"] / half["seconds"]["update"]
            slopes.append(seconds / (whole["flops"]["update"] / half["flops"]["update"]))
        return {"cost_per_real_work": {"median": _round(statistics.median(slopes)), "spread": _spread(slopes)}}
    return {}


def _spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return _round((max(values) - min(values)) / statistics.median(values))


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="may be repeated; default: all")
    parser.add_argument("--peer", choices=[*PEERS, "none"], default="trl")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, help="measured pairs; default: the workload's own")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a busy machine, one thread"
    )
    parser.add_argument("--json", type=Path, help="append the lines to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["BENCHMARK_CLOCK"] = arguments.clock  # for the yardstick, which is measured in this process
    for name in arguments.workload or WORKLOADS:
        line = json.dumps(
            measure(WORKLOADS[name], arguments.peer, arguments.threads, arguments.rounds, arguments.clock)
        )
        print(line, flush=True)
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
