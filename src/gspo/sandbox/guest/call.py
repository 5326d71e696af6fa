"""Calls one function of the program beside this file; what it returns goes out as one line of JSON behind a tag.

Reads ``{"tag", "function", "arguments", "prelude"}`` from standard input; the prelude is run before the program. The
program may do here whatever it likes to this process: it knows no expected value, and nothing it says is more than its
own answer.
"""

import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

RECURSION_LIMIT = 50_000


def load(path: str, prelude: str) -> types.ModuleType:
    """The program as a module named ``solution``, so that its ``__main__`` part does not run."""
    module = types.ModuleType("solution")
    module.__file__ = path
    sys.modules["solution"] = module
    exec(prelude, module.__dict__)
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
    return module


def find(module: types.ModuleType, name: str) -> Callable[..., object]:
    """The function of that name, or the method of a class ``Solution``."""
    target: Any = module
    if not hasattr(module, name.partition(".")[0]) and hasattr(module, "Solution"):
        target = module.Solution()
    for part in name.split("."):
        target = getattr(target, part)
        if isinstance(target, type):
            target = target()
    return target  # type: ignore[no-any-return]


def main() -> None:
    dumps, write, flush, leave = json.dumps, os.write, sys.stdout.flush, os._exit
    request = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.setrecursionlimit(RECURSION_LIMIT)
    module = load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "main.py"), request["prelude"])
    answer = find(module, request["function"])(*request["arguments"])
    line = memoryview(f"\n{request['tag']} {dumps(answer)}\n".encode())
    flush()
    while line:
        line = line[write(1, line) :]
    leave(0)


main()
