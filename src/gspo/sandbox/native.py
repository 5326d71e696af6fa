"""The second box, where user namespaces are forbidden: Landlock, a seccomp filter, limits and an own user.

Weaker than bubblewrap in what it hides: names of files can be probed, though nothing of them can be read or listed, and
nothing at all can be written. As an ordinary user the limit of processes is shared with the user's other processes.

The same code with ``confined=False`` is isolation "none": limits and an own user, but files and network are open.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gspo.errors import InputError
from gspo.sandbox.bubblewrap import resource_limits
from gspo.sandbox.guest import SUPERVISOR
from gspo.sandbox.interpreter import Interpreter
from gspo.sandbox.limits import Limits
from gspo.sandbox.process import Launched, Pipe, input_file
from gspo.sandbox.seccomp import build_filter
from gspo.sandbox.users import box_user

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_CREATE_RULESET, _VERSION_FLAG = 444, 1
_STATUS_BYTES = 1 << 16
#: From this version on Landlock keeps signals inside the box.
_SCOPED_SIGNALS = 6


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 if it has none or it is switched off."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))))


class Native:
    """Builds boxes from the kernel's own restrictions of a process.

    Raises:
        InputError: confined, and the kernel lacks Landlock, or pyseccomp is not installed.
    """

    def __init__(self, interpreter: Interpreter, confined: bool = True) -> None:
        self.name = "landlock" if confined else "none"
        self.interpreter = interpreter
        self._version = landlock_version() if confined else 0
        if confined and not self._version:
            raise InputError(
                "the kernel has no Landlock (Linux 5.13 or later, with landlock among its security modules)"
            )
        alone = os.geteuid() == 0 or self._version >= _SCOPED_SIGNALS
        self._filter = build_filter(signals=alone).hex() if confined else ""
        self._readable, self._listed = _readable(interpreter)

    def place(self, directory: Path) -> str:
        """Where the box sees the directory of the run."""
        return str(directory)

    def launch(self, directory: Path, argv: Sequence[str], stdin: bytes, slot: int, limits: Limits) -> Launched:
        """Starts ``argv`` under a supervisor; ``directory`` can be read."""
        config = self._config(directory, argv, slot, limits)
        pipes = [Pipe.open(limits.output_kb * 1024), Pipe.open(limits.output_kb * 1024), Pipe.open(_STATUS_BYTES)]
        leash, hand = os.pipe()
        descriptors = [input_file(stdin), input_file(json.dumps(config).encode()), leash]
        given = (descriptors[1], pipes[2].write_end, leash)
        python = self.interpreter.executable
        try:
            process = subprocess.Popen(
                [python, "-I", "-S", str(SUPERVISOR), *map(str, given)],
                stdin=descriptors[0],
                stdout=pipes[0].write_end,
                stderr=pipes[1].write_end,
                pass_fds=given,
                env={},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the judge
            )
        except OSError:
            os.close(hand)
            for pipe in pipes:
                pipe.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for pipe in pipes:
            pipe.close_write_end()
        return Launched(process, pipes[0], pipes[1], pipes[2], end=_Leash(hand).release)

    def _config(self, directory: Path, argv: Sequence[str], slot: int, limits: Limits) -> dict[str, object]:
        return {
            "argv": list(argv),
            "directory": str(directory),
            "user": box_user(slot),
            "limits": resource_limits(limits),
            "landlock": self._version,
            "readable": [*self._readable, str(directory)],
            "listed": self._listed,
            "filter": self._filter,
        }

    def outcome(self, status: bytes, return_code: int) -> int | str:
        """The exit status of the program, or in words why there is none."""
        for line in status.decode().splitlines():
            report = json.loads(line)
            if "failure" in report:
                return f"the box could not be built: {report['failure']}"
            if "exit-code" in report:
                return int(report["exit-code"])
        return f"the supervisor ended with {return_code}"


class _Leash:
    """The judge's end of a pipe; the supervisor ends the box when it is closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _readable(interpreter: Interpreter) -> tuple[list[str], list[str]]:
    """(paths to be read with all below them, directories that may be listed); installed packages are in neither."""
    hidden = {os.path.basename(path) for path in interpreter.installed_packages}
    inside = [
        os.path.join(directory, name)
        for directory in interpreter.stdlib
        for name in sorted(os.listdir(directory))
        if name not in hidden
    ]
    system: list[str] = []
    for path in interpreter.system:
        above = any(directory.startswith(f"{path}/") for directory in interpreter.stdlib)
        system += _files_in(path) if above else [path]
    return [*system, *_DEVICES, *inside], list(interpreter.stdlib)


def _files_in(directory: str) -> list[str]:
    """The files right in a directory, for one that has the standard library, and so installed packages, below it."""
    with os.scandir(directory) as entries:
        return [entry.path for entry in entries if entry.is_file()]
