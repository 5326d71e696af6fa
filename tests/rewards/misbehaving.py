"""Reward functions of users that do everything wrong. Imported by worker processes: light."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any


def behave(prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str]) -> list[Any]:
    """Does what the completion says; 0.5 for an answer that says nothing special."""
    word = completions[0]
    if word == "hang":
        time.sleep(60)
    if word == "hang in C":
        9 ** (10**9)
    if word == "crash":
        ctypes.string_at(0)
    if word == "leave":
        os._exit(0)
    if word == "eat":
        return [len(bytearray(1 << 40))]
    if word == "print":
        for _ in range(200):
            print("x" * 1_000_000)
            os.write(1, b"y" * 1_000_000)
    if word.startswith("crash once "):
        mark = word.removeprefix("crash once ")
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)
    if word == "raise":
        raise KeyError("column")
    values: dict[str, Any] = {"nan": [float("nan")], "inf": [float("inf")], "none": [None], "text": ["good"],
                              "too many": [1.0, 2.0], "bare": 1.0}  # fmt: skip
    if word in values:
        return values[word]
    return [0.5 + (completions[0] == answer[0]) * 0.5]


async def later(completions: list[str], factor: float = 1.0) -> list[float]:
    return [factor * len(completions[0])]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth)}
