"""The reward functions that come with the package, and how a recipe's list becomes a reward set."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from gspo.errors import InputError, RewardError
from gspo.rewards.base import RewardSet, Unscored, WeightedReward, completion_text, gold_answers
from gspo.rewards.load import adapt_verl, load_reward_function
from gspo.rewards.pool import VerifierPool
from gspo.rewards.verdict import Verdict

VERIFIERS = {
    "exact_match": "gspo.rewards.exact_match",
    "number": "gspo.rewards.number",
    "math": "gspo.rewards.math",
}
BUILTIN = (*VERIFIERS, "task")
#: The column of a generated row that names the instance to the task's scorer.
TASK_COLUMN = "task_args"


class FunctionSettings(Protocol):
    """One entry of ``[[reward.functions]]``."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def kind(self) -> Any: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class ScoredTask(Protocol):
    """A task whose answers ``scorer`` judges: ``"module:function"`` with (text, *row[TASK_COLUMN]) -> float or None."""

    @property
    def name(self) -> str: ...
    @property
    def scorer(self) -> str: ...


class VerifierReward:
    """A verifier as a reward function: 1.0 for right, 0.0 for wrong, ``Unscored`` where nothing could be judged.

    An answer that runs into the time or memory limit could not be shown to be right: 0.0 if the gold answer can be
    read. A crash of the process says nothing about the answer: unscored.
    """

    def __init__(self, module: str, pool: VerifierPool, answer_column: str = "answer") -> None:
        self.module = module
        self.pool = pool
        self.answer_column = answer_column

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | Unscored]:
        golds = ["" if gold is None else str(gold) for gold in gold_answers(columns, self.answer_column)]
        texts = [completion_text(completion) for completion in completions]
        verdicts = self.pool.run(f"{self.module}:verify", list(zip(golds, texts, strict=True)))
        return [self._value(gold, verdict) for gold, verdict in zip(golds, verdicts, strict=True)]

    def _value(self, gold: str, verdict: Verdict) -> float | Unscored:
        if verdict.value is not None:
            return float(verdict.value)
        if verdict.ran_into_limit:
            readable = self.pool.run(f"{self.module}:read_gold", [(gold,)])[0]
            return 0.0 if readable.value else Unscored(f"gold: {readable.reason or readable.failure}")
        return Unscored(verdict.failure or verdict.reason)


class TaskReward:
    """A generated task's own scorer as a reward function, run in the verifier processes."""

    def __init__(self, scorer: str, pool: VerifierPool) -> None:
        self.scorer = scorer
        self.pool = pool

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | Unscored]:
        if TASK_COLUMN not in columns:
            raise RewardError("the reward 'task' needs prompts of a generated task; set [data] task")
        items = [(completion_text(c), *args) for c, args in zip(completions, columns[TASK_COLUMN], strict=True)]
        return [self._value(verdict) for verdict in self.pool.run(self.scorer, items)]

    @staticmethod
    def _value(verdict: Verdict) -> float | Unscored:
        if verdict.value is not None:
            return float(verdict.value)
        if verdict.ran_into_limit:
            return 0.0
        return Unscored(verdict.failure or verdict.reason or "the task gave no score")


def build_rewards(
    functions: Sequence[FunctionSettings],
    *,
    timeout_s: float = 5.0,
    num_workers: int = 2,
    answer_column: str = "answer",
    task: ScoredTask | None = None,
) -> RewardSet:
    """The reward set of a recipe; without functions a generated task is scored by its own rule.

    Raises:
        RewardError: an unknown name, a function that cannot be loaded, or no function and no task.
        InputError: an extra is not installed.
    """
    if not functions and task is None:
        raise RewardError(f"no reward is given: add [[reward.functions]] with a name, one of {', '.join(BUILTIN)}")
    wanted = [(f.name, f.weight, str(f.kind), f.options) for f in functions] or [("task", 1.0, "trl", {})]
    pool = VerifierPool(num_workers, timeout_s, preload=_preloads([name for name, *_ in wanted], task))
    rewards = []
    for name, weight, kind, options in wanted:
        if name in BUILTIN and options:
            raise RewardError(f"the built-in reward {name!r} has no options; it was given {', '.join(options)}")
        function = _function(name, kind, pool, answer_column, task)
        rewards.append(WeightedReward(name, function, weight, options))
    return RewardSet(rewards, resources=[pool])


def _preloads(names: Sequence[str], task: ScoredTask | None) -> list[str]:
    modules = [VERIFIERS[name] for name in names if name in VERIFIERS]
    if "task" in names and task is not None:
        modules.append(task.scorer.partition(":")[0])
    return modules


def _function(
    name: str, kind: str, pool: VerifierPool, answer_column: str, task: ScoredTask | None
) -> Callable[..., Any]:
    if name == "task":
        if task is None:
            raise RewardError("the reward 'task' scores generated tasks, but [data] reads a file; name another reward")
        return TaskReward(task.scorer, pool)
    if name in VERIFIERS:
        if name == "math" and not all(map(importlib.util.find_spec, ("math_verify", "mpmath", "sympy"))):
            raise InputError("the reward 'math' needs an extra: pip install 'gspo[math]'")
        return VerifierReward(VERIFIERS[name], pool, answer_column)
    if ":" not in name:
        close = get_close_matches(name, BUILTIN, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RewardError(f'reward {name!r} is neither built in ({", ".join(BUILTIN)}) nor "module:function"{hint}')
    function = load_reward_function(name)
    return adapt_verl(function, answer_column) if kind == "verl" else function
