"""What verifiers and reward functions do wrong, and a process that uses a pool. Imported by worker processes: light."""

import ctypes
import os
import sys
import time

from gspo.rewards.pool import VerifierPool


def double(value: float, offset: float = 0.0) -> float:
    return 2.0 * value + offset


def hang(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def hang_on(text: str, seconds: float) -> float:
    time.sleep(seconds)
    return float(len(text))


def hang_in_c(exponent: int) -> bool:
    """One long operation that never lets another Python thread run."""
    return 9**exponent > 0


def crash(*arguments: object) -> bool:
    ctypes.string_at(0)
    return True


def leave() -> bool:
    os._exit(3)


def eat_memory(megabytes: int) -> bool:
    return len(bytearray(megabytes * 2**20)) > 0


def fail(message: str) -> bool:
    raise KeyError(message)


def shout(megabytes: int) -> bool:
    for _ in range(megabytes):
        print("x" * 2**20)
        print("x" * 2**20, file=sys.stderr)
    return True


def return_text() -> str:
    return "yes"


def long_reason() -> tuple[bool, str]:
    return True, "x" * 10_000_000


def loaded_modules() -> tuple[bool, str]:
    return "torch" in sys.modules, ""


def process_id() -> float:
    return float(os.getpid())


def judge_in_new_process(items: list[list[str]], results) -> None:
    """The target of a spawned process."""
    with VerifierPool(1, 5.0, preload=["gspo.rewards.math"]) as pool:
        results.put([verdict.value for verdict in pool.run("gspo.rewards.math:verify", items)])
