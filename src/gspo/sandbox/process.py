"""Watches one run from outside: drains what it says while it runs, and ends it at the first limit."""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gspo.sandbox.limits import STDERR_TAIL_BYTES, Ending, Limits

LOOK_EVERY_S = 0.025
DRAIN_S = 2.0  # after the end; whoever still holds a pipe then is not ours any more
_CHUNK = 1 << 16
_CHILD = re.compile(rb'"child-pid": *(\d+)')
_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4 | 0x8  # F_ADD_SEALS; seal, shrink, grow, write
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Pipe:
    """What one stream of the box said; at most ``limit`` bytes are kept."""

    read_end: int
    write_end: int
    limit: int
    kept: bytearray = field(default_factory=bytearray)
    overflow: bool = False
    ended: bool = False

    @classmethod
    def open(cls, limit: int) -> Pipe:
        """A pipe that the box may also open by its name, such as ``/dev/stdout``, although it has another user id."""
        read_end, write_end = os.pipe()
        os.fchmod(write_end, 0o666)
        os.set_blocking(read_end, False)
        return cls(read_end, write_end, limit)

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        self.close_write_end()
        os.close(self.read_end)

    def drain(self) -> None:
        """Reads what is there; beyond the limit nothing is kept."""
        while not self.overflow:
            try:
                part = os.read(self.read_end, _CHUNK)
            except BlockingIOError:
                return
            if not part:
                self.ended = True
                return
            room = self.limit - len(self.kept)
            self.kept += part[:room]
            self.overflow = len(part) > room


@dataclass
class Launched:
    """A started box: its outermost process, its streams, and how to end it."""

    process: subprocess.Popen[bytes]
    stdout: Pipe
    stderr: Pipe
    status: Pipe  # what the builder of the box reports; the program cannot write there
    end: Callable[[], None]  # ends everything in the box; may be called more than once

    def close(self) -> None:
        for pipe in (self.stdout, self.stderr, self.status):
            pipe.close()


@dataclass(frozen=True)
class Watched:
    """What was seen of a run."""

    limit: Ending | None  # None: the program ended before any limit
    detail: str
    return_code: int
    wall_s: float
    cpu_s: float


def input_file(data: bytes) -> int:
    """A sealed memory file with the input: it cannot be written, not even by its owner. Returns the descriptor."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.fchmod(descriptor, 0o444)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def watch(launched: Launched, limits: Limits) -> Watched:
    """Waits for the end of a run, or ends it at its first limit. Afterwards nothing of it is left."""
    start = looked = time.monotonic()
    process, cpu_s = launched.process, 0.0
    pidfd = os.pidfd_open(process.pid)
    limit: tuple[Ending, str] | None = None
    try:
        with selectors.DefaultSelector() as selector:
            for source in (pidfd, *(pipe.read_end for pipe in _pipes(launched))):
                selector.register(source, selectors.EVENT_READ)
            while limit is None:
                ready = {key.fd for key, _ in selector.select(LOOK_EVERY_S)}
                _drain(launched, ready, selector)
                if pidfd in ready:
                    break
                now = time.monotonic()
                if now - looked >= LOOK_EVERY_S:
                    looked = now
                    cpu_s, limit = _check_usage(process.pid, limits, now - start, cpu_s)
                limit = _overflow(launched, limits) or limit
        launched.end()
        return_code = process.wait()
    finally:
        os.close(pidfd)
    wall_s = time.monotonic() - start
    _drain_rest(launched)
    _await_end(launched.status)
    limit = limit or _overflow(launched, limits)
    return Watched(limit[0] if limit else None, limit[1] if limit else "", return_code, wall_s, cpu_s)


def _pipes(launched: Launched) -> tuple[Pipe, Pipe, Pipe]:
    return launched.stdout, launched.stderr, launched.status


def _drain(launched: Launched, ready: set[int], selector: selectors.BaseSelector) -> None:
    for pipe in _pipes(launched):
        if pipe.read_end in ready:
            pipe.drain()
            if pipe.ended or pipe.overflow:
                selector.unregister(pipe.read_end)


def _drain_rest(launched: Launched) -> None:
    """Reads to the end of the streams, which comes when the last process of the box is gone."""
    deadline = time.monotonic() + DRAIN_S
    for pipe in _pipes(launched):
        while True:
            pipe.drain()
            if pipe.ended or pipe.overflow or time.monotonic() > deadline:
                break
            time.sleep(0.001)


def _await_end(status: Pipe) -> None:
    """Waits for the first process inside to be gone: the kernel lets it go last, after everything else in the box."""
    match = _CHILD.search(status.kept)
    deadline = time.monotonic() + DRAIN_S
    while match and time.monotonic() < deadline:
        fields = _read(f"/proc/{int(match.group(1))}/stat").rpartition(")")[2].split()
        if not fields or fields[0] in "ZX":
            return
        time.sleep(0.001)


def _overflow(launched: Launched, limits: Limits) -> tuple[Ending, str] | None:
    for name, pipe in (("standard output", launched.stdout), ("standard error", launched.stderr)):
        if pipe.overflow:
            return Ending.OUTPUT, f"more than {limits.output_kb} KiB on {name}"
    return None


def _check_usage(
    pid: int, limits: Limits, elapsed: float, cpu_before: float
) -> tuple[float, tuple[Ending, str] | None]:
    """(processor time seen, limit reached): processor time first, then memory, the wall clock last."""
    pids = descendants(pid)
    usages = [usage for usage in map(_usage, pids) if usage is not None]
    cpu_s = max(cpu_before, sum(usage[0] for usage in usages))
    if cpu_s > limits.cpu_s:
        return cpu_s, (Ending.TIME, f"more than {limits.cpu_s:g} s of processor time")
    limit_bytes = limits.memory_mb * 2**20
    if sum(usage[1] for usage in usages) > limit_bytes and sum(map(_proportional_memory, pids)) > limit_bytes:
        return cpu_s, (Ending.MEMORY, f"more than {limits.memory_mb} MiB of memory")
    if elapsed > limits.wall_limit_s:
        return cpu_s, (Ending.TIME, f"more than {limits.wall_limit_s:g} s on the clock")
    return cpu_s, None


def descendants(pid: int) -> list[int]:
    """The process and all that came from it, as far as they still run."""
    found, waiting = [pid], [pid]
    while waiting:
        more = children(waiting.pop())
        found += more
        waiting += more
    return found


def children(pid: int) -> list[int]:
    """The processes that it started and has not waited for."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(word) for task in tasks for word in _read(f"/proc/{pid}/task/{task}/children").split()]


def _read(path: str) -> str:
    """A file under /proc; empty once its process is gone."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _usage(pid: int) -> tuple[float, int] | None:
    """(processor seconds, those of its children that ended included; resident bytes)."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 22:
        return None
    return sum(map(int, fields[11:15])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES


def _proportional_memory(pid: int) -> int:
    """Resident bytes, with shared pages divided among those that share them."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    usage = _usage(pid)
    return usage[1] if usage else 0


def tail(pipe: Pipe) -> bytes:
    """The end of a stream, for messages."""
    return bytes(pipe.kept[-STDERR_TAIL_BYTES:])
