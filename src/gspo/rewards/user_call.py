"""One call of a user's reward function for one response, inside a killable worker process. Imports nothing heavy.

What is wrong with the value becomes a reason, not an exception: the response is unscored, and the run goes on.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any


def call(path: str, kind: str, arguments: Mapping[str, Any]) -> tuple[float | None, str]:
    """The value of one response, or None and the reason; None without a reason: it does not apply.

    Args:
        path: ``"module:function"`` or ``"file.py:function"``.
        kind: ``"trl"``: lists of one entry go in, a list of one value comes out; ``"verl"``: a number or a dict with
            ``"score"``.
        arguments: what the function may ask for by name.
    """
    function = load(path)
    result = function(**accepted(function, arguments))
    if isinstance(result, Awaitable):
        result = asyncio.run(_wait(result))
    if kind == "verl":
        return number(result["score"] if isinstance(result, Mapping) else result, none="returned a score of None")
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)) or len(result) != 1:
        what = f"{len(result)} values" if isinstance(result, (list, tuple)) else type(result).__name__
        return None, f"returned {what} for one completion"
    return number(result[0], none="")


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


def number(value: Any, none: str) -> tuple[float | None, str]:
    """A finite number; anything else is None with the reason (``none`` for None)."""
    if value is None:
        return None, none
    if hasattr(value, "reason"):  # gspo.rewards.base.Unscored, without importing it here
        return None, str(value.reason) or "unscored"
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None, f"returned {value!r:.80}, which is no number"
    found = float(value)
    return (found, "") if math.isfinite(found) else (None, f"returned {found}")


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function names, or all if it takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return dict(arguments)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


@functools.cache
def load(path: str) -> Callable[..., Any]:
    """The function; loaded once a process."""
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(os.path.basename(module_name)[:-3], module_name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module_name} cannot be imported")
        target: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(target)
    else:
        target = importlib.import_module(module_name)
    for part in name.split("."):
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]
