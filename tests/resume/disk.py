"""A disk that remembers what would be left of it if everything stopped now.

One run is watched. Before each write, sync, rename, truncation, deletion, model save and optimizer step its directory
is copied as each kind of accident would leave it:

- ``killed``: the process is gone, the system goes on: everything handed to it is there;
- ``torn``: the same in the middle of a write: half of the bytes are there;
- ``lost``: the machine is gone: contents and names as they were last synced;
- ``names``: the machine is gone and the disk had written names, but not contents, ahead of the syncs.

A process that is killed runs no handler, so that going on from a copy is going on after the accident.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gspo.policy.causal_lm import CausalPolicy

State = dict[str, bytes | None]  # path below the run directory -> contents, None for a directory


@dataclass(frozen=True)
class Point:
    """One instant and one kind of accident."""

    number: int  # of the operation
    operation: str
    accident: str
    state: State = field(repr=False)
    num_checkpoints: int  # whose save had returned
    num_records: int  # journal records whose write had returned

    @property
    def name(self) -> str:
        return f"{self.number:03d} {self.operation} ({self.accident})"


def read_state(root: Path) -> State:
    """Everything below a directory."""
    state: State = {}
    for path in sorted(root.rglob("*")):
        state[path.relative_to(root).as_posix()] = None if path.is_dir() else path.read_bytes()
    return state


def write_state(root: Path, state: State) -> None:
    """Makes a directory hold exactly this."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name, content in state.items():
        path = root / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class Disk:
    """Watches one directory. ``honest`` is False for a product whose syncs do nothing."""

    def __init__(self, root: Path, *, honest: bool = True) -> None:
        self.root = root
        self.honest = honest
        self.points: list[Point] = []
        self.num_checkpoints = 0
        self.num_records = 0
        self._held: dict[int, int] = {}  # inode -> open descriptor, so that no number is used twice
        self._contents: dict[int, bytes] = {}  # inode of a file -> bytes at its last sync
        self._names: dict[int, dict[str, int]] = {}  # inode of a directory -> its names at its last sync
        self._folders: set[int] = set()
        self._number = 0

    # What would be left.

    def note(self, operation: str, torn: Callable[[], State] | None = None) -> None:
        """An operation is about to happen."""
        self._number += 1
        if not self.root.exists():
            return
        states = {"killed": read_state(self.root), "lost": self._durable(), "names": self._named()}
        if torn is not None:
            states["torn"] = torn()
        for accident, state in states.items():
            self.points.append(Point(self._number, operation, accident, state, self.num_checkpoints, self.num_records))

    def _named(self) -> State:
        state = read_state(self.root)
        for name, content in state.items():
            if content is not None:
                state[name] = self._contents.get((self.root / name).stat().st_ino, b"")
        return state

    def _durable(self) -> State:
        state: State = {}

        def walk(inode: int, prefix: str) -> None:
            for name, child in self._names.get(inode, {}).items():
                if child in self._folders:
                    state[prefix + name] = None
                    walk(child, f"{prefix}{name}/")
                else:
                    state[prefix + name] = self._contents.get(child, b"")

        walk(self.root.stat().st_ino, "")
        return state

    def synced(self, descriptor: int) -> None:
        """A file or directory reached the disk."""
        if not self.honest:
            return
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path != self.root and self.root not in path.parents:
            return
        inode = self._hold(path)
        if not path.is_dir():
            self._contents[inode] = path.read_bytes()
            return
        self._names[inode] = {}
        for child in path.iterdir():
            number = self._hold(child)
            self._names[inode][child.name] = number

    def _hold(self, path: Path) -> int:
        info = path.stat()
        if info.st_ino not in self._held:
            self._held[info.st_ino] = os.open(path, os.O_RDONLY)
        if stat.S_ISDIR(info.st_mode):
            self._folders.add(info.st_ino)
        return info.st_ino

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


@contextmanager
def watching(root: Path, monkeypatch: pytest.MonkeyPatch, *, honest: bool = True) -> Iterator[Disk]:
    """Every operation below ``root`` is noted before it happens."""
    disk = Disk(root, honest=honest)
    with monkeypatch.context() as patch:
        _watch_writes(disk, patch)
        _watch_names(disk, patch)
        _watch_training(disk, patch)
        yield disk
    disk.close()


def _is_below(disk: Disk, path: Any) -> bool:
    return disk.root in Path(os.path.abspath(path)).parents


def _watch_writes(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    write, fsync, truncate = os.write, os.fsync, os.truncate

    def path_of(descriptor: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

    def watched_write(descriptor: int, data: Any) -> int:
        path = path_of(descriptor)
        if _is_below(disk, path):
            half = bytes(data)[: len(data) // 2]
            name = path.relative_to(disk.root).as_posix()

            def torn() -> State:
                state = read_state(disk.root)
                return {**state, name: (state[name] or b"") + half}

            disk.note(f"write {name}", torn)
        return write(descriptor, data)

    def watched_fsync(descriptor: int) -> None:
        path = path_of(descriptor)
        inside = path == disk.root or _is_below(disk, path)
        if inside:
            disk.note(f"sync {path.name}")
        fsync(descriptor)
        if inside:
            disk.synced(descriptor)

    def watched_truncate(path: Any, length: int) -> None:
        if _is_below(disk, path):
            disk.note(f"truncate {Path(path).name}")
        truncate(path, length)

    patch.setattr(os, "write", watched_write)
    patch.setattr(os, "fsync", watched_fsync)
    patch.setattr(os, "truncate", watched_truncate)


def _watch_names(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    replace, unlink = os.replace, os.unlink

    def watched_replace(source: Any, target: Any, **options: Any) -> None:
        if _is_below(disk, target):
            disk.note(f"rename {Path(target).name}")
        replace(source, target, **options)

    def watched_unlink(path: Any, **options: Any) -> None:
        if not options.get("dir_fd") and _is_below(disk, path):
            disk.note(f"delete {Path(path).name}")
        unlink(path, **options)

    rmtree = shutil.rmtree

    def watched_rmtree(path: Any, *arguments: Any, **options: Any) -> None:
        if _is_below(disk, path) and Path(path).exists():
            prefix = Path(path).relative_to(disk.root).as_posix() + "/"

            def torn() -> State:
                state = read_state(disk.root)
                inside = [name for name in state if name.startswith(prefix) and state[name] is not None]
                return {name: content for name, content in state.items() if name not in inside[::2]}

            disk.note(f"delete {Path(path).name}", torn)
        rmtree(path, *arguments, **options)

    patch.setattr(shutil, "rmtree", watched_rmtree)
    patch.setattr(os, "replace", watched_replace)
    patch.setattr(os, "unlink", watched_unlink)


def _watch_training(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    from gspo import launch
    from gspo.train import journal, loop
    from gspo.train.optimizer import Optimizer

    save, update = CausalPolicy.save, Optimizer.apply
    saver, record = launch.Saver.save, journal.Journal.write
    evaluate = loop._evaluate

    def watched_save(self: CausalPolicy, directory: Any) -> None:
        disk.note("save the model")
        save(self, directory)
        for path in sorted(Path(directory).iterdir()):
            name = path.relative_to(disk.root).as_posix()
            cut = path.read_bytes()[: path.stat().st_size // 2]
            disk.note(f"saved {path.name}", lambda name=name, cut=cut: {**read_state(disk.root), name: cut})

    def watched_update(self: Any, *arguments: Any, **options: Any) -> Any:
        disk.note("optimizer step")
        return update(self, *arguments, **options)

    def watched_saver(self: Any, progress: Any) -> str:
        path = saver(self, progress)
        disk.num_checkpoints += 1
        return path

    def watched_record(self: Any, *arguments: Any, **fields: Any) -> None:
        record(self, *arguments, **fields)
        disk.num_records += 1

    def watched_evaluate(*arguments: Any) -> Any:
        disk.note("evaluation")
        return evaluate(*arguments)

    patch.setattr(CausalPolicy, "save", watched_save)
    patch.setattr(Optimizer, "apply", watched_update)
    patch.setattr(launch.Saver, "save", watched_saver)
    patch.setattr(journal.Journal, "write", watched_record)
    patch.setattr(loop, "_evaluate", watched_evaluate)
