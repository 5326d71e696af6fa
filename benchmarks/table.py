"""Turns the JSON lines of step.py into the table of docs/performance.md.

python -m benchmarks.table build/bench.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = (
    "| workload | against | step | rollout | update | utilisation, rollout | utilisation, update | peak, MB |\n"
    "|---|---|---|---|---|---|---|---|"
)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown. Ratios: the other side's time over ours, then (largest - smallest) / median.

    Pairs of numbers: ours / the other side's. The peak is resident memory above the loaded model.
    """
    return "\n".join([HEADER, *map(_row, results)])


def _row(result: Mapping[str, Any]) -> str:
    cells = [f"{result['workload']}: {result['what']}", str(result["versus"])]
    if "saved_of_needless" in result:
        saved = result["saved_of_needless"]
        cells += [f"{saved['median']:.0%} of the needless work saved (spread {saved['spread']:.2f})", "", ""]
    elif "cost_per_real_work" in result:
        cost = result["cost_per_real_work"]
        cells += [f"time over arithmetic {cost['median']:.2f} (spread {cost['spread']:.2f})", "", ""]
    else:
        cells += [_ratio(result, stage) for stage in ("step", "rollout", "update")]
    cells += [_pair(result, stage) for stage in ("rollout", "update")]
    peaks = [result[side]["peak_above_model_mb"] for side in ("ours", "other") if side in result]
    cells.append(" / ".join(str(peak) for peak in peaks))
    return "| " + " | ".join(cells) + " |"


def _ratio(result: Mapping[str, Any], stage: str) -> str:
    found = result.get("ratio", {}).get(stage)
    return "" if found is None else f"{found['median']:.2f}x (spread {found['spread']:.2f})"


def _pair(result: Mapping[str, Any], stage: str) -> str:
    sides = [result[side][stage]["utilisation"] for side in ("ours", "other") if stage in result.get(side, {})]
    return " / ".join(f"{value:.2f}" for value in sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    lines = [line for path in parser.parse_args().files for line in path.read_text().splitlines()]
    results = [json.loads(line) for line in lines]
    print(table(results))
    rates = ", ".join(f"{r['workload']} {r['gemm_gflops']:.0f} (spread {r['gemm_spread']:.2f})" for r in results)
    print(f"\nMeasured float32 GEMM rate, GFLOP/s, by workload: {rates}; threads: {results[0]['threads']}.")


if __name__ == "__main__":
    main()
