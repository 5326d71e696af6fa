"""The commands: train, resume, sft, evaluate. Each opens its run directory and log, and calls the stages in order.

A run that is continued goes the same way: the events are cut back to where the newest good checkpoint was taken,
weights, optimizer state and position are put back, and the loop goes on; what was sampled and judged since comes out
of the journal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from gspo.config.load import load_recipe, recipe_text
from gspo.config.schema import Recipe
from gspo.errors import ConfigError, RunDirectoryError
from gspo.events import RunDirectory, read_event_log, write_json
from gspo.launch.checkpoints import Start, find_start
from gspo.launch.house import build, policy_of
from gspo.launch.log import Log
from gspo.launch.parts import make_parts
from gspo.launch.settings import first_bounds, settings_of
from gspo.launch.signals import StopSignal
from gspo.launch.stages import audit_rewards, cold_start, summarize
from gspo.report.terminal import TerminalReporter
from gspo.train.checkpoint import verify_model
from gspo.train.loop import StoppedError, run


def train(recipe: Recipe, *, run_dir: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """Audit, cold start if the recipe has one, GSPO, evaluation before and after; returns the summary.

    Raises:
        InputError: something in the recipe, data, model or rewards cannot work.
        RunError: the run went wrong; a checkpoint of the last good weights is in the run directory.
        StoppedError: SIGINT or SIGTERM; the run can be continued.
    """
    with _open_run(recipe, run_dir, command) as directory:
        return _train(recipe, directory, Start())


def resume(run_dir: Path, *, command: Sequence[str]) -> dict[str, Any]:
    """Continues a run from its newest good checkpoint and its journal, as if it had never been interrupted.

    A finished run is left as it is; its summary is returned.

    Raises:
        RunDirectoryError: holds no run of ``gspo train``, or is in use.
        ModelError: there are checkpoints, and none is whole; names the files.
        As ``train``.
    """
    with RunDirectory.reopen(run_dir) as directory:
        info = directory.info()
        if info.get("command", [])[1:2] == ["sft"]:
            raise RunDirectoryError(f"{run_dir} is a run of gspo sft, which starts from its beginning: run it again")
        if directory.summary_path.exists():
            return dict(json.loads(directory.summary_path.read_text(encoding="utf-8")))
        recipe = load_recipe(directory.recipe_path)
        start = find_start(recipe, directory)
        directory.note_resume(
            command=list(command),
            checkpoint=None if start.checkpoint is None else start.checkpoint.name,
            ended=_last_words(directory),
        )
        directory.cut_events(start.events_size)
        return _train(recipe, directory, start)


def _train(recipe: Recipe, directory: RunDirectory, start: Start) -> dict[str, Any]:
    with StopSignal() as stop, _logged(directory, _start_fields(recipe), start) as log:
        settings = settings_of(recipe)
        with closing(build(recipe, start.checkpoint)) as house:
            if start.trainer is None:
                audit_rewards(log, house)
                if recipe.sft is not None:
                    cold_start(log, recipe, house.policy, house.evaluate_sft, directory, stop)
            parts, progress = make_parts(log, house, directory, start, stop)
            progress = run(parts, settings, progress)
        summary = summarize(directory, progress, settings, log.seconds())
    directory.write_summary(summary)
    return summary


def sft(recipe: Recipe, *, run_dir: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """The cold start alone; the model is left in ``RUN_DIR/checkpoints/sft``. Returns the summary."""
    fields = {"name": recipe.run.name, "num_sft_updates": recipe.sft.num_steps if recipe.sft else 0}
    with _open_run(recipe, run_dir, command) as directory, StopSignal() as stop, _logged(directory, fields) as log:
        if recipe.sft is not None and recipe.sft.stop_at_pass is not None:
            with closing(build(recipe)) as house:
                num_updates = cold_start(log, recipe, house.policy, house.evaluate_sft, directory, stop)
        else:
            num_updates = cold_start(log, recipe, policy_of(recipe, None), None, directory, stop)
        summary: dict[str, Any] = {
            "num_updates": num_updates,
            "seconds": log.seconds(),
            "model": str(directory.checkpoints_path / "sft"),
        }
        directory.write_summary(summary)
    return summary


def evaluate(recipe: Recipe, *, model: str | None, output: Path | None) -> dict[str, Any]:
    """Evaluates ``model`` (default: the recipe's) on the recipe's held-out prompts; returns the event's fields."""
    if model is not None:
        verify_model(Path(model))
    with closing(build(recipe, model)) as house:
        if not house.eval_prompts:
            raise ConfigError("there are no held-out prompts: give [data.eval] a path or a task")
        result = {"model": model or recipe.model.path or recipe.model.tiny, **house.evaluate(0).event_fields()}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)
    return result


def _open_run(recipe: Recipe, run_dir: Path | None, command: Sequence[str]) -> RunDirectory:
    return RunDirectory.create(
        run_dir or Path("runs") / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        command=command,
        config_text=recipe_text(recipe),
        seed=recipe.run.seed,
        host={"num_threads": torch.get_num_threads()},
    )


@contextmanager
def _logged(directory: RunDirectory, fields: Mapping[str, Any], start: Start | None = None) -> Iterator[Log]:
    """Opens the events and the screen, says what is about to happen (the fields of the start event), and how it ended,
    whatever ended it."""
    start = start or Start()
    with directory.event_writer() as events, TerminalReporter() as screen:
        log = Log(events, screen)
        if start.trainer is None:
            log.emit("start", **fields)
        else:  # the file has it already
            screen.on_event({"type": "start", **fields})
        for warning in start.warnings:
            log.emit("warning", message=warning)
        try:
            yield log
        except StoppedError as error:
            log.emit("end", status="interrupted", seconds=log.seconds(), message=str(error))
            raise StoppedError(f"{error}; continue with gspo train --resume {directory.path}") from error
        except KeyboardInterrupt:
            log.emit("end", status="interrupted", seconds=log.seconds())
            raise
        except BaseException as error:
            log.emit("end", status="failed", seconds=log.seconds(), message=f"{type(error).__name__}: {error}")
            raise
        log.emit("end", status="finished", seconds=log.seconds())


def _start_fields(recipe: Recipe) -> dict[str, Any]:
    bounds = first_bounds(recipe)
    return {
        "name": recipe.run.name,
        "objective": recipe.objective.name,
        "clip_low": bounds.clip_low,
        "clip_high": bounds.clip_high,
        "num_steps": recipe.train.num_steps,
        "num_mini_batches": recipe.train.num_mini_batches,
        "prompts_per_step": recipe.rollout.prompts_per_step,
        "group_size": recipe.rollout.group_size,
        "num_sft_updates": recipe.sft.num_steps if recipe.sft else 0,
    }


def _last_words(directory: RunDirectory) -> str:
    """How the run that is continued ended, as far as its events tell."""
    events = read_event_log(directory.events_path).events if directory.events_path.exists() else []
    if events and events[-1]["type"] == "end":
        return str(events[-1].get("message") or events[-1]["status"])
    return "died without a word"
