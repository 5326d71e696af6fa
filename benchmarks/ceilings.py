"""What the machine gives at the very shapes of a workload: rates of products, and of reading memory. JSON lines.

    OMP_NUM_THREADS=1 python -m benchmarks.ceilings --clock cpu

Rates of products are shares of the square product's (``gemm.py``), timed in turns with it: on a busy machine only
shares mean something. Best of several repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gemm import SIZE
from benchmarks.protocol import clock
from gspo.policy.native import keep_freed_memory
from gspo.policy.products import product
from gspo.rollout.embedded.library import Library, Weight, load_decoding, room

REPETITIONS = 15


@dataclass(frozen=True)
class Shape:
    """A product of a decoding step or an update: rows (rows, depth) with `copies` different weights (width, depth)."""

    workload: str
    what: str
    rows: int
    depth: int
    width: int
    copies: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.depth * self.width * self.copies

    @property
    def weight_bytes(self) -> float:
        return 4.0 * self.depth * self.width * self.copies


#: By layer as often as a step makes them, so that weights come from where they come from in a step.
ROLLOUT_SHAPES = (
    Shape("w1", "queries, keys, values", 128, 256, 512, 4),
    Shape("w1", "output", 128, 256, 256, 4),
    Shape("w1", "gate and up", 128, 256, 1536, 4),
    Shape("w1", "down", 128, 768, 256, 4),
    Shape("w2", "gate and up of an expert", 32, 256, 256, 64),
    Shape("w2", "down of an expert", 32, 128, 256, 64),
    Shape("w3", "queries, keys, values", 32, 576, 960, 30),
    Shape("w3", "gate and up", 32, 576, 3072, 30),
    Shape("w3", "down", 32, 1536, 576, 30),
    Shape("w3", "head", 32, 576, 49_152, 1),
)


#: The products of an update: tokens of a mini-batch by inputs by outputs. Copies: as many layers as there are, so that
#: activations and weights come from where they come from in an update.
UPDATE_SHAPES = (
    Shape("w1", "queries, keys, values", 2080, 256, 512, 4),
    Shape("w1", "gate", 2080, 256, 768, 8),
    Shape("w1", "down", 2080, 768, 256, 4),
    Shape("w3", "queries, keys, values", 444, 576, 960, 30),
    Shape("w3", "gate", 444, 576, 1536, 60),
    Shape("w3", "head", 384, 576, 49_152, 1),
)


def best_seconds(calls: Mapping[str, Callable[[], None]], least: float = 0.01) -> dict[str, float]:
    """Of one call each, best of several runs of at least `least` seconds. They take turns, so that all see the same."""
    numbers, best = {}, dict.fromkeys(calls, float("inf"))
    for name, call in calls.items():
        call()
        start = clock()
        call()
        numbers[name] = max(1, int(least / max(clock() - start, 1e-6)))
    for _ in range(REPETITIONS):
        for name, call in calls.items():
            start = clock()
            for _ in range(numbers[name]):
                call()
            best[name] = min(best[name], (clock() - start) / numbers[name])
    return best


def square() -> Callable[[], None]:
    """The yardstick, to be timed beside the others."""
    a, b = torch.randn(2, SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)

    def call() -> None:
        torch.mm(a, b, out=out)

    return call


def by_torch(shape: Shape, by_inputs: bool) -> Callable[[], None]:
    """The products of torch, weights stored by inputs or, as ``nn.Linear`` has them, by outputs."""
    states, out = torch.randn(shape.rows, shape.depth), torch.empty(shape.rows, shape.width)
    weights = torch.randn(shape.copies, shape.depth, shape.width)
    if not by_inputs:
        weights = weights.mT.contiguous().mT

    def call() -> None:
        for weight in weights:
            torch.mm(states, weight, out=out)

    return call


def by_panels(shape: Shape, library: Library) -> Callable[[], None]:
    """The products of ``panels.h``, weights packed one after the other in large pages."""
    states, out = torch.randn(shape.rows, shape.depth), torch.empty(shape.rows, shape.width)
    size = library.panel_numbers(shape.width, shape.depth)
    memory = room(size * shape.copies, torch.float32).normal_()
    weights = [
        Weight(panels=part.data_ptr(), bias=None, depth=shape.depth, width=shape.width) for part in memory.split(size)
    ]

    def call(kept: object = memory) -> None:
        for weight in weights:
            library.project(states, weight, out)

    return call


def reading(library: Library, large_pages: bool, megabytes: int = 400) -> tuple[float, Callable[[], None]]:
    """Bytes, and a product of one row, which does little else than read its weight of that size once."""
    depth, width = 512, megabytes * 1_000_000 // 4 // 512 // library.panel * library.panel
    numbers = library.panel_numbers(width, depth)
    memory = (room(numbers, torch.float32) if large_pages else torch.empty(numbers)).normal_()
    weight = Weight(panels=memory.data_ptr(), bias=None, depth=depth, width=width)
    state, out = torch.randn(1, depth), torch.empty(1, width)

    def call(kept: object = memory) -> None:
        library.project(state, weight, out)

    return 4.0 * numbers, call


def rollout_ceilings() -> Iterator[dict[str, Any]]:
    """Of the products of a decoding step, and of memory."""
    library = load_decoding(torch.float32)
    assert library is not None, "no C compiler: nothing of ours to measure"
    (size, large), (_, small) = reading(library, True), reading(library, False)
    seconds = best_seconds({"large_pages": large, "small_pages": small})
    yield {"ceiling": "memory, GB/s", **{name: round(size / s / 1e9, 1) for name, s in seconds.items()}}
    for shape in ROLLOUT_SHAPES:
        seconds = best_seconds(
            {
                "square": square(),
                "panels": by_panels(shape, library),
                "torch_by_inputs": by_torch(shape, True),
                "torch_by_outputs": by_torch(shape, False),
            }
        )
        rate = 2.0 * SIZE**3 / seconds.pop("square")
        yield {
            "ceiling": "product, share of the square one",
            "workload": shape.workload,
            "what": shape.what,
            "rows": shape.rows,
            "flops_per_byte": round(shape.flops / shape.weight_bytes, 1),
            "square_gflops": round(rate / 1e9),
            **{name: round(shape.flops / s / rate, 2) for name, s in seconds.items()},
        }


def of_update(shape: Shape, multiply: Callable[..., Tensor]) -> dict[str, Callable[[], None]]:
    """The three products of a linear layer in an update: outputs, gradient of the inputs, gradient of the weights."""
    tokens, inputs, outputs, copies = shape.rows, shape.depth, shape.width, shape.copies
    states, grads = torch.randn(copies, tokens, inputs), torch.randn(copies, tokens, outputs)
    weights, into = torch.randn(copies, outputs, inputs), torch.empty(copies, outputs, inputs)
    results, back = torch.empty_like(grads), torch.empty_like(states)

    def forward() -> None:
        for x, weight, out in zip(states, weights, results, strict=True):
            multiply(x, weight.t(), out=out)

    def by_inputs() -> None:
        for grad, weight, out in zip(grads, weights, back, strict=True):
            multiply(grad, weight, out=out)

    def by_weights() -> None:
        for grad, x, out in zip(grads, states, into, strict=True):
            multiply(grad.t(), x, out=out)

    return {"outputs": forward, "by_inputs": by_inputs, "by_weights": by_weights}


def update_ceilings() -> Iterator[dict[str, Any]]:
    """Of the products of an update, with `product` and with torch's."""
    for shape in UPDATE_SHAPES:
        kinds = {"product": of_update(shape, product), "torch": of_update(shape, torch.mm)}
        calls = {f"{name} {kind}": call for name, kind_of in kinds.items() for kind, call in kind_of.items()}
        seconds = best_seconds({"square": square(), **calls})
        rate = 2.0 * SIZE**3 / seconds.pop("square")
        yield {
            "ceiling": "product of an update, share of the square one",
            "workload": shape.workload,
            "what": shape.what,
            "square_gflops": round(rate / 1e9),
            **{name: round(shape.flops / s / rate, 2) for name, s in seconds.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["BENCHMARK_CLOCK"] = arguments.clock
    keep_freed_memory()
    for line in (*rollout_ceilings(), *update_ceilings()):
        print(json.dumps(line | {"threads": arguments.threads}), flush=True)


if __name__ == "__main__":
    main()
