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
from gspo.errors import ConfigError
from gspo.evals.benchmark import digest
from gspo.events import RunDirectory, read_event_log, write_json
from gspo.launch.attempts import note_attempt
from gspo.launch.checkpoints import Start, find_start
from gspo.launch.house import build, policy_of
from gspo.launch.log import Log
from gspo.launch.parts import make_parts
from gspo.launch.settings import first_bounds, settings_of
from gspo.launch.signals import StopSignal
from gspo.launch.stages import audit_rewards, cold_start, say_gone_back, summarize, warn_of_remote_code
from gspo.report.terminal import TerminalReporter
from gspo.train.checkpoint import verify_model
from gspo.train.loop import GoBackError, StoppedError, run


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

    A finished run is left as it is; its summary is returned. A run of ``gspo sft`` goes on within its cold start.

    Raises:
        RunDirectoryError: holds no run of ``gspo train`` or ``gspo sft``, or is in use.
        ModelError: there are checkpoints, and none is whole; names the files.
        As ``train``.
    """
    with RunDirectory.reopen(run_dir) as directory:
        alone = directory.info().get("command", [])[1:2] == ["sft"]
        if directory.summary_path.exists():
            return dict(json.loads(directory.summary_path.read_text(encoding="utf-8")))
        recipe = load_recipe(directory.recipe_path, (), "sft" if alone else "train")
        start = find_start(recipe, directory)
        directory.note_resume(
            command=list(command),
            checkpoint=None if start.checkpoint is None else start.checkpoint.name,
            ended=_last_words(directory),
        )
        directory.cut_events(start.events_size)
        return (_sft if alone else _train)(recipe, directory, start)


def _train(recipe: Recipe, directory: RunDirectory, start: Start) -> dict[str, Any]:
    """As many attempts as the guard asks for; each begins where, and as, a run that is continued would."""
    with StopSignal() as stop:
        while True:
            try:
                summary = _attempt(recipe, directory, start, stop)
            except GoBackError:
                start = find_start(recipe, directory)
                directory.cut_events(start.events_size)
                continue
            directory.write_summary(summary)
            return summary


def _attempt(recipe: Recipe, directory: RunDirectory, start: Start, stop: StopSignal) -> dict[str, Any]:
    with _logged(directory, _start_fields(recipe), start) as log:
        warn_of_remote_code(log, recipe, start)
        settings = settings_of(recipe, start.history)
        with closing(build(recipe, start.checkpoint)) as house:
            if start.trainer is None:
                audit_rewards(log, house)
            if start.is_cold and recipe.sft is not None:
                cold_start(log, recipe, house.policy, house.evaluate_sft, directory, stop, start)
            parts, progress = make_parts(log, house, directory, start, stop)
            if start.goes_back and progress is not None:
                say_gone_back(log, parts, settings, progress, start.history)
            try:
                progress = run(parts, settings, progress)
            except GoBackError as order:
                note_attempt(directory, order)
                raise
        return summarize(directory, progress, settings, log.seconds())


def sft(recipe: Recipe, *, run_dir: Path | None, command: Sequence[str]) -> dict[str, Any]:
    """The cold start alone; the model is left in ``RUN_DIR/checkpoints/sft``. Returns the summary."""
    with _open_run(recipe, run_dir, command) as directory:
        return _sft(recipe, directory, Start())


def _sft(recipe: Recipe, directory: RunDirectory, start: Start) -> dict[str, Any]:
    fields = {"name": recipe.run.name, "num_sft_updates": recipe.sft.num_steps if recipe.sft else 0}
    with StopSignal() as stop, _logged(directory, fields, start) as log:
        warn_of_remote_code(log, recipe, start)
        if start.trainer is not None and not start.is_cold:
            num_updates = int(start.trainer.position["num_updates"])
        elif recipe.sft is not None and recipe.sft.stop_at_pass is not None:
            with closing(build(recipe, start.checkpoint)) as house:
                num_updates = cold_start(log, recipe, house.policy, house.evaluate_sft, directory, stop, start)
        else:
            policy = policy_of(recipe, start.checkpoint)
            num_updates = cold_start(log, recipe, policy, None, directory, stop, start)
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
        named = {"model": model or recipe.model.path or recipe.model.tiny}
        asked = {"prompts": digest([[prompt.id, prompt.content] for prompt in house.eval_prompts])}
        result = {**named, **asked, **house.evaluate(0).event_fields()}
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
        except GoBackError:
            raise  # not the end
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
