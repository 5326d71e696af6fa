"""An engine that replays given completions, for tests, docs and rewards under development.

A script is a JSONL file with one prompt per line, or the same as a mapping::

    {"prompt_id": "train/0", "completions": ["42", {"token_ids": [7, 2], "logprobs": [-0.1, -0.2]}]}

A completion is text, or ``{"text" or "token_ids", "logprobs"?, "stop_reason"?}``. Sample i of a prompt gets completion
``i mod len``. Text is encoded once, and an end-of-text id is appended if the reason is "eos". Without log-probs
they are nan: unknown, never a number that could be trained on; use ``train.old_logprobs = "recompute"``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gspo.errors import DataError, EngineError, EngineFailure
from gspo.rollout.base import GenerationRequest, OnFinished, SamplingParams
from gspo.types import Completion, StopReason

Script = Mapping[str, Sequence[Any]]


class ScriptedEngine:
    """See the module's text. The tokenizer is needed where the script has text."""

    exact = False
    independent = True

    def __init__(self, script: Script | str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Raises DataError, naming file and line, for a script that cannot be read."""
        self.policy_version = 0
        self._tokenizer = tokenizer
        self._script = dict(script) if isinstance(script, Mapping) else _read(Path(script))

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        """Replays. Raises EngineError (rejected), naming the prompt id, where the script has nothing for a prompt."""
        results: list[list[Completion]] = []
        for index, request in enumerate(requests):
            scripted = self._script.get(request.prompt_id)
            if not scripted:
                raise EngineError(
                    f"the script has no completion for prompt {request.prompt_id!r} (it knows {len(self._script)} "
                    "prompts); add a line with this prompt_id",
                    EngineFailure.REJECTED,
                    request=index,
                )
            row = []
            for sample in range(request.num_samples):
                completion = self._completion(request.prompt_id, scripted[sample % len(scripted)], params)
                row.append(completion)
                if on_finished is not None:
                    on_finished(index, sample, completion)
            results.append(row)
        return results

    def _completion(self, prompt_id: str, entry: Any, params: SamplingParams) -> Completion:
        fields = {"text": entry} if isinstance(entry, str) else entry
        if not isinstance(fields, Mapping) or ("text" in fields) == ("token_ids" in fields):
            raise DataError(f"a scripted completion of prompt {prompt_id!r} needs either text or token_ids: {entry!r}")
        try:
            given = None if fields.get("stop_reason") is None else StopReason(fields["stop_reason"])
        except ValueError as error:
            raise DataError(f"a scripted completion of prompt {prompt_id!r}: {error}") from error
        ids, reason = self._ids(prompt_id, fields, given, params)
        logprobs = fields.get("logprobs")
        values = [float("nan")] * len(ids) if logprobs is None else logprobs
        try:
            return Completion(
                torch.tensor(ids, dtype=torch.int64),
                torch.tensor(values, dtype=torch.float32),
                reason,
                self.policy_version,
            )
        except ValueError as error:
            raise DataError(f"a scripted completion of prompt {prompt_id!r}: {error}") from error

    def _ids(
        self, prompt_id: str, fields: Mapping[str, Any], given: StopReason | None, params: SamplingParams
    ) -> tuple[list[int], StopReason]:
        """Ids and the reason: as given; else eos for text; else read off the last id of given ids."""
        if "token_ids" in fields:
            ids = [int(token) for token in fields["token_ids"]]
            guess = StopReason.EOS if ids and ids[-1] in params.stop_token_ids else StopReason.LENGTH
            return ids, given or (guess if ids else StopReason.EMPTY)
        if self._tokenizer is None:
            raise DataError(f"the script has text for prompt {prompt_id!r}; a tokenizer is needed to encode it")
        ids = list(self._tokenizer.encode(fields["text"], add_special_tokens=False))
        reason = given or StopReason.EOS
        if reason is StopReason.EOS and not (ids and ids[-1] in params.stop_token_ids):
            ids.append(self._end(params))
        return ids, reason

    def _end(self, params: SamplingParams) -> int:
        end = self._tokenizer.eos_token_id
        if end in params.stop_token_ids or not params.stop_token_ids:
            if end is None:
                raise DataError("the tokenizer has no end-of-text token; give stop_reason in the script")
            return int(end)
        return min(params.stop_token_ids)


def _read(path: Path) -> dict[str, Sequence[Any]]:
    script: dict[str, Sequence[Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the script {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(entry, dict) or "prompt_id" not in entry or not isinstance(entry.get("completions"), list):
            raise DataError(f'{path}, line {number}: needs "prompt_id" and a list "completions"')
        script[str(entry["prompt_id"])] = entry["completions"]
    if not script:
        raise DataError(f"the script {path} is empty")
    return script
