"""What the commands do, one function each. torch and what needs it are imported once the recipe is known to be good."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo.config import Recipe, check_recipe, load_recipe
from gspo.config.findings import Command
from gspo.errors import InputError
from gspo.events.files import plain


def train(path: Path, run_dir: Path | None, overrides: Sequence[str], command: Sequence[str]) -> int:
    """``gspo train``: writes the run's report, then prints the summary as one JSON line."""
    recipe = checked_recipe(path, overrides, "train")
    from gspo import launch

    return _to_the_end(lambda: launch.train(recipe, run_dir=run_dir, command=command))


def resume(run_dir: Path, command: Sequence[str]) -> int:
    """``gspo train --resume`` and ``gspo sft --resume``: as the command that the run was started with."""
    from gspo import launch

    return _to_the_end(lambda: launch.resume(run_dir, command=command))


def _to_the_end(run: Callable[[], dict[str, Any]]) -> int:
    summary = run()
    if "run_dir" in summary:  # a cold start alone has no page
        _write_report(Path(summary["run_dir"]))
    print(json.dumps(plain(summary, "summary", {})))
    return 0


def _write_report(run_dir: Path) -> None:
    """A finished run is never a failure because its page could not be drawn."""
    from gspo.report.html import write_report

    try:
        print(f"report: {write_report([run_dir], run_dir / 'report.html')}")
    except InputError as error:
        print(f"no report: {error}", file=sys.stderr)


def sft(path: Path, run_dir: Path | None, overrides: Sequence[str], command: Sequence[str]) -> int:
    """``gspo sft``: prints the summary as one JSON line."""
    recipe = checked_recipe(path, overrides, "sft")
    from gspo import launch

    print(json.dumps(launch.sft(recipe, run_dir=run_dir, command=command)))
    return 0


def report(runs: Sequence[Path], output: Path | None) -> int:
    """``gspo report``: prints the path of the page."""
    if not runs:
        raise InputError("gspo report needs at least one run directory")
    from gspo.report.evaluation import is_evaluation, write_evaluation_page
    from gspo.report.html import write_report

    kinds = {is_evaluation(path) for path in runs}
    if kinds == {True}:
        first = runs[0] if runs[0].is_dir() else runs[0].parent
        print(write_evaluation_page(list(runs), output or first / "report.html"))
        return 0
    if len(kinds) > 1:
        raise InputError("these are runs and evaluations; a page is of one kind, write two")

    print(write_report(list(runs), output or runs[0] / "report.html"))
    return 0


def conformance(files: Sequence[Path]) -> int:
    """``gspo conformance``."""
    if not files:
        raise InputError("gspo conformance needs at least one file of cases")
    from gspo.cli.conformance import conformance as compare

    return compare(list(files), sys.stdout)


def checked_recipe(path: Path, overrides: Sequence[str], command: Command) -> Recipe:
    """Loads a recipe; its warnings go to stderr."""
    recipe = load_recipe(path, overrides, command, inspect=True)
    for finding in check_recipe(recipe, command):
        print(f"warning: {finding.sentence}", file=sys.stderr)
    return recipe
