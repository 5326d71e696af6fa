"""The default box: bubblewrap with own namespaces, own user, no capabilities, a seccomp filter and limits.

Chain of one run: ``bwrap`` builds namespaces and mounts and installs the filter, ``setpriv`` (only for root) takes the
box's own user id and gives up every capability, ``prlimit`` sets the limits, then Python starts. No word of the chain
names anything of the host: the mounts are handed over through a descriptor. Inside, ``/proc/1`` (bwrap itself) is an
empty directory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gspo.errors import InputError
from gspo.sandbox.interpreter import Interpreter
from gspo.sandbox.limits import Limits
from gspo.sandbox.process import Launched, Pipe, children, input_file
from gspo.sandbox.seccomp import build_filter
from gspo.sandbox.users import box_user

BOX = "/box"
_TOP_LINKS = ("/lib", "/lib64", "/lib32", "/bin")
_STATUS_BYTES = 1 << 16


class Bubblewrap:
    """Builds boxes with bubblewrap.

    Raises:
        InputError: bwrap, prlimit or setpriv is missing, or pyseccomp is not installed.
    """

    name = "bubblewrap"

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self._bwrap = _find("bwrap", "bubblewrap")
        self._prlimit = _find("prlimit", "util-linux")
        self._setpriv = _find("setpriv", "util-linux") if os.geteuid() == 0 else ""
        self._filter = build_filter()

    def place(self, directory: Path) -> str:
        """Where the box sees the directory of the run."""
        return BOX

    def launch(self, directory: Path, argv: Sequence[str], stdin: bytes, slot: int, limits: Limits) -> Launched:
        """Starts ``argv`` in a fresh box that sees ``directory`` as ``/box``."""
        user = box_user(slot)
        pipes = [Pipe.open(limits.output_kb * 1024), Pipe.open(limits.output_kb * 1024), Pipe.open(_STATUS_BYTES)]
        words = [*self._mounts(directory, limits, user), "--json-status-fd", str(pipes[2].write_end)]
        descriptors = [input_file(stdin), input_file("\0".join(words).encode()), input_file(self._filter)]
        command = [self._bwrap, "--args", str(descriptors[1]), "--seccomp", str(descriptors[2]), "--"]
        try:
            process = subprocess.Popen(
                [*command, *self._take_user(user), *self._take_limits(limits), *argv],
                stdin=descriptors[0],
                stdout=pipes[0].write_end,
                stderr=pipes[1].write_end,
                pass_fds=(*descriptors[1:], pipes[2].write_end),
                env={},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the judge
            )
        except OSError:
            for pipe in pipes:
                pipe.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for pipe in pipes:
            pipe.close_write_end()
        return Launched(process, pipes[0], pipes[1], pipes[2], end=lambda: _end(process))

    def _mounts(self, directory: Path, limits: Limits, user: int | None) -> list[str]:
        words = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try"]
        words += ["--die-with-parent", "--new-session", "--hostname", "box", "--cap-drop", "ALL"]
        if user is None:
            words += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
        else:
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):  # setpriv needs them to give them up
                words += ["--cap-add", capability]
        python = self.interpreter
        paths = [*python.system, *python.stdlib, self._prlimit, *([self._setpriv] if self._setpriv else [])]
        for parent in _parents(paths):  # bwrap itself would make them for root only
            words += ["--dir", parent]
        for path in paths:
            words += ["--ro-bind", path, path]
        for path in python.installed_packages:
            words += ["--tmpfs", path, "--remount-ro", path]
        for link in _TOP_LINKS:
            if os.path.islink(link):
                words += ["--symlink", os.readlink(link), link]
        words += ["--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]  # bwrap's own memory and words
        words += ["--dev", "/dev", "--remount-ro", "/dev"]
        words += ["--perms", "1777", "--size", str(limits.scratch_mb * 2**20), "--tmpfs", "/tmp"]
        return [*words, "--ro-bind", str(directory), BOX, "--remount-ro", "/", "--chdir", "/tmp"]

    def _take_user(self, user: int | None) -> list[str]:
        if user is None:
            return []
        ids = ["--reuid", str(user), "--regid", str(user), "--clear-groups"]
        return [self._setpriv, *ids, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]

    def _take_limits(self, limits: Limits) -> list[str]:
        return [self._prlimit, *(f"--{name}={soft}:{hard}" for name, (soft, hard) in resource_limits(limits).items())]

    def outcome(self, status: bytes, return_code: int) -> int | str:
        """The exit status of the program, or in words why there is none."""
        reports = [json.loads(line) for line in status.decode().splitlines() if line.strip()]
        for report in reports:
            if "exit-code" in report:
                return int(report["exit-code"])
        return f"bubblewrap ended with {return_code} before the program did"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a box that still runs. bwrap's children die with it, but not in the moment before they asked for that."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # from here on it starts and reaps nobody: no id can change hands
    for child in children(process.pid):
        with contextlib.suppress(ProcessLookupError):  # reaped before the stop took effect
            os.kill(child, signal.SIGKILL)
    process.kill()


def resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """(soft, hard) by the name that prlimit(1) uses. The clock of the kernel counts whole seconds: see ``process``."""
    memory, cpu = limits.memory_mb * 2**20, math.ceil(limits.cpu_s) + 1
    stack = min(64 * 2**20, memory // 2)
    scratch = limits.scratch_mb * 2**20
    return {
        "as": (memory, memory),
        "cpu": (cpu, cpu),
        "nproc": (limits.max_processes, limits.max_processes),
        "fsize": (scratch, scratch),
        "nofile": (256, 256),
        "stack": (stack, memory),
        "core": (0, 0),
    }


def _parents(paths: Sequence[str]) -> list[str]:
    """The directories above the paths, upper ones first."""
    return sorted({str(parent) for path in paths for parent in Path(path).parents if str(parent) != "/"})


def _find(program: str, package: str) -> str:
    path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    if path is None:
        raise InputError(f"there is no {program} on this machine: install {package} (apt-get install {package})")
    return os.path.realpath(path)
