"""Whether a reward of a recipe can be found: options of the built-in ones, and the user's functions by their source.

Nothing of the user's is imported or run here: a module is looked for on the Python path and its text is read.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from gspo.config.check import BUILT_IN_REWARDS
from gspo.config.findings import Finding
from gspo.config.schema import Recipe
from gspo.errors import InputError
from gspo.rewards.gold import check_options


def reward_findings(recipe: Recipe) -> Iterator[Finding]:
    """Faults of the options of built-in rewards and of the names of the user's own."""
    for index, function in enumerate(recipe.reward.functions):
        key = f"reward.functions[{index}]"
        if function.name in BUILT_IN_REWARDS:
            try:
                check_options(function.name, function.options)
            except InputError as error:
                place = f"{key}.options" if function.options else f"{key}.name"
                yield Finding("error", place, str(error), (f"{key}.name",))
        elif fault := missing_function(function.name):
            yield Finding("error", f"{key}.name", fault)


def missing_function(name: str) -> str | None:
    """Why ``"module:function"`` or ``"file.py:function"`` cannot be found; None if it can, or only importing tells."""
    module, _, function = name.rpartition(":")
    if not module or not function:  # said by check_recipe
        return None
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            return f'there is no file "{module}" (looked in {Path.cwd()})'
    else:
        found = _module_file(module)
        if isinstance(found, str):
            return found
        if found is None:
            return None
        file = found
    try:
        names = _defined(ast.parse(file.read_bytes(), str(file)))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: is not Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{file}: cannot be read: {error}"
    first = function.partition(".")[0]
    if names is None or first in names:
        return None
    near = get_close_matches(first, sorted(names), n=1)
    return f'{file} has no "{first}"' + (f'; did you mean "{near[0]}"?' if near else "")


def _module_file(module: str) -> Path | str | None:
    """The source of a module, a sentence if there is no such module, or None if it has no source of Python."""
    path: list[str] | None = [os.getcwd(), *sys.path]
    spec, names = None, module.split(".")
    for depth, name in enumerate(names, start=1):
        whole = ".".join(names[:depth])
        if path is None and whole in sys.modules:  # os.path and the like
            return None
        if path is None:
            return f'"{".".join(names[: depth - 1])}" is a module and has no "{name}"'
        spec = importlib.machinery.PathFinder.find_spec(whole, path)
        if spec is None and depth == 1:  # built in, or from a finder of an editable install; nothing is imported
            spec = importlib.util.find_spec(name)
        if spec is None:
            return f'there is no module "{whole}" in {Path.cwd()} or on the Python path'
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _defined(tree: ast.Module) -> set[str] | None:
    """Names that a module's text binds anywhere in it; None where it may bind others too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    return None if names & {"*", "__getattr__"} or _writes_globals(tree) else names


def _writes_globals(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("globals", "setattr", "exec")
        for node in ast.walk(tree)
    )
