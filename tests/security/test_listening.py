"""Nothing that a run starts listens on the network, loopback included."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from .runs import train

LISTENING = "0A"  # the state in /proc/net/tcp

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")


def family(process: int) -> set[int]:
    """A process and all that it started and that is still alive."""
    found, open_ = {process}, [process]
    while open_:
        parent = open_.pop()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = {int(word) for word in path.read_text().split()}
            except OSError:
                continue
            open_ += children - found
            found |= children
    return found


def sockets(process: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    inodes = set()
    try:
        entries = list(os.scandir(f"/proc/{process}/fd"))
    except OSError:
        return set()
    for entry in entries:
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes


def listeners(process: int) -> set[str]:
    """Addresses on which a process, or one of its children, listens."""
    own = set().union(*(sockets(member) for member in family(process)))
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[3] == LISTENING and words[9] in own:
                found.add(words[1])
    return found


class Watch:
    """Looks all the time until it is told to end."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.looks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._end.wait(0.005):
            self.found |= listeners(os.getpid())
            self.looks += 1

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_a_run_listens_nowhere(tmp_path: Path) -> None:
    """With verifier processes, an evaluation before and after, and a checkpoint."""
    before = listeners(os.getpid())
    with Watch() as watch:
        train(tmp_path)
    assert watch.looks > 10
    assert watch.found <= before


def test_the_watch_sees_a_socket_that_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Watch() as watch:
        port = f"{server.getsockname()[1]:04X}"
        while watch.looks < 2:
            pass
    assert any(address.endswith(f":{port}") for address in watch.found)
