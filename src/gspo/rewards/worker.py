"""The worker process of ``pool.VerifierPool``: runs one verifier call at a time and can be killed at any moment.

Started as ``python -m gspo.rewards.worker``. Speaks frames of JSON (4 bytes length, big endian, then UTF-8) on
standard input and output. Must stay light: no torch, nothing heavy before it is asked for.

It ends when its input closes and when the thread that started it ends. It limits its own address space and the
processor time of each call, so that it cannot outlive a parent that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_FRAME_BYTES = 64 * 2**20
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def write_frame(stream: BinaryIO, message: Any) -> None:
    """Sends one message."""
    data = json.dumps(message).encode()
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any | None:
    """Receives one message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return json.loads(stream.read(int.from_bytes(head, "big")))


def resolve(path: str) -> Callable[..., Any]:
    """The function named ``module:function``."""
    module, _, name = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def main() -> None:
    """Serves calls until the input closes."""
    requests, replies = _take_streams()
    setup = read_frame(requests)
    if setup is None:
        return
    _protect(setup["memory_limit_mb"], setup["parent"])
    for module in setup["preload"]:
        preload = getattr(importlib.import_module(module), "preload", None)
        if preload is not None:
            preload()
    os.dup2(0, 2)  # up to here the parent reads the errors of a failed start
    write_frame(replies, {"ready": True})
    while (request := read_frame(requests)) is not None:
        _limit_processor_time(request["timeout_s"])
        write_frame(replies, _answer(request))


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keeps the protocol's streams to itself: what a verifier prints goes nowhere, what it reads is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    return requests, replies


def _protect(memory_limit_mb: int, parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent was gone before the line above
            os._exit(0)
        limit = memory_limit_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pool


def _limit_processor_time(timeout_s: float) -> None:
    seconds = math.ceil(time.process_time() + timeout_s) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(ValueError):  # a lower hard limit is already in force
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request. What the verifier raises is data for the parent, named by its type."""
    start = time.perf_counter()
    try:
        result = resolve(request["function"])(*request["args"], **request["options"])
        value, reason = _plain(result)
        reply: dict[str, Any] = {"value": value, "reason": reason, "rung": str(getattr(result, "rung", ""))}
    except MemoryError:
        reply = {"out_of_memory": True}
    except Exception as error:  # whatever it is, it is reported with its type
        reply = {"failure": f"{type(error).__name__}: {error}"[:500]}
    return {**reply, "seconds": time.perf_counter() - start}


def _plain(result: Any) -> tuple[bool | float | None, str]:
    """A ``Judgement``, ``(value, reason)``, or a bare value, as JSON can carry it."""
    if hasattr(result, "correct"):
        return result.correct, f"{result.rung}: {result.reason}"[:500]
    value, reason = result if isinstance(result, tuple) else (result, "")
    if value is not None and not isinstance(value, (bool, int, float)):
        raise TypeError(f"a verifier returned {type(value).__name__}, not a bool, a number or None")
    return value, str(reason)[:500]


if __name__ == "__main__":
    main()
