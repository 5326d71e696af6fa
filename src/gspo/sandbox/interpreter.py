"""Which Python runs in the box, and the paths that it needs and nothing more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

MINIMUM_VERSION = (3, 11)
#: Printed by a candidate about itself; the shared objects that it maps tell where the system keeps its libraries.
_QUESTIONS = """
import ctypes, json, os, sys, sysconfig
maps = open("/proc/self/maps").read().split("\\n")
libraries = {line.split(None, 5)[5] for line in maps if ".so" in line and len(line.split(None, 5)) > 5}
print(json.dumps({
    "executable": os.path.realpath(sys.executable),
    "version": list(sys.version_info[:3]),
    "stdlib": sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}),
    "libraries": sorted(libraries),
}))
"""
_LOADERS = ("/usr/lib64", "/lib64", "/etc/ld.so.cache")
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Interpreter:
    """A Python and what it reads."""

    executable: str
    version: tuple[int, ...]
    stdlib: tuple[str, ...]  # directories; installed packages in them are not shown
    system: tuple[str, ...]  # library directories, the loader, the executable

    @property
    def installed_packages(self) -> list[str]:
        """Directories inside the standard library that hold installed packages."""
        paths = [os.path.join(directory, name) for directory in self.stdlib for name in _PACKAGES]
        return [path for path in paths if os.path.isdir(path)]


def candidates() -> Iterator[Interpreter]:
    """Interpreters of at least ``MINIMUM_VERSION``; those outside home directories first.

    A Python inside a home directory drags a path of that directory into the box, and another user cannot reach it.
    """
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)
    paths = dict.fromkeys((base, "/usr/bin/python3", "/usr/local/bin/python3"))
    found = [answer for path in paths if os.path.exists(path) and (answer := inspect(path)) is not None]
    seen: set[str] = set()
    for interpreter in sorted(found, key=lambda one: one.executable.startswith(("/root/", "/home/"))):
        if interpreter.executable not in seen and interpreter.version >= MINIMUM_VERSION:
            seen.add(interpreter.executable)
            yield interpreter


def inspect(path: str) -> Interpreter | None:
    """What a Python says of itself; None if it cannot be run."""
    try:
        said = subprocess.run([path, "-I", "-S", "-c", _QUESTIONS], capture_output=True, timeout=30, env={}, check=True)
        answers = json.loads(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    stdlib = tuple(answers["stdlib"])
    inside = tuple(f"{directory}/" for directory in stdlib)
    directories = {os.path.dirname(os.path.realpath(p)) for p in answers["libraries"] if not p.startswith(inside)}
    loaders = {path for path in _LOADERS if os.path.exists(path) and not os.path.islink(path)}
    system = sorted({*directories, *loaders, answers["executable"]})
    return Interpreter(answers["executable"], tuple(answers["version"]), stdlib, tuple(system))
