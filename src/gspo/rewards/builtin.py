"""The reward functions that come with the package, and how a recipe's list becomes a reward set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, Protocol

from gspo.errors import RewardError
from gspo.rewards.base import Resource, RewardSet, Unscored, WeightedReward, completion_text, gold_answers
from gspo.rewards.code import CodeReward
from gspo.rewards.gold import VERIFIERS, check_options, problem_defaults
from gspo.rewards.isolated import IsolatedReward
from gspo.rewards.load import adapt_verl, load_reward_function
from gspo.rewards.overlong import overlong_from_options
from gspo.rewards.policies import MathPolicy
from gspo.rewards.pool import VerifierPool
from gspo.rewards.verdict import Verdict
from gspo.sandbox import open_sandbox

BUILTIN = (*VERIFIERS, "code", "task", "overlong")
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

    Args:
        module: with ``verify`` and ``read_gold``.
        options: keyword arguments for ``verify``.
    """

    def __init__(
        self,
        module: str,
        pool: VerifierPool,
        answer_column: str = "answer",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.pool = pool
        self.answer_column = answer_column
        self.options = dict(options or {})
        self._rungs: Counter[str] = Counter()

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | Unscored]:
        golds = ["" if gold is None else str(gold) for gold in gold_answers(columns, self.answer_column)]
        texts = [completion_text(completion) for completion in completions]
        verdicts = self.pool.run(f"{self.module}:verify", list(zip(golds, texts, strict=True)), self.options)
        name = self.module.rpartition(".")[2]
        self._rungs.update(f"{name}/{verdict.rung}" for verdict in verdicts if verdict.rung)
        return [self._value(gold, verdict) for gold, verdict in zip(golds, verdicts, strict=True)]

    def _value(self, gold: str, verdict: Verdict) -> float | Unscored:
        if verdict.value is not None:
            return float(verdict.value)
        if verdict.ran_into_limit:
            readable = self.pool.run(f"{self.module}:read_gold", [(gold,)])[0]
            return 0.0 if readable.value else Unscored(f"gold: {readable.reason or readable.failure}")
        return Unscored(verdict.failure or verdict.reason)

    @property
    def counters(self) -> dict[str, int]:
        """How many answers each rung decided."""
        return dict(self._rungs)

    def close(self) -> None:
        """The pool is closed by whoever made it."""


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
    isolate: bool = False,
    memory_limit_mb: int = 4096,
    environment: Sequence[str] = (),
) -> RewardSet:
    """The reward set of a recipe; without functions a generated task is scored by its own rule.

    Args:
        isolate: functions named ``module:function`` run in killable processes too, with at most
            ``memory_limit_mb`` of address space, and see no secret but those named in ``environment``.

    Raises:
        RewardError: an unknown name, a function that cannot be loaded, or no function and no task.
        InputError: an extra is not installed.
    """
    if not functions and task is None:
        raise RewardError(f"no reward is given: add [[reward.functions]] with a name, one of {', '.join(BUILTIN)}")
    wanted = [(f.name, f.weight, str(f.kind), f.options) for f in functions] or [("task", 1.0, "trl", {})]
    pool = VerifierPool(num_workers, timeout_s, preload=_preloads([name for name, *_ in wanted], task))
    rewards: list[WeightedReward] = []
    resources: list[Resource] = [pool]
    for name, weight, kind, options in wanted:
        if name == "code":
            code = _code(options, answer_column)
            resources.append(code)
            rewards.append(WeightedReward(name, code, weight))
            continue
        if name == "overlong":
            rewards.append(WeightedReward(name, overlong_from_options(options), weight, shaping=True))
            continue
        if name == "math":
            rewards.append(WeightedReward(name, _math(options, pool, answer_column), weight))
            continue
        if isolate and name not in BUILTIN and ":" in name:
            workers = VerifierPool(num_workers, timeout_s, memory_limit_mb, _modules(name), environment)
            resources.append(workers)
            rewards.append(WeightedReward(name, IsolatedReward(name, kind, workers, answer_column, options), weight))
            continue
        if name in BUILTIN:
            check_options(name, options)
        function = _function(name, kind, pool, answer_column, task)
        rewards.append(WeightedReward(name, function, weight, options))
    resources += [reward.function for reward in rewards if isinstance(reward.function, VerifierReward)]
    return RewardSet(rewards, resources=resources)


def _math(options: Mapping[str, Any], pool: VerifierPool, answer_column: str) -> VerifierReward:
    check_options("math", options)
    policy = MathPolicy.from_options(options)
    return VerifierReward(VERIFIERS["math"], pool, answer_column, {"policy": asdict(policy)})


def _code(options: Mapping[str, Any], answer_column: str) -> CodeReward:
    """The reward ``code``; its sandbox proves itself here, before anything is sampled."""
    check_options("code", options)
    return CodeReward(
        open_sandbox(options.get("isolation", "auto"), options.get("num_boxes")),
        options.get("credit", "all"),
        answer_column,
        options.get("solution_column", "solution"),
        problem_defaults(options),
    )


def _preloads(names: Sequence[str], task: ScoredTask | None) -> list[str]:
    modules = [VERIFIERS[name] for name in names if name in VERIFIERS]
    if "task" in names and task is not None:
        modules.append(task.scorer.partition(":")[0])
    return modules


def _modules(name: str) -> list[str]:
    """What a worker imports before its first call, which is not charged for it; a file is loaded by the call."""
    module = name.rpartition(":")[0]
    return [] if module.endswith(".py") else [module]


def _function(
    name: str, kind: str, pool: VerifierPool, answer_column: str, task: ScoredTask | None
) -> Callable[..., Any]:
    if name == "task":
        if task is None:
            raise RewardError("the reward 'task' scores generated tasks, but [data] reads a file; name another reward")
        return TaskReward(task.scorer, pool)
    if name in VERIFIERS:
        return VerifierReward(VERIFIERS[name], pool, answer_column)
    if ":" not in name:
        close = get_close_matches(name, BUILTIN, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RewardError(f'reward {name!r} is neither built in ({", ".join(BUILTIN)}) nor "module:function"{hint}')
    function = load_reward_function(name)
    return adapt_verl(function, answer_column) if kind == "verl" else function
