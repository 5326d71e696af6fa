"""Does the box hold? Asked once at the start, by a program that tries to get out."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from gspo.sandbox.guest import PROBE
from gspo.sandbox.limits import BoxResult, Ending, Limits

_LIMITS = Limits(cpu_s=10.0, wall_s=30.0)


class Runner(Protocol):
    """What the test needs of a sandbox."""

    @property
    def isolation(self) -> str: ...

    def run_python(
        self, files: Mapping[str, str | bytes], script: str, *, stdin: bytes, limits: Limits
    ) -> BoxResult: ...


def escapes(sandbox: Runner) -> str:
    """What the box lets through, or why it could not be built; empty if it holds.

    With isolation "none" only whether programs run at all is tested.
    """
    with tempfile.NamedTemporaryFile(prefix="gspo-secret-") as secret:
        os.chmod(secret.name, 0o644)
        question = f"{secret.name}\n{os.getpid()}\n".encode()
        result = sandbox.run_python({"main.py": PROBE.read_text()}, "main.py", stdin=question, limits=_LIMITS)
    if result.ending is not Ending.EXIT or result.exit_status != 0:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        return result.detail or (said[-1] if said else f"the probe ended with {result.exit_status}")
    if sandbox.isolation == "none":
        return ""
    return "; ".join(_problems(json.loads(result.stdout)))


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    refused = {
        "read_secret": "files of the host can be read",
        "write_here": "the program's own directory can be written",
        "write_system": "system directories can be written",
        "socket": "sockets can be opened",
        "unix_socket": "unix sockets can be opened",
        "other_process": "processes of the host can be signalled",
    }
    for name, problem in refused.items():
        if found[name] is None:
            yield problem
    if found["user"] == 0:
        yield "the program runs as root"
    if found["environment"]:
        yield "the environment is not empty"
    kernel = found["kernel"]
    if kernel is not None:
        if kernel["NoNewPrivs"] != "1" or kernel["Seccomp"] != "2":
            yield "no system call filter is in force"
        if any(int(kernel[name], 16) for name in ("CapEff", "CapPrm")):
            yield "the program has capabilities"
