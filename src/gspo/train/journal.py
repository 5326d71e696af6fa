"""What was sampled and judged, written down before it is trained on, and used again after a crash.

One file per step, ``journal/step-000012.jsonl``; each line is a digest and a JSON record::

    9f3c...e1 {"kind": "completions", "key": ..., "completions": [...]}
    04ab...77 {"kind": "scores", "key": ..., "scores": [...], "timeouts": 0}

A record stands for one whole call of the engine or of the rewards, and is synced before the call returns. Calls are
found again by what was asked (prompt ids, seeds, sampling parameters, weights; prompt ids and sampled ids), not by
their order. A rollout round is one call, or several where the recipe says so (``rollout.prompts_per_call``), and a call
that broke off is made again as a whole: the log-probs of a response depend, in their last bits, on what else was in the
call, and a run that is continued is to end with the same bits. Of an engine without this dependence every group is a
record of its own, written when its last response is finished (docs/decisions/0080).
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.errors import EngineFailure
from gspo.events import append, redact, sync_path
from gspo.rewards.base import RewardSet
from gspo.rollout.base import Engine, GenerationRequest, OnFinished, SamplingParams, is_independent
from gspo.rollout.retrying import Failure, FailureLog
from gspo.types import Completion, Prompt, Score, StopReason

_NAME = re.compile(r"step-(\d+)\.jsonl")
_DIGEST = 16  # hexadecimal digits in front of each record


class Journal:
    """The records of a run by call; only the file of the open step is in memory.

    Args:
        directory: made when the first record is written.
        warn: told, in a sentence, about records that cannot be used.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None] = lambda message: None) -> None:
        self._directory = directory
        self._warn = warn
        self._step: int | None = None
        self._file: int | None = None
        self._records: dict[tuple[str, str], Mapping[str, Any]] = {}

    def find(self, step: int, kind: str, key: str) -> Mapping[str, Any] | None:
        """The record of an earlier call of this step, or None."""
        self._open(step)
        return self._records.get((kind, key))

    def write(self, step: int, kind: str, key: str, **fields: Any) -> None:
        """Appends a record; returns once it is on the disk.

        Raises:
            RunError: the disk did not take it.
        """
        self._open(step)
        record = {"kind": kind, "key": key, **fields}
        if self._file is None:
            self._file = self._create(step)
        append(self._file, _line(record), self._path(step))
        os.fsync(self._file)
        self._records[kind, key] = record

    def forget(self, up_to: int) -> None:
        """Deletes the files of steps up to and with ``up_to``: a checkpoint has what came of them."""
        if not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            name = _NAME.fullmatch(path.name)
            if name is not None and int(name[1]) <= up_to:
                if int(name[1]) == self._step:
                    self.close()
                path.unlink()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = self._step = None
        self._records = {}

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}.jsonl"

    def _create(self, step: int) -> int:
        """Opens the file of a step for appending, its name and the directory's own safely on the disk."""
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True)
            sync_path(self._directory.parent)
        descriptor = os.open(self._path(step), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        sync_path(self._directory)
        return descriptor

    def _open(self, step: int) -> None:
        """Reads the file of another step, and cuts off what cannot be trusted."""
        if step == self._step:
            return
        self.close()
        self._step = step
        path = self._path(step)
        if not path.exists():
            return
        records, good, fault = read_journal(path)
        self._records = {(record["kind"], record["key"]): record for record in records}
        if fault is not None:
            if not fault.torn:
                self._warn(f"{path}:{fault.line}: damaged; it and what follows is sampled and scored again")
            os.truncate(path, good)


class Fault:
    """Where a journal stops being readable; ``torn``: its last line was cut off while being written."""

    def __init__(self, line: int, torn: bool) -> None:
        self.line = line
        self.torn = torn


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int, Fault | None]:
    """The records up to the first that is damaged, the bytes they take, and what ends them."""
    records: list[dict[str, Any]] = []
    good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line)
            if record is None:
                last = not file.read(1)
                return records, good, Fault(number, torn=last and not line.endswith(b"\n"))
            records.append(record)
            good += len(line)
    return records, good, None


def _line(record: Mapping[str, Any]) -> bytes:
    text = redact(json.dumps(record, ensure_ascii=True)).encode()
    return _check(text) + b" " + text + b"\n"


def _check(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST // 2).hexdigest().encode()


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None if the line is not what was written."""
    digest, text = line[:_DIGEST], line[_DIGEST + 1 : -1]
    if not line.endswith(b"\n") or digest != _check(text):
        return None
    return dict(json.loads(text))


# The two calls that are written down.


class JournaledEngine:
    """An engine whose finished work is kept; the same request again is answered from the journal.

    Args:
        step: tells the step whose file the next call belongs to.
        check_stop: called as responses finish; it may raise to break the call off.
        prompts_per_call: requests of one call of the engine; None for all.
        failures: those of ``engine``; kept with its answers and told again with them.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        step: Callable[[], int],
        check_stop: Callable[[], None],
        *,
        prompts_per_call: int | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._step = step
        self._check_stop = check_stop
        self._prompts_per_call = prompts_per_call
        self._failures = failures or FailureLog()

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._engine.policy_version = version

    @property
    def exact(self) -> bool:
        return self._engine.exact

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        """See :class:`gspo.rollout.base.Engine`."""
        size = self._prompts_per_call or len(requests)
        groups: list[list[Completion]] = []
        for first in range(0, len(requests), max(1, size)):
            told = _shifted(on_finished, first)
            part = requests[first : first + size]
            groups += (self._by_group if is_independent(self._engine) else self._whole)(part, params, told)
        return groups

    def _whole(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished
    ) -> list[list[Completion]]:
        """One call, one record."""
        key = generation_key(requests, params, self.policy_version)
        record = self._journal.find(self._step(), "completions", key)
        if record is not None:
            return self._replay(record, range(len(requests)), on_finished)

        def finished(index: int, sample: int, completion: Completion) -> None:
            on_finished(index, sample, completion)
            self._check_stop()

        before = len(self._failures.failures)
        groups = self._engine.generate(requests, params, finished)
        self._write(key, groups, before)
        return groups

    def _by_group(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished
    ) -> list[list[Completion]]:
        """One call for the groups that no record has; each of them is a record once its last response is there."""
        keys = [generation_key([request], params, self.policy_version) for request in requests]
        groups: dict[int, list[Completion]] = {}
        for index, key in enumerate(keys):
            record = self._journal.find(self._step(), "completions", key)
            if record is not None:
                (groups[index],) = self._replay(record, [index], on_finished)
        missing = [index for index in range(len(requests)) if index not in groups]
        arrived: dict[int, dict[int, Completion]] = {index: {} for index in missing}
        before = len(self._failures.failures)

        def finished(place: int, sample: int, completion: Completion) -> None:
            nonlocal before
            index = missing[place]
            on_finished(index, sample, completion)
            arrived[index][sample] = completion
            if len(arrived[index]) == requests[index].num_samples:
                self._write(keys[index], [[arrived[index][i] for i in range(len(arrived[index]))]], before)
                before = len(self._failures.failures)
            self._check_stop()

        if missing:
            sampled = self._engine.generate([requests[index] for index in missing], params, finished)
            groups |= dict(zip(missing, sampled, strict=True))
        return [groups[index] for index in range(len(requests))]

    def _replay(
        self, record: Mapping[str, Any], indices: Sequence[int], on_finished: OnFinished
    ) -> list[list[Completion]]:
        """The completions of a record; what went wrong while they were sampled is told again."""
        for kind, message, retried in record["failures"]:
            self._failures.note(Failure(EngineFailure(kind), message, retried))
        groups = [[decode_completion(item) for item in group] for group in record["completions"]]
        for index, group in zip(indices, groups, strict=True):
            for sample, completion in enumerate(group):
                on_finished(index, sample, completion)
        return groups

    def _write(self, key: str, groups: Sequence[Sequence[Completion]], before: int) -> None:
        """before: how many failures there were when what is written was asked for."""
        failures = [[str(f.kind), f.message, f.retried] for f in self._failures.failures[before:]]
        encoded = [[encode_completion(completion) for completion in group] for group in groups]
        self._journal.write(self._step(), "completions", key, completions=encoded, failures=failures)


class JournaledRewards(RewardSet):
    """A reward set whose verdicts are kept; the same responses again get the same verdicts without being judged."""

    def __init__(self, inner: RewardSet, journal: Journal, step: Callable[[], int]) -> None:
        super().__init__(inner.functions)
        self._inner = inner
        self._journal = journal
        self._step = step
        self._replayed_timeouts = 0

    def score(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        stop_reasons: Sequence[str] | None = None,
        *,
        shaping: bool = True,
    ) -> list[Score]:
        key = scoring_key(prompts, completion_ids, stop_reasons, shaping)
        record = self._journal.find(self._step(), "scores", key)
        if record is not None:
            self._replayed_timeouts += record["timeouts"]
            return [decode_score(item) for item in record["scores"]]
        before = self._timeouts()
        scores = self._inner.score(prompts, texts, completion_ids, stop_reasons, shaping=shaping)
        encoded = [encode_score(score) for score in scores]
        self._journal.write(self._step(), "scores", key, scores=encoded, timeouts=self._timeouts() - before)
        return scores

    def _timeouts(self) -> int:
        return self._inner.counters.get("timeouts", 0)

    @property
    def counters(self) -> dict[str, int]:
        """The inner set's; time-outs of replayed verdicts count as they did when they happened."""
        found = dict(self._inner.counters)
        if self._replayed_timeouts:
            found["timeouts"] = found.get("timeouts", 0) + self._replayed_timeouts
        return found

    def close(self) -> None:
        self._inner.close()


def _shifted(on_finished: OnFinished | None, first: int) -> OnFinished:
    """For a part of a call that begins with request ``first``."""

    def finished(index: int, sample: int, completion: Completion) -> None:
        if on_finished is not None:
            on_finished(first + index, sample, completion)

    return finished


def generation_key(requests: Sequence[GenerationRequest], params: SamplingParams, policy_version: int) -> str:
    """Digest of everything that decides what an engine samples."""
    asked = [[r.prompt_id, list(r.token_ids), list(r.seeds)] for r in requests]
    how = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return _key([asked, how, policy_version])


def scoring_key(
    prompts: Sequence[Prompt],
    completion_ids: Sequence[Sequence[int]],
    stop_reasons: Sequence[str] | None,
    shaping: bool,
) -> str:
    """Digest of the responses that are judged, and of how."""
    rows = [[prompt.id, list(ids)] for prompt, ids in zip(prompts, completion_ids, strict=True)]
    return _key([rows, None if stop_reasons is None else list(map(str, stop_reasons)), shaping])


def _key(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=sorted).encode(), digest_size=16).hexdigest()


def encode_completion(completion: Completion) -> dict[str, Any]:
    """As JSON can carry it; log-probs bit for bit, not-a-numbers included."""
    return {
        "ids": _encode(completion.token_ids),
        "logprobs": _encode(completion.logprobs),
        "stop_reason": str(completion.stop_reason),
        "policy_version": completion.policy_version,
        "routing": None if completion.routing is None else _encode(completion.routing),
    }


def decode_completion(item: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=_decode(item["ids"]),
        logprobs=_decode(item["logprobs"]),
        stop_reason=StopReason(item["stop_reason"]),
        policy_version=int(item["policy_version"]),
        routing=None if item["routing"] is None else _decode(item["routing"]),
    )


def _encode(tensor: Tensor) -> list[Any]:
    """Data type, shape and compressed bytes."""
    array = np.ascontiguousarray(tensor.cpu().numpy())
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()
    return [array.dtype.str, list(array.shape), data]


def _decode(item: Sequence[Any]) -> Tensor:
    dtype, shape, data = item
    array = np.frombuffer(zlib.decompress(base64.b64decode(data)), dtype=np.dtype(dtype)).reshape(shape)
    return torch.from_numpy(array.copy())


def encode_score(score: Score) -> dict[str, Any]:
    return {"value": score.value, "components": dict(score.components), "failure": score.failure}


def decode_score(item: Mapping[str, Any]) -> Score:
    return Score(item["value"], dict(item["components"]), item["failure"])
