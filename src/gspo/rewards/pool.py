"""Killable worker processes for verifiers, with a wall-clock limit for each item.

The limit is kept by killing the process from outside: neither a signal handler (main thread only, and blind to C
code that holds the interpreter) nor a thread (cannot be ended) can promise it.

Each worker has one thread here that starts it, talks to it and replaces it. A pool can be used from any thread, from
asyncio (``run_async``), and in any process, also one that inherited it by fork: there it starts afresh.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gspo.errors import RewardError, RunError
from gspo.events.secrets import without_secrets
from gspo.rewards.verdict import Verdict

START_TIMEOUT_S = 120.0
START_ATTEMPTS = 3
MAX_REPLY_BYTES = 1 << 20
COUNTERS = ("items", "timeouts", "out_of_memory", "crashes", "errors", "starts")


class WorkerGoneError(Exception):
    """The worker process ended, or sent something that is not a reply."""


class WorkerLateError(Exception):
    """The worker did not reply in time."""


@dataclass(frozen=True)
class _Job:
    function: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    done: Future[Verdict] = field(default_factory=Future)


@dataclass
class _State:
    """What the threads share; they hold no reference to the pool, so that dropping the pool ends them."""

    jobs: queue.SimpleQueue[_Job | None]
    setup: Mapping[str, Any]
    timeout_s: float
    owner: int
    environment: frozenset[str]
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: list[threading.Thread] = field(default_factory=list)
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    pending: int = 0  # jobs that are not done
    closed: bool = False


class VerifierPool:
    """Runs ``module:function`` over items in worker processes.

    Args:
        num_workers: processes at most; they are started when first needed.
        timeout_s: wall-clock seconds of one item; then its process is killed.
        memory_limit_mb: address space of one worker.
        preload: modules that a worker imports before its first item (and whose ``preload()`` it calls), so that no
            item pays for imports.
        environment: names of secrets (as ``events.secrets`` knows them) that the workers may see; they get no other.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout_s: float = 5.0,
        memory_limit_mb: int = 2048,
        preload: Sequence[str] = (),
        environment: Sequence[str] = (),
    ) -> None:
        if num_workers < 1 or not timeout_s > 0:
            raise RewardError(
                f"a verifier pool needs at least 1 worker and a positive limit, not {num_workers} and {timeout_s} s"
            )
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._setup = {"memory_limit_mb": memory_limit_mb, "preload": list(preload)}
        self._environment = frozenset(environment)
        self._start()

    def _start(self) -> None:
        self._state = _State(queue.SimpleQueue(), self._setup, self.timeout_s, os.getpid(), self._environment)
        self._finalizer = weakref.finalize(self, _shut_down, self._state)

    def run(
        self, function: str, items: Sequence[Sequence[Any]], options: Mapping[str, Any] | None = None
    ) -> list[Verdict]:
        """One verdict per item, in order; each item is the positional arguments of one call.

        A call that ran into a limit, crashed its process or raised gives a verdict with ``value None`` and the reason.

        Raises:
            RunError: the pool is closed, or no worker can be started.
            TypeError: an argument cannot be sent as JSON.
        """
        return [done.result() for done in self._submit(function, items, options)]

    async def run_async(
        self, function: str, items: Sequence[Sequence[Any]], options: Mapping[str, Any] | None = None
    ) -> list[Verdict]:
        """``run`` for asyncio; the event loop is not blocked."""
        return list(await asyncio.gather(*map(asyncio.wrap_future, self._submit(function, items, options))))

    def _submit(
        self, function: str, items: Sequence[Sequence[Any]], options: Mapping[str, Any] | None
    ) -> list[Future[Verdict]]:
        if self._state.owner != os.getpid():  # inherited by fork: threads and pipes belong to the parent
            self._finalizer.detach()
            self._start()
        state = self._state
        jobs = [_Job(function, tuple(item), dict(options or {})) for item in items]
        with state.lock:
            if state.closed:
                raise RunError("the verifier pool is closed")
            state.pending += len(jobs)
            while len(state.threads) < min(self.num_workers, state.pending):
                thread = threading.Thread(target=_serve, args=(state,), name="gspo-verifier", daemon=True)
                state.threads.append(thread)
                thread.start()
            for job in jobs:
                state.jobs.put(job)
        return [job.done for job in jobs]

    @property
    def counters(self) -> dict[str, int]:
        """Since the start; ``errors``: the verifier raised, ``starts``: processes started."""
        with self._state.lock:
            return dict(self._state.counters)

    @property
    def process_ids(self) -> list[int]:
        """Of the living workers."""
        with self._state.lock:
            return [process.pid for process in self._state.processes if process.poll() is None]

    def close(self) -> None:
        """Ends all workers; items still running get a verdict that says so."""
        self._finalizer()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _shut_down(state: _State) -> None:
    if state.owner != os.getpid():
        return
    with state.lock:
        state.closed = True
        threads = list(state.threads)
        for process in state.processes:
            process.kill()
    for _ in threads:
        state.jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5)


def _serve(state: _State) -> None:
    """The life of one thread: takes jobs, keeps one worker process alive for them."""
    worker: _Worker | None = None
    while (job := state.jobs.get()) is not None:
        if job.done.set_running_or_notify_cancel():
            worker = _work(state, worker, job)
        with state.lock:
            state.pending -= 1
    if worker is not None:
        worker.end()


def _work(state: _State, worker: _Worker | None, job: _Job) -> _Worker | None:
    """Does one job, with a new worker if the old one is gone; whatever happens, the job is answered."""
    try:
        if state.closed:
            verdict = Verdict(None, 0.0, "the verifier pool was closed")
        else:
            worker = worker if worker is not None and worker.alive else _new_worker(state)
            verdict = _judge(worker, job, state)
            _count(state, verdict)
    except BaseException as error:  # the caller gets it, in its own thread
        job.done.set_exception(error)
    else:
        job.done.set_result(verdict)
    return worker


def _new_worker(state: _State) -> _Worker:
    """Starts a worker; one that is killed while it starts, by whomever, is started again."""
    for _ in range(START_ATTEMPTS - 1):
        try:
            return _Worker(state)
        except RunError:
            if state.closed:
                raise
    return _Worker(state)


def _count(state: _State, verdict: Verdict) -> None:
    with state.lock:
        counters = state.counters
        counters["items"] += 1
        counters["timeouts"] += verdict.timed_out
        counters["out_of_memory"] += verdict.out_of_memory


def _judge(worker: _Worker, job: _Job, state: _State) -> Verdict:
    start = time.perf_counter()
    request = {"function": job.function, "args": job.args, "options": job.options, "timeout_s": state.timeout_s}
    try:
        reply = worker.exchange(request, state.timeout_s)
    except WorkerLateError:
        worker.end()
        seconds = time.perf_counter() - start
        return Verdict(None, seconds, f"ran into the limit of {state.timeout_s:g} s", timed_out=True)
    except WorkerGoneError as error:
        worker.end()
        if not state.closed:
            _add(state, "crashes")
        return Verdict(None, time.perf_counter() - start, f"the verifier process crashed ({error})")
    if reply.get("out_of_memory"):
        worker.end()  # a fresh heap for the next item
        return Verdict(None, reply["seconds"], "ran into the memory limit", out_of_memory=True)
    if "failure" in reply:
        _add(state, "errors")
        return Verdict(None, reply["seconds"], f"the verifier raised {reply['failure']}")
    return Verdict(reply["value"], reply["seconds"], reason=reply["reason"], rung=reply["rung"])


def _add(state: _State, name: str) -> None:
    with state.lock:
        state.counters[name] += 1


class _Worker:
    """One process and the frames to and from it."""

    def __init__(self, state: _State) -> None:
        self._state = state
        paths = [os.path.abspath(path) for path in sys.path]
        inherited = without_secrets(os.environ, state.environment)
        environment = {**inherited, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-P", "-m", "gspo.rewards.worker"]
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, bufsize=0)
        except OSError as error:
            raise RunError(f"a verifier process could not be started: {error}") from error
        with state.lock:
            state.processes.add(self.process)
            state.counters["starts"] += 1
            if state.closed:
                self.process.kill()
        self._greet()

    def _greet(self) -> None:
        try:
            self.exchange({**self._state.setup, "parent": os.getpid()}, START_TIMEOUT_S)
        except (WorkerGoneError, WorkerLateError) as error:
            self.process.kill()
            assert self.process.stderr is not None
            said = self.process.stderr.read()[-500:].decode(errors="replace").strip()
            self.end()
            raise RunError(f"a verifier process did not start: {said or error}") from error

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def exchange(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """Sends a message and waits for the reply.

        Raises:
            WorkerLateError: the time is over.
            WorkerGoneError: the process ended or broke the protocol.
        """
        deadline = time.monotonic() + timeout_s
        data = json.dumps(message).encode()
        self._send(memoryview(len(data).to_bytes(4, "big") + data), deadline)
        size = int.from_bytes(self._receive(4, deadline), "big")
        if size > MAX_REPLY_BYTES:
            raise WorkerGoneError(f"a reply of {size} bytes")
        try:
            reply = json.loads(self._receive(size, deadline))
        except ValueError as error:
            raise WorkerGoneError("a broken reply") from error
        if not isinstance(reply, dict):
            raise WorkerGoneError("a broken reply")
        return reply

    def _send(self, data: memoryview, deadline: float) -> None:
        assert self.process.stdin is not None
        descriptor = self.process.stdin.fileno()
        os.set_blocking(descriptor, False)
        while data:
            self._wait(descriptor, select.POLLOUT, deadline)
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerGoneError(self._how_it_ended()) from error

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        parts: list[bytes] = []
        while size > 0:
            self._wait(descriptor, select.POLLIN, deadline)
            part = os.read(descriptor, min(size, 1 << 16))
            if not part:
                raise WorkerGoneError(self._how_it_ended())
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    @staticmethod
    def _wait(descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise WorkerLateError

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def end(self) -> None:
        """Kills the process and waits for it; nothing is left behind."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        with self._state.lock:
            self._state.processes.discard(self.process)
