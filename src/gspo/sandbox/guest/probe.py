"""Tries what a box must not allow. Reads the name of a secret file of the judge, prints what it found as JSON."""

import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any


def attempt(action: Callable[..., object], *arguments: object) -> str | None:
    """None if it worked, else the name of the error."""
    try:
        action(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return None


def status() -> dict[str, str]:
    with open("/proc/self/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def main() -> None:
    secret = sys.stdin.readline().strip()
    found: dict[str, Any] = {
        "read_secret": attempt(open, secret),
        "write_here": attempt(open, os.path.abspath(__file__), "a"),
        "write_system": attempt(open, "/usr/gspo-probe", "w"),
        "socket": attempt(socket.socket, socket.AF_INET, socket.SOCK_STREAM),
        "unix_socket": attempt(socket.socket, socket.AF_UNIX, socket.SOCK_STREAM),
        "other_process": attempt(os.kill, int(sys.stdin.readline()), 0),
        "user": os.getuid(),
        "environment": sorted(set(os.environ) - {"LC_CTYPE", "PWD"}),  # set by Python and bwrap themselves
        "version": list(sys.version_info[:2]),
    }
    try:
        found["kernel"] = {name: status()[name] for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapPrm", "CapBnd")}
    except OSError:
        found["kernel"] = None
    print(json.dumps(found))


main()
