"""The sandbox that callers use: picks an isolation that proves itself on this machine, and runs programs in it."""

from __future__ import annotations

import os
import queue
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gspo.errors import InputError, RunError
from gspo.sandbox.bubblewrap import Bubblewrap
from gspo.sandbox.interpreter import Interpreter, candidates
from gspo.sandbox.limits import BoxResult, Ending, Limits
from gspo.sandbox.native import Native
from gspo.sandbox.process import Launched, tail, watch
from gspo.sandbox.selftest import escapes
from gspo.sandbox.users import box_user

ISOLATIONS = ("auto", "bubblewrap", "landlock", "none")
NUM_TRIES = 3  # of a box that could not be built


class Backend(Protocol):
    """A way to build boxes."""

    interpreter: Interpreter

    @property
    def name(self) -> str: ...

    def place(self, directory: Path) -> str: ...

    def launch(self, directory: Path, argv: Sequence[str], stdin: bytes, slot: int, limits: Limits) -> Launched: ...

    def outcome(self, status: bytes, return_code: int) -> int | str: ...


class Sandbox:
    """Runs programs, each in a fresh box, at most ``num_slots`` at the same time (more callers wait).

    It may be used from any thread and holds no process between runs.
    """

    def __init__(self, backend: Backend, num_slots: int | None = None, rejected: Sequence[str] = ()) -> None:
        self.backend = backend
        self.rejected = tuple(rejected)  # isolations that would have been better, and why they do not work here
        self.num_slots = num_slots or len(os.sched_getaffinity(0))
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.num_slots):
            self._slots.put(slot)

    @property
    def isolation(self) -> str:
        return self.backend.name

    def run_python(
        self,
        files: Mapping[str, str | bytes],
        script: str = "main.py",
        arguments: Sequence[str] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> BoxResult:
        """Runs ``script``, one of ``files``, with the box's Python; ``{box}`` in an argument is the files' directory.

        A box that cannot be built is tried again; after ``NUM_TRIES`` the ending is FAILURE.
        """
        # Without -S: programs end with exit(), which site gives them; it finds no packages or user files in a box.
        python = [self.backend.interpreter.executable, "-I", "-B", "-X", "utf8", f"{{box}}/{script}"]
        return self.run([*python, *arguments], files, stdin, limits)

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, str | bytes],
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> BoxResult:
        """Runs a command; see ``run_python``."""
        limits = limits or Limits()
        with self._slot() as slot:
            result = self._run_once(argv, files, stdin, slot, limits)
            for number in range(1, NUM_TRIES):
                if not result.failed:
                    break
                time.sleep(0.1 * number)
                result = self._run_once(argv, files, stdin, slot, limits)
        return result

    @contextmanager
    def _slot(self) -> Iterator[int]:
        slot = self._slots.get()
        try:
            yield slot
        finally:
            self._slots.put(slot)

    def _run_once(
        self, argv: Sequence[str], files: Mapping[str, str | bytes], stdin: bytes, slot: int, limits: Limits
    ) -> BoxResult:
        try:
            with _directory(files, box_user(slot)) as directory:
                place = self.backend.place(directory)
                words = [word.replace("{box}", place) for word in argv]
                launched = self.backend.launch(directory, words, stdin, slot, limits)
                try:
                    return _result(self.backend, launched, limits)
                finally:
                    launched.end()
                    launched.process.wait()
                    launched.close()
        except (OSError, subprocess.SubprocessError) as error:
            return BoxResult(Ending.FAILURE, detail=f"{type(error).__name__}: {error}")


def _result(backend: Backend, launched: Launched, limits: Limits) -> BoxResult:
    watched = watch(launched, limits)
    said = {"stdout": bytes(launched.stdout.kept), "stderr": tail(launched.stderr)}
    spent = {"wall_s": watched.wall_s, "cpu_s": watched.cpu_s}
    if watched.limit is not None:
        return BoxResult(watched.limit, detail=watched.detail, **said, **spent)  # type: ignore[arg-type]
    outcome = backend.outcome(bytes(launched.status.kept), watched.return_code)
    if isinstance(outcome, str):
        return BoxResult(Ending.FAILURE, detail=outcome, **said, **spent)  # type: ignore[arg-type]
    if outcome == 128 + 9 and watched.wall_s >= limits.cpu_s:  # the kernel's own clock came first
        return BoxResult(Ending.TIME, detail="killed at the limit of processor time", **said, **spent)  # type: ignore[arg-type]
    return BoxResult(Ending.EXIT, outcome, **said, **spent)  # type: ignore[arg-type]


@contextmanager
def _directory(files: Mapping[str, str | bytes], user: int | None) -> Iterator[Path]:
    """A directory with the files, readable by the box's user and nobody else."""
    directory = Path(tempfile.mkdtemp(prefix="gspo-box-"))
    try:
        for name, content in files.items():
            path = directory / name
            path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
            path.chmod(stat.S_IRUSR | stat.S_IXUSR)
            if user is not None:
                os.chown(path, user, user)
        directory.chmod(stat.S_IRUSR | stat.S_IXUSR)
        if user is not None:
            os.chown(directory, user, user)
        yield directory
    finally:
        directory.chmod(stat.S_IRWXU)
        shutil.rmtree(directory)


def open_sandbox(isolation: str = "auto", num_slots: int | None = None) -> Sandbox:
    """A sandbox whose isolation has been tested on this machine.

    Args:
        isolation: "bubblewrap", "landlock", "auto" (the first of these that works), or "none": limits only, for
            programs that are trusted.
        num_slots: boxes at the same time; default the number of cores.

    Raises:
        InputError: an unknown name, or no isolation works here; the message says why not.
    """
    if isolation not in ISOLATIONS:
        raise InputError(f"there is no isolation {isolation!r}; there are {', '.join(ISOLATIONS)}")
    if sys.platform != "linux":
        raise InputError(f"programs can be run in a sandbox on Linux only, and this is {sys.platform}")
    pythons = list(candidates())
    if not pythons:
        raise InputError("the sandbox found no Python 3.11 or later that it could run; install python3")
    reasons: list[str] = []
    for name in ("bubblewrap", "landlock") if isolation == "auto" else (isolation,):
        for python in pythons:
            try:
                sandbox = Sandbox(_backend(name, python), num_slots, reasons)
                problem = escapes(sandbox)
            except InputError as error:
                problem = str(error)
            if not problem:
                return sandbox
            reasons.append(f"{name} with {python.executable}: {problem}")
    raise InputError(
        f"no isolation works on this machine ({'; '.join(reasons)}). Programs written by a model are not run without "
        'one, unless you ask for it by name: isolation = "none"'
    )


def _backend(name: str, python: Interpreter) -> Backend:
    if name == "bubblewrap":
        return Bubblewrap(python)
    return Native(python, confined=name == "landlock")


def require_result(result: BoxResult) -> BoxResult:
    """The result itself.

    Raises:
        RunError: the box failed.
    """
    if result.failed:
        raise RunError(f"the sandbox failed {NUM_TRIES} times: {result.detail}")
    return result
