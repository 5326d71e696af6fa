"""The run directory: what is in it, how it is written, how it is read.

::

    runs/demo/
    ├── recipe.toml              the resolved configuration
    ├── run.json                 command, versions, seed, host, start time
    ├── events.jsonl             one JSON object a line, see the event types below
    ├── journal/                 rollouts and verdicts since the oldest kept checkpoint
    ├── summary.json             the last word of a finished run
    ├── checkpoints/step-000010/ Hugging Face directories
    └── run.lock                 held by the process that writes

Readers (reports, the terminal view) know this file and nothing else of the trainer. Needs no torch.

What is written survives the process that wrote it; what is synced survives the machine. A file that is replaced is
written beside, synced, renamed, and its directory synced (:func:`replace_file`).
"""

# No postponed annotations: they would hide NotRequired from __required_keys__, which the writer checks.

import fcntl
import json
import math
import os
import platform
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, NotRequired, Required, Self, TextIO, TypedDict

from gspo.errors import DataError, RunDirectoryError, RunError


class Event(TypedDict, total=False):
    """Fields of every event. An event may carry more than its type lists; readers skip what they do not know."""

    type: Required[str]
    time: Required[float]  # seconds since 1970
    non_finite: dict[str, str]  # {"metrics.grad_norm": "nan"}: what stands as null in this event


class StartEvent(Event):
    """What the run is about to do. Further numbers of the batch arithmetic are welcome."""

    name: str
    objective: NotRequired[str]  # absent where there is only supervised training
    clip_low: NotRequired[float | None]  # lower bound of the ratio is 1 - clip_low
    clip_high: NotRequired[float | None]
    num_steps: NotRequired[int]
    num_mini_batches: NotRequired[int]
    prompts_per_step: NotRequired[int]
    group_size: NotRequired[int]
    num_sft_updates: NotRequired[int]


class AuditEvent(Event):
    """What the reward audit found before the first step; empty when all is well."""

    findings: list[str]


class WarningEvent(Event):
    message: str


class StepEvent(Event):
    """One rollout batch and all of its updates."""

    step: int  # 1 is the first
    num_updates: int  # optimizer updates of this step that were applied
    policy_version: int  # updates behind the weights after this step
    seconds: Mapping[str, float]  # rollout, reward, old_logprobs, update, evaluation, ..., total
    metrics: Mapping[str, float]


class UpdateEvent(Event):
    """One optimizer update."""

    step: int
    update: int  # counted over the whole run, 1 is the first
    mini_batch: int  # index within the step, 0 .. M-1
    metrics: Mapping[str, float]


class CalibrationEvent(Event):
    """The clip bounds that the measured log s led to; they stay from here on."""

    step: int
    clip_low: float
    clip_high: float


class Sample(TypedDict, total=False):
    """One response, to be read by people."""

    prompt_id: str
    prompt: str | list[Mapping[str, Any]]  # text or chat messages
    answer: str
    gold: Any
    reward: float | None  # None: could not be scored
    components: Mapping[str, float | None]
    ratio: float | None  # s of the sequence in its update
    advantage: float
    stop_reason: str
    num_tokens: int
    clipped: bool


class SamplesEvent(Event):
    step: int
    samples: list[Sample]


class EvaluationEvent(Event):
    """One evaluation. During supervised training ``name`` is "sft" and ``step`` counts its updates."""

    step: int  # 0 is before the first update
    name: str
    metrics: Mapping[str, float]
    num_prompts: int
    num_samples: int
    confidence: float
    outcomes: list[tuple[int, int]]  # per prompt: scored responses, and how many of them passed


class SftEvent(Event):
    """One update of supervised training."""

    update: int
    metrics: Mapping[str, float]


class CheckpointEvent(Event):
    step: int
    path: str  # relative to the run directory


class EndEvent(Event):
    status: str  # "finished", or what ended the run: "interrupted", "failed"
    seconds: float
    message: NotRequired[str]


EVENT_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "start": StartEvent,
        "audit": AuditEvent,
        "warning": WarningEvent,
        "step": StepEvent,
        "update": UpdateEvent,
        "calibration": CalibrationEvent,
        "samples": SamplesEvent,
        "evaluation": EvaluationEvent,
        "sft": SftEvent,
        "checkpoint": CheckpointEvent,
        "end": EndEvent,
    }
)


class MetricInfo(NamedTuple):
    """What a logged name means. Formulas are in docs/metrics.md."""

    meaning: str
    unit: str
    levels: tuple[str, ...]  # the event types that may carry it


_RATIO_SLICES = "one slice of the responses (by mini-batch index, by quartile of length)"


def _registry() -> Mapping[str, MetricInfo]:
    rows = [
        ("reward/mean", "mean reward of the scored responses", "reward", "step evaluation"),
        ("reward/std", "standard deviation of the reward over the scored responses", "reward", "step"),
        ("reward/unscored", "responses that could not be scored", "count", "step"),
        ("reward/timeouts", "verdicts that ran into the time limit", "count", "step"),
        ("reward/*", "mean of one reward function, unweighted", "reward", "step"),
        ("groups/total", "groups of the rollout batch", "count", "step"),
        ("groups/constant", "groups whose rewards are all equal: no signal", "count", "step"),
        ("groups/dropped", "groups left out of the updates", "count", "step"),
        ("groups/refilled", "groups sampled in place of constant ones", "count", "step"),
        ("length/mean", "mean length of the responses", "tokens", "step evaluation"),
        ("length/min", "shortest response", "tokens", "step"),
        ("length/max", "longest response", "tokens", "step"),
        ("length/q50", "median length of the responses", "tokens", "step"),
        ("truncated_fraction", "share of responses that ran into max_new_tokens", "fraction", "step evaluation"),
        ("tokens/generated", "tokens that the engine sampled", "tokens", "step"),
        ("tokens/trained", "response tokens that entered a loss", "tokens", "step"),
        ("tokens/skipped_forward", "response tokens of advantage 0, which were not computed", "tokens", "update"),
        ("tokens/skipped_backward", "response tokens not differentiated: those and clipped ones", "tokens", "update"),
        ("advantage/abs_mean", "mean absolute advantage", "1", "step update"),
        ("clip_fraction/sequence", "share of responses that the clip cut", "fraction", "step update"),
        ("clip_fraction/sequence_low", "share of responses cut at the lower bound", "fraction", "step update"),
        ("clip_fraction/sequence_high", "share of responses cut at the upper bound", "fraction", "step update"),
        ("clip_fraction/token", "share of response tokens that the clip cut", "fraction", "step update"),
        ("clip_fraction/token_low", "share of response tokens cut at the lower bound", "fraction", "step update"),
        ("clip_fraction/token_high", "share of response tokens cut at the upper bound", "fraction", "step update"),
        ("clip_fraction/*", f"clip fraction over {_RATIO_SLICES}", "fraction", "step update"),
        ("clip_low", "lower clip bound in force: the ratio is cut at 1 - clip_low", "1", "step update"),
        ("clip_high", "upper clip bound in force: the ratio is cut at 1 + clip_high", "1", "step update"),
        ("log_ratio/mean", "mean of log s over the responses", "nats/token", "step update"),
        ("log_ratio/abs_mean", "mean of |log s| over the responses", "nats/token", "step update"),
        ("log_ratio/std", "standard deviation of log s over the responses", "nats/token", "step update"),
        *(
            (f"log_ratio/q{q:02d}", f"{q} % quantile of log s over the responses", "nats/token", "step update")
            for q in (1, 5, 25, 50, 75, 95, 99)
        ),
        ("log_ratio/*", f"statistic of log s over {_RATIO_SLICES}", "nats/token", "step update"),
        ("ratio/mean", "mean of s over the responses", "1", "step update"),
        ("effective_sample_size", "share of the responses that the ratios leave in effect", "fraction", "step update"),
        ("entropy", "mean entropy of the policy at response tokens", "nats/token", "step update"),
        ("kl/k3_old", "k3 estimate of KL(old || policy)", "nats/token", "step update"),
        ("kl/reference", "estimate of KL(policy || reference) that is in the loss", "nats/token", "step update"),
        ("mismatch/mean_abs", "mean |engine - trainer| log-prob at equal weights", "nats/token", "step"),
        ("mismatch/max_abs", "largest |engine - trainer| log-prob at equal weights", "nats", "step"),
        ("mismatch/k3", "k3 estimate of KL(engine || trainer) at equal weights", "nats/token", "step"),
        ("correction/weight", "mean weight that the correction gives to the advantage of a token", "1", "step update"),
        ("correction/masked", "share of response tokens whose weight is 0", "fraction", "step update"),
        ("correction/outside", "share of response tokens outside the correction's bounds", "fraction", "step update"),
        (
            "moe/drift",
            "share of chosen experts that are not in the recorded set, mean of layers",
            "fraction",
            "step update",
        ),
        ("moe/drift/*", "drift of one layer with a router", "fraction", "step update"),
        (
            "moe/changed_tokens",
            "share of tokens whose experts changed in at least one layer",
            "fraction",
            "step update",
        ),
        ("moe/changed_layers", "share of layers in which a token's experts changed", "fraction", "step update"),
        ("moe/margin", "selection score of the last chosen expert minus that of the next", "1", "step update"),
        ("moe/router_shift", "mean |change of the log score| of the recorded experts", "nats", "step update"),
        ("moe/load_max", "load of the busiest expert in even shares, mean of layers", "1", "step update"),
        ("moe/load_entropy", "entropy of the load in units of the even one, mean of layers", "1", "step update"),
        ("moe/load_idle", "share of experts that no token chose", "fraction", "step update"),
        ("moe/log_ratio_correlation", "correlation of |log ratio| and changed layers over tokens", "1", "step update"),
        ("moe/engine_drift", "drift from the engine to the trainer at equal weights", "fraction", "step"),
        ("moe/engine_drift/*", "the same, of one layer with a router", "fraction", "step"),
        ("staleness/mean", "mean age of the sampling weights", "updates", "step update"),
        ("staleness/max", "largest age of the sampling weights", "updates", "step update"),
        ("loss", "the loss of one update (of a step: mean over its updates)", "1", "step update sft"),
        ("grad_norm", "norm of the gradient before it is clipped", "1", "step update sft"),
        ("learning_rate", "learning rate of the update", "1", "step update sft"),
        ("skipped_updates", "updates not made: no response entered the loss, or see below", "count", "step update"),
        ("skipped_updates/non_finite", "updates not made, since a number was not finite", "count", "step update"),
        ("rows/non_finite", "responses left out, since an old log-prob was not finite", "count", "step"),
        ("num_sequences", "responses that entered the loss", "count", "update"),
        ("num_tokens", "response tokens that entered the loss", "tokens", "update sft"),
        ("pass@1", "chance that one response passes, mean over prompts", "fraction", "evaluation"),
        ("pass@1/low", "lower end of the confidence interval of pass@1", "fraction", "evaluation"),
        ("pass@1/high", "upper end of the confidence interval of pass@1", "fraction", "evaluation"),
        ("pass@1/if_unscored_wrong", "pass@1 if every unscored response had failed", "fraction", "evaluation"),
        ("pass@1/if_unscored_right", "pass@1 if every unscored response had passed", "fraction", "evaluation"),
        ("pass@*", "chance that at least one of k responses passes, mean over prompts", "fraction", "evaluation"),
        ("unscored_fraction", "share of the responses that could not be scored", "fraction", "evaluation"),
        ("difference", "pass@1 minus that of the run's first evaluation, paired by prompt", "fraction", "evaluation"),
        ("difference/low", "lower end of the confidence interval of the difference", "fraction", "evaluation"),
        ("difference/high", "upper end of the confidence interval of the difference", "fraction", "evaluation"),
        ("difference/p_value", "sign-flip permutation p-value of the difference", "fraction", "evaluation"),
    ]
    return MappingProxyType(
        {name: MetricInfo(meaning, unit, tuple(levels.split())) for name, meaning, unit, levels in rows}
    )


#: Every name that may be logged. ``prefix*`` stands for any ending; a name listed in full comes first.
METRICS: Mapping[str, MetricInfo] = _registry()


def find_metric(name: str) -> MetricInfo | None:
    """The entry of a logged name: the name itself, or the longest ``prefix*`` that fits."""
    if "*" in name:
        return None
    if name in METRICS:
        return METRICS[name]
    prefixes = [p for p in METRICS if p.endswith("*") and name.startswith(p[:-1]) and len(name) >= len(p)]
    return METRICS[max(prefixes, key=len)] if prefixes else None


#: Events that are synced to the disk as they are written; the others go to the operating system and follow with them.
SYNCED = frozenset({"start", "step", "calibration", "evaluation", "checkpoint", "end"})


class EventWriter:
    """Appends events to ``events.jsonl``, one line each, handed to the operating system at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._closed = False

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return os.fstat(self._file).st_size

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Writes one event and returns it as a reader will see it.

        Non-finite numbers become null and are named, with what they were, in ``non_finite``.
        Numpy and torch scalars become plain numbers.

        Raises:
            ValueError: an unknown kind, a missing field, or a metric that ``METRICS`` does not list.
            RunError: the disk did not take it; no part of the line is left.
        """
        _check_fields(kind, fields)
        non_finite: dict[str, str] = {}
        event = {"type": kind, "time": time.time(), **{k: _plain(v, k, non_finite) for k, v in fields.items()}}
        if non_finite:
            event["non_finite"] = non_finite
        line = json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"
        append(self._file, line.encode(), self._path)
        if kind in SYNCED:
            self.sync()
        return event

    def sync(self) -> None:
        """Returns once everything written so far is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def append(descriptor: int, data: bytes, path: Path) -> None:
    """Appends all of ``data`` or, where the disk does not take it, nothing.

    Raises:
        RunError: the disk is full or failing; names the file.
    """
    before = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
    except OSError as error:
        os.ftruncate(descriptor, before)
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); free space or mend the disk, then continue with "
            "gspo train --resume"
        ) from error


def write_all(descriptor: int, data: bytes) -> None:
    """Writes every byte; the system may take them in several pieces."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Writes beside the target, syncs, renames: a reader, and a machine that stops, see all of it or nothing."""
    beside = path.with_name(path.name + ".tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(beside, path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Returns once a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_fields(kind: str, fields: Mapping[str, Any]) -> None:
    if kind not in EVENT_TYPES:
        raise ValueError(f"unknown event type {kind!r}; the types are {', '.join(EVENT_TYPES)}")
    reserved = {"type", "time", "non_finite"} & fields.keys()
    if reserved:
        raise ValueError(f"event {kind!r}: the writer itself fills in {', '.join(sorted(reserved))}")
    missing = EVENT_TYPES[kind].__required_keys__ - fields.keys() - {"type", "time"}  # type: ignore[attr-defined]
    if missing:
        raise ValueError(f"event {kind!r} lacks {', '.join(sorted(missing))}")
    for name in fields.get("metrics", ()):
        info = find_metric(name)
        if info is None:
            raise ValueError(
                f"event {kind!r}: metric {name!r} is not registered; add it to METRICS and docs/metrics.md"
            )
        if kind not in info.levels:
            raise ValueError(f"metric {name!r} belongs to {' and '.join(info.levels)} events, not to {kind!r}")


def _plain(value: Any, where: str, non_finite: dict[str, str]) -> Any:
    """``value`` in JSON's types; ``where`` names it, e.g. ``metrics.loss``."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # Half a surrogate pair cannot be written as UTF-8, and decoders of sampled bytes do produce some.
        return str(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        non_finite[where] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, Path):
        return _plain(str(value), where, non_finite)
    if isinstance(value, Sequence):
        return [_plain(item, f"{where}.{index}", non_finite) for index, item in enumerate(value)]
    if callable(getattr(value, "item", None)):  # a numpy or torch scalar
        return _plain(value.item(), where, non_finite)
    raise ValueError(f"event field {where} is a {type(value).__name__}, which JSON does not have")


@dataclass(frozen=True)
class EventLog:
    """The events of a file, oldest first."""

    events: list[dict[str, Any]]
    torn: str | None = None  # a sentence about a last line that was cut off while being written

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


def read_event_log(path: Path) -> EventLog:
    """Reads ``events.jsonl``. A last line without its end, as a killed process leaves one, is told apart.

    Raises:
        DataError: no such file, or another line is not a JSON object with a type (with its number).
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot read the events of this run ({error.strerror})") from error
    events = [_parse_line(line, path, number) for number, line in enumerate(lines, 1)]
    if not rest:
        return EventLog(events)
    try:  # complete but for its newline: nothing is lost
        return EventLog([*events, _parse_line(rest, path, len(lines) + 1)])
    except DataError:
        return EventLog(events, f"{path}:{len(lines) + 1}: the last line was cut off while being written; left out")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file; a torn last line is left out with a Python warning. See :func:`read_event_log`."""
    log = read_event_log(path)
    if log.torn:
        warnings.warn(log.torn, stacklevel=2)
    return log.events


def _parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}:{number}: not a JSON object ({error}); the file was changed or damaged") from error
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise DataError(f'{path}:{number}: not an event: a JSON object with a "type" is needed')
    return event


@dataclass
class RunDirectory:
    """A run directory, and the right to write to it while ``lock`` is held.

    >>> with RunDirectory.create(path, command=["gspo", "train"], config_text="...") as run:  # doctest: +SKIP
    ...     with run.event_writer() as events:
    ...         events.write("warning", message="hello")
    """

    path: Path
    lock: TextIO | None = field(default=None, repr=False)

    recipe_path = property(lambda self: self.path / "recipe.toml")
    info_path = property(lambda self: self.path / "run.json")
    events_path = property(lambda self: self.path / "events.jsonl")
    summary_path = property(lambda self: self.path / "summary.json")
    checkpoints_path = property(lambda self: self.path / "checkpoints")
    journal_path = property(lambda self: self.path / "journal")

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        command: Sequence[str] = (),
        config_text: str = "",
        versions: Mapping[str, str] | None = None,
        seed: int = 0,
        host: Mapping[str, Any] | None = None,
    ) -> Self:
        """Makes the directory (parents too), locks it and writes recipe.toml and run.json.

        Versions and host facts of this process are added to the given ones (``versions``, ``host``).

        Raises:
            RunDirectoryError: in use by another process, already holding a run, holding other files, or
                not writable.
        """
        run = cls(Path(path))
        _refuse_foreign(run)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            sync_path(run.path.parent)
            run.lock = _acquire(run.path)
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {run.path}: cannot be made ({error.strerror}); choose another --run-dir"
            ) from error
        try:
            _refuse_old_run(run)
            shutil.rmtree(run.journal_path, ignore_errors=True)  # of an attempt that trained nothing
            replace_file(run.recipe_path, config_text.encode())
            info = {
                "command": list(command),
                "versions": {**package_versions(), **(versions or {})},
                "seed": seed,
                "started": time.time(),
                "host": {**_host(), **(host or {})},
            }
            run.events_path.touch()
            write_json(run.info_path, info)  # the last: with it the directory holds a run
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def reopen(cls, path: Path | str) -> Self:
        """Locks the directory of a run that was made before, to continue it.

        Raises:
            RunDirectoryError: holds no run, or is in use by another process.
        """
        run = cls(Path(path))
        if not run.info_path.is_file() or not run.recipe_path.is_file():
            raise RunDirectoryError(
                f"{path} holds no run to continue (no run.json and recipe.toml); give the --run-dir of a run that "
                "was started"
            )
        run.lock = _acquire(run.path)
        return run

    def info(self) -> dict[str, Any]:
        """What run.json says. Raises RunDirectoryError if it cannot be read."""
        try:
            found = json.loads(self.info_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.info_path}: cannot be read ({error}); the run cannot be identified") from (
                error
            )
        return dict(found)

    def note_resume(self, **fields: Any) -> None:
        """Adds one entry, with the time, to the list ``resumed`` of run.json."""
        info = self.info()
        write_json(self.info_path, {**info, "resumed": [*info.get("resumed", []), {"time": time.time(), **fields}]})

    def cut_events(self, size: int) -> None:
        """Leaves the first ``size`` bytes of events.jsonl: what a checkpoint knows of. The rest will come again.

        Raises:
            RunDirectoryError: there are fewer, or the cut is not at the end of a line.
        """
        with self.events_path.open("a+b") as file:
            have = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if have < size or (size and file.read(1) != b"\n"):
                raise RunDirectoryError(
                    f"{self.events_path}: has {have} bytes and no event that ends at byte {size}, where the checkpoint "
                    "was taken; the file was changed or damaged"
                )
            file.truncate(size)
            os.fsync(file.fileno())

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` belongs (not created here)."""
        return self.checkpoints_path / f"step-{step:06d}"

    def event_writer(self) -> EventWriter:
        return EventWriter(self.events_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json as a whole or not at all; non-finite numbers become null."""
        write_json(self.summary_path, summary)

    def close(self) -> None:
        """Gives the lock back; what is on disk stays."""
        if self.lock is not None:
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # also where a forked child still has the file open
            self.lock.close()
            self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


def write_json(path: Path, value: Any) -> None:
    """:func:`replace_file` with JSON. Non-finite numbers become null."""
    text = json.dumps(_plain(value, path.name, {}), indent=2, ensure_ascii=False, allow_nan=False)
    replace_file(path, (text + "\n").encode())


def _acquire(path: Path) -> TextIO:
    """The lock file of ``path``, open and locked, with our process id in it."""
    lock = (path / "run.lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise RunDirectoryError(
            f"run directory {path} is in use by pid {owner}; wait for that run or choose another --run-dir"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _refuse_foreign(run: RunDirectory) -> None:
    """Refuses a path that is a file, or a directory with files that no run has written."""
    if run.path.exists() and not run.path.is_dir():
        raise RunDirectoryError(f"run directory {run.path} is a file; choose another --run-dir")
    names = {entry.name for entry in _entries(run.path)}
    if names and "run.lock" not in names and not run.info_path.exists():
        shown = ", ".join(sorted(names)[:3])
        raise RunDirectoryError(
            f"run directory {run.path} holds other files ({shown}) and no run; choose an empty or new --run-dir"
        )


def _refuse_old_run(run: RunDirectory) -> None:
    """Refuses a directory in which anything was trained or evaluated; one that failed before that is used again."""
    if not run.info_path.exists():
        return
    events = read_event_log(run.events_path).events if run.events_path.exists() else []
    kinds = {event["type"] for event in events}
    if not kinds & {"sft", "step", "evaluation", "checkpoint"} and not any(_entries(run.checkpoints_path)):
        run.events_path.unlink(missing_ok=True)
        return
    ends = [event for event in events if event["type"] == "end"]
    state = f"a run with status {ends[-1]['status']!r}" if ends else "a run that did not reach its end"
    raise RunDirectoryError(
        f"run directory {run.path} already holds {state}; continue it with gspo train --resume {run.path}, or choose "
        "another --run-dir"
    )


def _entries(path: Path) -> Iterator[Path]:
    return path.iterdir() if path.is_dir() else iter(())


def package_versions() -> dict[str, str]:
    """Versions of what matters for the numbers, read from the installed metadata (nothing is imported)."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("gspo", "torch", "transformers", "numpy", "tokenizers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _host() -> dict[str, Any]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.system(), "machine": platform.machine(), "num_cpus": cpus}
