"""Runs a program over all tests of a problem in this one process, the way LiveCodeBench's own harness does.

It stands in for a judge with faults, on purpose: published numbers were made with it. The program is rewritten as a
function and called once per test with replaced streams; a call-based one keeps one object for all tests. What it said
goes out as one line of JSON behind a tag; expected outputs are not here, so the comparison is made outside.

Reads ``{"tag", "program", "function", "inputs", "timeout_s", "streams"}`` from standard input.
"""

import ast
import builtins
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import mock_open, patch

#: Imported with a star, in this order, and then by name: the last wins where two have the same name.
MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
PREAMBLE = (
    "".join(f"from {name} import *\n" for name in MODULES)
    + "".join(f"import {name}\n" for name in MODULES if name not in ("builtins", "typing"))
    + "sys.setrecursionlimit(50000)\n"
)
MAX_DIGITS = 50_000
ENTRY = "wrapped_function"
#: Set to None before the program runs.
_DISABLED: dict[Any, tuple[str, ...]] = {
    os: (
        "kill", "system", "putenv", "remove", "removedirs", "rmdir", "fchdir", "setuid", "fork", "forkpty", "killpg",
        "rename", "renames", "truncate", "replace", "unlink", "fchmod", "fchown", "chmod", "chown", "chroot",
        "lchflags", "lchmod", "lchown", "getcwd", "chdir",
    ),
    shutil: ("rmtree", "move", "chown"),
    subprocess: ("Popen",),
    builtins: ("quit", "help"),
}  # fmt: skip
_HIDDEN_MODULES = ("ipdb", "joblib", "resource", "psutil", "tkinter")


class TimeoutException(Exception):  # noqa: N818  # its name is what tells it from the program's own errors
    """Raised in the program by the alarm; it is an ordinary exception, which a program can catch."""


class Buffer:
    """Binary standard input of the later harness: every read starts again at the beginning."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()

    def read(self, *_: object) -> bytes:
        return self.data

    def readline(self, *_: object) -> bytes:
        return self.data.split(b"\n")[0] + b"\n"


class Stdin:
    """Standard input of the later harness: it has ``buffer``, gives everything at each ``read``, and is no iterator."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = io.StringIO(text)
        self.buffer = Buffer(text)

    def read(self, *_: object) -> str:
        return self.text

    def readline(self, *size: int) -> str:
        return self.lines.readline(*size)

    def readlines(self, *_: object) -> list[str]:
        return self.text.split("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lines, name)


def on_alarm(*_: object) -> None:
    print("the alarm went off")  # as there, into what the program said
    raise TimeoutException


def disable() -> None:
    """Takes away what the harness takes away."""
    for owner, names in _DISABLED.items():
        for name in names:
            setattr(owner, name, None)
    for name in _HIDDEN_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]


def unwrap_main(code: str) -> str:
    """Without the condition of a final ``if __name__ == '__main__':``, and only of a final one."""
    try:
        body = ast.parse(code).body
        last = body[-1] if body else None
        if isinstance(last, ast.If) and ast.unparse(last.test).strip() == "__name__ == '__main__'":
            statements: list[ast.stmt] = [*body[:-1], *last.body]
            return ast.unparse(ast.Module(statements, []))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return code


def as_function(code: str) -> str:
    """Imports of the top level first, everything else as the body of one function; unchanged if it does not parse."""
    try:
        body = ast.parse(code).body
        imports: list[ast.stmt] = [one for one in body if isinstance(one, (ast.Import, ast.ImportFrom))]
        rest = [one for one in body if not isinstance(one, (ast.Import, ast.ImportFrom))]
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        function = ast.FunctionDef(name=ENTRY, args=nothing, body=rest, decorator_list=[], lineno=1)
        return "\n".join((PREAMBLE, ast.unparse(ast.Module(imports, [])), ast.unparse(function)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code


def load(code: str, timeout_s: int) -> Any:
    """The module of the code, or an object of its ``Solution`` if that class is named anywhere in the text."""
    signal.alarm(timeout_s)
    try:
        module = types.ModuleType("tmp_sol")
        exec(code, module.__dict__)
        return module.Solution() if "class Solution" in code else module
    finally:
        signal.alarm(0)


def feed(entry: Callable[[], object], text: str, streams: str) -> None:
    """Calls the program with standard input and files replaced; an exit of the program is an ordinary end.

    The order matters: methods are replaced on the standard input that was there before, and then it is replaced itself.
    So only a program that holds on to the former (``from sys import stdin``) meets these methods: lines without their
    ends, and an error behind the last.
    """
    lines = iter(text.split("\n"))
    with (
        patch("sys.stdin.read", lambda *_: text),
        patch("sys.stdin.readlines", lambda *_: text.split("\n")),
        patch("sys.stdin.readline", lambda *_: next(lines)),
        patch("sys.stdin", Stdin(text) if streams == "buffered" else io.StringIO(text)),
        patch("builtins.open", mock_open(read_data=text)),
        contextlib.suppress(SystemExit),
    ):
        entry()


def run_text(request: dict[str, Any], say: Callable[[Any], None]) -> None:
    """Says the captured output of each test, up to the first that fails to end well."""
    entry = getattr(load(as_function(unwrap_main(request["program"])), request["timeout_s"]), ENTRY)
    for text in request["inputs"]:
        real, said = sys.stdout, io.StringIO()
        said.close = lambda: None  # type: ignore[method-assign]
        sys.stdout = said
        signal.alarm(request["timeout_s"])
        try:
            feed(entry, text, request["streams"])
        finally:
            signal.alarm(0)
            sys.stdout = real
        say(said.getvalue())


def run_calls(request: dict[str, Any], say: Callable[[Any], None]) -> None:
    """Says the value of each call."""
    method = getattr(load(PREAMBLE + "\n\n" + request["program"], request["timeout_s"]), request["function"])
    calls = [[json.loads(line) for line in text.split("\n")] for text in request["inputs"]]
    for arguments in calls:
        signal.alarm(request["timeout_s"])
        try:
            value = method(*arguments)
        finally:
            signal.alarm(0)
        say(plain(list(value) if isinstance(value, tuple) else value))


def plain(value: Any) -> Any:
    """A value as JSON can carry it, with its type: lists of the outside are lists, anything else that is compound or
    foreign is tagged. Subclasses count as what they extend, whatever they say of equality themselves."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [plain(part) for part in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [plain(part) for part in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(part)] for key, part in dict.items(value)]}
    return {"other": type(value).__name__}


def main() -> None:
    dumps, write, leave = json.dumps, os.write, os._exit
    request = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.stdin = open(os.devnull)  # noqa: SIM115  # it lives as long as the process
    sys.set_int_max_str_digits(MAX_DIGITS)
    signal.signal(signal.SIGALRM, on_alarm)
    disable()
    said: list[Any] = []
    error = ""
    try:
        (run_calls if request["function"] else run_text)(request, said.append)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"[:300]
    line = memoryview(f"\n{request['tag']} {dumps({'said': said, 'error': error})}\n".encode())
    while line:
        line = line[write(channel, line) :]
    leave(0)


main()
