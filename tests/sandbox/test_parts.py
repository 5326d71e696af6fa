"""The parts of the sandbox by themselves."""

import os
import subprocess
import sys

import pytest

from gspo.errors import InputError
from gspo.sandbox import BoxResult, Ending, Sandbox, open_sandbox
from gspo.sandbox.bubblewrap import Bubblewrap
from gspo.sandbox.interpreter import MINIMUM_VERSION, candidates, inspect
from gspo.sandbox.native import landlock_version
from gspo.sandbox.process import Pipe, descendants
from gspo.sandbox.seccomp import build_filter
from gspo.sandbox.selftest import escapes
from gspo.sandbox.users import box_user


def test_candidates_say_what_they_need():
    found = list(candidates())
    assert found
    for python in found:
        assert python.version >= MINIMUM_VERSION
        assert all(map(os.path.exists, (*python.stdlib, *python.system)))
        assert python.executable in python.system
        assert not any(path.rstrip("/") in ("", "/usr", "/usr/lib", "/root", "/home", "/etc") for path in python.system)


def test_what_is_not_a_python_is_no_candidate(tmp_path):
    script = tmp_path / "python3"
    script.write_text("#!/bin/sh\necho no\n")
    script.chmod(0o755)
    assert inspect(str(script)) is None
    assert inspect(str(tmp_path / "absent")) is None


def test_a_filter_is_whole_instructions_and_forbids_more_without_signals():
    with_signals, without = build_filter(), build_filter(signals=False)
    assert len(with_signals) % 8 == 0 == len(without) % 8
    assert 0 < len(without) < len(with_signals)


def test_without_pyseccomp_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(InputError, match=r"pip install 'gspo\[sandbox\]'"):
        build_filter()


def test_each_slot_of_root_has_its_own_user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    users = [box_user(slot) for slot in range(64)]
    assert len(set(users)) == 64
    assert all(user >= 20_000 for user in users)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert box_user(0) is None


def test_a_pipe_keeps_no_more_than_its_limit():
    pipe = Pipe.open(10)
    try:
        os.write(pipe.write_end, b"0123456789")
        pipe.drain()
        assert (bytes(pipe.kept), pipe.overflow) == (b"0123456789", False)
        os.write(pipe.write_end, b"a")
        pipe.drain()
        assert (bytes(pipe.kept), pipe.overflow) == (b"0123456789", True)
    finally:
        pipe.close()


def test_descendants_are_found_through_generations():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '30']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        grandchild = int(child.stdout.readline())
        found = descendants(os.getpid())
        os.kill(grandchild, 9)
        child.communicate()
    assert {os.getpid(), child.pid, grandchild} <= set(found)


def test_every_candidate_makes_a_box_that_holds():
    """Also a Python inside a home directory, which the box's user could not reach on the host (root mounts it)."""
    try:
        open_sandbox("bubblewrap")
    except InputError as error:
        pytest.skip(str(error))
    backends = [Bubblewrap(python) for python in candidates()]
    problems = {backend.interpreter.executable: escapes(Sandbox(backend, 1)) for backend in backends}
    assert set(problems.values()) == {""}
    for backend in backends:
        modules = "asyncio, bz2, ctypes, decimal, hashlib, lzma, multiprocessing, sqlite3, ssl, zlib"
        run = Sandbox(backend, 1).run_python({"main.py": f"import {modules}; print(1)"})
        assert run.stdout == b"1\n", run.stderr


def test_installed_packages_are_not_shown(sandbox):
    source = (
        "import os, sys\n"
        "found = []\n"
        "for path in sys.path + [p + '/site-packages' for p in sys.path] + [p + '/dist-packages' for p in sys.path]:\n"
        "    for name in ('torch', 'numpy', 'gspo', 'pip', 'README.txt'):\n"
        "        try: found += os.listdir(os.path.join(path, name))\n"
        "        except NotADirectoryError: found.append(open(os.path.join(path, name)).read())\n"
        "        except OSError: pass\n"
        "print(found)"
    )
    for python in candidates():
        paths = python.installed_packages
        assert all(os.path.basename(path) in ("site-packages", "dist-packages") for path in paths)
    assert sandbox.run_python({"main.py": source}).stdout == b"[]\n"


def test_landlock_version_is_a_small_number():
    assert 0 <= landlock_version() < 100


HOLDS = {
    "read_secret": "ENOENT", "write_here": "EROFS", "write_system": "EROFS", "socket": "EPERM", "unix_socket": "EPERM",
    "other_process": "ESRCH", "user": 1000, "environment": [], "version": [3, 11],
    "kernel": {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapPrm": "0" * 16, "CapBnd": "0" * 16},
}  # fmt: skip


class Leaky:
    """A sandbox whose probe answers as told."""

    def __init__(self, result, isolation="bubblewrap"):
        self.result, self.isolation = result, isolation

    def run_python(self, files, script, *, stdin, limits):
        return self.result


def answer(**changes):
    import json

    return BoxResult(Ending.EXIT, 0, json.dumps({**HOLDS, **changes}).encode())


def test_the_self_test_passes_a_box_that_holds():
    assert escapes(Leaky(answer())) == ""
    assert escapes(Leaky(answer(kernel=None))) == ""  # /proc is not visible


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"read_secret": None}, "files of the host can be read"),
        ({"write_here": None}, "own directory can be written"),
        ({"write_system": None}, "system directories can be written"),
        ({"socket": None}, "sockets can be opened"),
        ({"unix_socket": None}, "unix sockets can be opened"),
        ({"other_process": None}, "processes of the host can be signalled"),
        ({"user": 0}, "runs as root"),
        ({"environment": ["TOKEN"]}, "environment is not empty"),
        ({"kernel": {**HOLDS["kernel"], "Seccomp": "0"}}, "no system call filter"),
        ({"kernel": {**HOLDS["kernel"], "NoNewPrivs": "0"}}, "no system call filter"),
        ({"kernel": {**HOLDS["kernel"], "CapEff": "0000000000000400"}}, "has capabilities"),
    ],
)
def test_the_self_test_names_what_leaks(changes, problem):
    assert problem in escapes(Leaky(answer(**changes)))
    assert escapes(Leaky(answer(**changes), "none")) == ""


def test_the_self_test_says_why_no_box_was_built():
    assert escapes(Leaky(BoxResult(Ending.FAILURE, detail="forbidden"))) == "forbidden"
    assert escapes(Leaky(BoxResult(Ending.EXIT, 1, stderr=b"x\nno exec\n"))) == "no exec"
    assert escapes(Leaky(BoxResult(Ending.EXIT, 1))) == "the probe ended with 1"
