"""The yardstick: how fast this machine multiplies float32 matrices right now."""

from __future__ import annotations

import torch

from benchmarks.protocol import clock

SIZE = 2048


def gemm_flops_per_second(seconds: float = 1.0, size: int = SIZE) -> float:
    """Operations per second of a square product, median of as many as fit into the time."""
    a, b = torch.randn(2, size, size)
    out = torch.empty(size, size)
    times: list[float] = []
    torch.mm(a, b, out=out)
    deadline = clock() + seconds
    while len(times) < 3 or clock() < deadline:
        start = clock()
        torch.mm(a, b, out=out)
        times.append(clock() - start)
    return 2.0 * size**3 / sorted(times)[len(times) // 2]
