"""Finding a user's reward function by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from gspo.errors import RewardError
from gspo.rewards.base import Unscored, completion_text, gold_answers


def load_reward_function(path: str) -> Callable[..., Any]:
    """The function of ``"module:function"`` or ``"file.py:function"``.

    Modules are looked for in the current directory too.

    Raises:
        RewardError: the name has another form, the module is missing or fails to import, or it lacks the function.
    """
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise RewardError(f'reward {path!r} is not of the form "module:function"')
    module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
            close = get_close_matches(part, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise RewardError(f"module {module_name!r} has no {part!r}{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise RewardError(f"reward {path!r} is a {type(target).__name__}, not a function")
    return target  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise RewardError(f"there is no module {error.name!r} in {here} or on the Python path") from error
        raise _failed(name, error) from error
    except Exception as error:
        raise _failed(name, error) from error


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise RewardError(f"there is no file {path!r} (looked in {os.getcwd()})")
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[: -len(".py")], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(path, error) from error
    return module


def _failed(name: str, error: Exception) -> RewardError:
    return RewardError(f"importing reward module {name!r} failed: {type(error).__name__}: {error}")


def adapt_verl(compute_score: Callable[..., Any], answer_column: str = "answer") -> Callable[..., Any]:
    """A reward function from one with verl's signature.

    ``compute_score(data_source, solution_str, ground_truth, extra_info)`` is called once per completion and returns a
    number or a dict with ``"score"``; it may be async. ``ground_truth`` is ``reward_model["ground_truth"]``, or the
    answer column.
    """

    def calls(completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        count = len(completions)
        golds = gold_answers(columns, answer_column)
        sources = columns.get("data_source", [""] * count)
        extras = columns.get("extra_info", [None] * count)
        return [
            compute_score(
                data_source=source, solution_str=completion_text(completion), ground_truth=gold, extra_info=extra or {}
            )
            for source, completion, gold, extra in zip(sources, completions, golds, extras, strict=True)
        ]

    async def reward(completions: Sequence[Any], **columns: Any) -> list[Any]:
        results = calls(completions, columns)
        return [_verl_score(await r if isinstance(r, Awaitable) else r) for r in results]

    return reward


def _verl_score(result: Any) -> Any:
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise RewardError(f"a verl reward returned a dict without 'score'; it has {', '.join(map(repr, result))}")
    return Unscored("returned a score of None") if result["score"] is None else result["score"]
