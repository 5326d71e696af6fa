"""A user's reward function in processes that can be killed: whatever it does, the run goes on.

Each response is judged by a call of its own, so that one that hangs, crashes or eats memory costs no other its score.
It is then unscored with the reason, never 0. Functions that compare the responses of a call with one another, or that
keep a model in memory, belong into the trainer's process (``reward.isolate = false``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.rewards.base import Unscored, completion_text, gold_answers
from gspo.rewards.pool import VerifierPool
from gspo.rewards.verdict import Verdict

#: How the pool's verdict on a process that ended by itself begins.
CRASHED = "the verifier process crashed"


class IsolatedReward:
    """A reward function that calls another one in worker processes.

    Args:
        path: ``"module:function"`` or ``"file.py:function"``.
        kind: ``"trl"`` or ``"verl"``.
        pool: keeps the limits of time and memory.
        options: keyword arguments for the function.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        pool: VerifierPool,
        answer_column: str = "answer",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.kind = kind
        self.pool = pool
        self.answer_column = answer_column
        self.options = dict(options or {})

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float | Unscored | None]:
        if self.kind == "verl":
            arguments = self._verl(completions, columns)
        else:
            rows = zip(prompts, completions, completion_ids, strict=True)
            arguments = [
                {
                    **{name: [column[row]] for name, column in columns.items()},
                    "prompts": [prompt],
                    "completions": [completion],
                    "completion_ids": [list(ids)],
                    **self.options,
                }
                for row, (prompt, completion, ids) in enumerate(rows)
            ]
        verdicts = self._call(arguments)
        crashed = [row for row, verdict in enumerate(verdicts) if _crashed(verdict)]
        for row, verdict in zip(crashed, self._call([arguments[row] for row in crashed]), strict=True):
            verdicts[row] = verdict  # somebody else may have killed the process; a second crash is the function's own
        return [self._value(v.value, v.failure or v.reason) for v in verdicts]

    def _call(self, arguments: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        return self.pool.run("gspo.rewards.user_call:call", [(self.path, self.kind, each) for each in arguments])

    def _verl(self, completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        count = len(completions)
        golds = gold_answers(columns, self.answer_column)
        sources = columns.get("data_source", [""] * count)
        extras = columns.get("extra_info", [None] * count)
        return [
            {
                "data_source": source,
                "solution_str": completion_text(completion),
                "ground_truth": gold,
                "extra_info": extra or {},
                **self.options,
            }
            for source, completion, gold, extra in zip(sources, completions, golds, extras, strict=True)
        ]

    @staticmethod
    def _value(value: bool | float | None, reason: str | None) -> float | Unscored | None:
        if value is not None:
            return float(value)
        return Unscored(reason) if reason else None


def _crashed(verdict: Verdict) -> bool:
    """The process ended before it answered, and no limit had ended it."""
    return verdict.failure is not None and not verdict.ran_into_limit and verdict.failure.startswith(CRASHED)
