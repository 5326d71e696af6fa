"""``gspo doctor``: what went wrong in a run, in plain words. Reads the run directory; needs no model and no torch."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import ModelError, RunDirectoryError
from gspo.events import EventLog, RunDirectory, read_event_log
from gspo.train.guard import BY_NAME, alarms
from gspo.train.manifest import verify

#: Words of an end's message, what they mean, and what usually helps.
_CAUSES: Sequence[tuple[str, str, str]] = (
    ("CollapseError", "a detector of the guard stopped it", "see the findings; change the settings, start from an "
     "earlier checkpoint (model.path)"),
    ("(out_of_memory)", "the sampling engine ran out of memory", "lower rollout.max_slots or rollout.prompts_per_call, "
     "then gspo train --resume"),
    ("NumericalError", "a number was not finite", "lower train.learning_rate; go back to an earlier checkpoint; "
     "look at the responses named in the warnings"),
    ("CheckpointError", "a checkpoint could not be written", "free space on the disk, then gspo train --resume"),
    ("cannot be written", "the disk did not take what was written", "free space, then gspo train --resume"),
    ("OutOfMemoryError", "the device ran out of memory", "lower train.micro_batch_tokens or rollout.max_slots; "
     "model.gradient_checkpointing = true"),
    ("MemoryError", "the machine ran out of memory", "lower train.micro_batch_tokens or rollout.max_slots"),
    ("RewardError", "a reward function failed, or returned what is no score", "mend it, then gspo train --resume: the "
     "responses are in the journal"),
    ("EngineError", "the sampling engine failed", "gspo train --resume; the finished rollouts are kept"),
    ("DataError", "the data cannot be used", "mend the file that the message names"),
    ("ModelError", "the model or a checkpoint cannot be used", "see the message"),
)  # fmt: skip


#: What usually helps against a failure of the engine, by its kind.
_ENGINE_REMEDIES: Mapping[str, str] = {
    "out_of_memory": "lower rollout.max_slots or rollout.prompts_per_call",
    "timeout": "look whether the engine is overloaded or hangs; raise its time limit",
    "crashed": "look at the engine's own log, and for the kernel's out-of-memory messages (dmesg)",
    "bad_numbers": "the weights have diverged: go back to an earlier checkpoint, lower train.learning_rate",
    "rejected": "look at the prompt that is named",
}


@dataclass(frozen=True)
class Finding:
    """Something that went wrong, the evidence for it, and what usually helps."""

    what: str
    evidence: str
    remedy: str


def doctor(run_dir: Path) -> int:
    """Prints the state of a run and what is wrong with it. Exit status 1 if there are findings.

    Raises:
        InputError: not a run directory, or its events cannot be read.
    """
    run = RunDirectory(run_dir)
    if not run.info_path.is_file():
        raise RunDirectoryError(f"{run_dir} holds no run (no run.json)")
    log = read_event_log(run.events_path)
    print(_state(run, log))
    findings = list(diagnose(run, log))
    for finding in findings:
        print(f"\n{finding.what}\n  evidence: {finding.evidence}\n  usually helps: {finding.remedy}")
    if not findings:
        print("nothing is wrong with it, as far as its events and checkpoints tell")
    return 1 if findings else 0


def _state(run: RunDirectory, log: EventLog) -> str:
    """One sentence: how far it came and how it ended."""
    steps = log.of_type("step")
    start = log.of_type("start")
    planned = start[-1].get("num_steps") if start else None
    done = f"{steps[-1]['step'] if steps else 0}" + (f" of {planned}" if planned else "") + " steps"
    updates = log.of_type("sft")
    if not steps and updates:
        total = start[-1].get("num_sft_updates") if start else None
        done = f"{updates[-1]['update']}" + (f" of {total}" if total else "") + " updates of the cold start"
    resumed, back = len(run.info().get("resumed", [])), log.of_type("go_back")
    again = f", continued {resumed} times" if resumed else ""
    again += f", went back {back[-1]['attempt']} times" if back else ""
    return f"{run.path}: {_ending(run, log)} after {done}{again}"


def _ending(run: RunDirectory, log: EventLog) -> str:
    if log.events and log.events[-1]["type"] == "end":
        return str(log.events[-1]["status"])
    return "still going" if _is_locked(run) else "died"


def _is_locked(run: RunDirectory) -> bool:
    path = run.path / "run.lock"
    if not path.exists():
        return False
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def diagnose(run: RunDirectory, log: EventLog) -> Iterator[Finding]:
    """What went wrong, the end first, then what led to it."""
    yield from _end_findings(run, log)
    yield from _go_back_findings(log)
    for alarm in alarms(log.events):
        detector = BY_NAME[alarm.detector]
        yield Finding(
            f"{alarm.detector.replace('_', ' ')} at step {alarm.step}",
            f"{alarm.message} (rule: {detector.rule})",
            detector.remedy,
        )
    yield from _number_findings(log.events)
    yield from _score_findings(log.events)
    yield from _engine_findings(log.events)
    yield from _checkpoint_findings(run)


def _end_findings(run: RunDirectory, log: EventLog) -> Iterator[Finding]:
    again = f"gspo train --resume {run.path}"
    last = log.events[-1] if log.events else None
    if last is not None and last["type"] == "end":
        if last["status"] == "failed":
            message = str(last.get("message", ""))
            what, remedy = next(
                ((cause, remedy) for word, cause, remedy in _CAUSES if word in message),
                ("an error ended it", "see the message"),
            )
            yield Finding(f"the run failed: {what}", message, remedy)
        elif last["status"] == "interrupted":
            yield Finding("the run was interrupted", str(last.get("message", "Ctrl-C")), again)
        return
    if _is_locked(run):
        return
    torn = f"; {log.torn}" if log.torn else ""
    where = f"its last event is {last['type']!r}" if last is not None else "it has no events"
    yield Finding(
        "the run died without a word: its process was killed, or the machine stopped",
        f"{where} and no end follows{torn}",
        f"{again}; if it dies again, look for the kernel's out-of-memory messages (dmesg)",
    )


def _number_findings(events: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    steps = [event for event in events if event["type"] == "step"]
    for name, what in (
        ("skipped_updates/non_finite", "updates were skipped because a number was not finite"),
        ("rows/non_finite", "responses were left out because a log-prob was not finite"),
    ):
        total = sum(event["metrics"].get(name) or 0 for event in steps)
        if total:
            first = next(event["step"] for event in steps if event["metrics"].get(name))
            yield Finding(
                what,
                f"{total:.0f}, the first in step {first}; the warnings name them",
                "lower train.learning_rate; compare the engine's log-probs with the trainer's (mismatch/*)",
            )


def _score_findings(events: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Verdicts that were not reached."""
    steps = [event["metrics"] for event in events if event["type"] == "step"]
    unscored = sum(metrics.get("reward/unscored") or 0 for metrics in steps)
    timeouts = sum(metrics.get("reward/timeouts") or 0 for metrics in steps)
    if unscored or timeouts:
        yield Finding(
            "some responses could not be scored",
            f"{unscored:.0f} unscored responses, {timeouts:.0f} time-outs over {len(steps)} steps",
            "raise reward.timeout_s; score the answers in the samples by hand with the same function",
        )


def _go_back_findings(log: EventLog) -> Iterator[Finding]:
    """Each time that the run went back, and with what it went on."""
    for event in log.of_type("go_back"):
        yield Finding(
            f"it went back from step {event['from_step']} to step {event['step']} (attempt {event['attempt']})",
            f"{'; '.join(event['alarms'])}; the events of the stretch that it left are in {event['abandoned']}",
            f"it went on with learning rate {event['learning_rate']:.3g} and {event['num_mini_batches']} mini-batches; "
            "if that is well, make it the setting of the next run",
        )


def _engine_findings(events: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Calls of the engine that failed, by kind."""
    told = [event for event in events if event["type"] == "warning" and event.get("engine")]
    aborted = sum(event["metrics"].get("engine/aborted") or 0 for event in events if event["type"] == "step")
    for kind in sorted({str(event["engine"]) for event in told}):
        messages = [str(event["message"]) for event in told if event["engine"] == kind]
        left = f"; {aborted:.0f} responses were left unfinished" if aborted else ""
        yield Finding(
            f"calls of the sampling engine failed: {kind.replace('_', ' ')}",
            f"{len(messages)} times, the last: {messages[-1]}{left}",
            _ENGINE_REMEDIES.get(kind, "look at the message and at the engine's own log"),
        )


def _checkpoint_findings(run: RunDirectory) -> Iterator[Finding]:
    """Checkpoints that do not agree with their manifest."""
    folder = run.checkpoints_path
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        try:
            verify(path)
        except ModelError as error:
            yield Finding(
                f"checkpoint {path.name} is damaged",
                str(error),
                "remove it: gspo train --resume takes the newest good one; look at the disk",
            )
