"""Reward functions and sets of them.

A reward function is called once for all responses of a step, with the signature that TRL uses::

    def reward(prompts, completions, completion_ids, stop_reasons, **columns) -> list[float | None]: ...

``prompts`` and ``completions`` are as the data had them: text and text, or chat messages and
``[{"role": "assistant", "content": text}]``. ``stop_reasons`` are the engine's words on why each ended ("eos",
"length", ...), None for an answer that no engine sampled. Every column of the data is a list with one value per
completion. A function gets the arguments that it names, or all with ``**kwargs``. It may be ``async``.

What a value means:

- a finite number: the score of that completion;
- ``None``: this function does not apply to that row, and is left out of its sum;
- nan, or ``Unscored(reason)``: the row could not be scored; its whole score is None, whatever the others say, so that
  a failure never becomes a lower reward;
- anything else, infinities included, is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

from gspo.errors import RewardError, RunError
from gspo.types import Prompt, Score

_OWN_ARGUMENTS = ("prompts", "completions", "completion_ids", "stop_reasons")


@dataclass(frozen=True)
class Unscored:
    """Returned in place of a number: this row could not be scored, and why."""

    reason: str


@dataclass(frozen=True)
class RewardRequest:
    """The responses of one call; every sequence has one entry per completion."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    stop_reasons: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class WeightedReward:
    """One reward function with its weight and extra keyword arguments.

    shaping: it steers training and measures nothing, so it is left out where answers are evaluated or audited.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    shaping: bool = False


class Resource(Protocol):
    """What a reward set closes with itself, such as a pool of verifier processes."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...


class RewardSet:
    """The weighted sum of reward functions.

    >>> reward_set = RewardSet([WeightedReward("length", lambda completions: [float(len(c)) for c in completions])])
    >>> reward_set.score([Prompt("p", "2+2=", (1,))], ["four"], [[1, 2]])[0].value
    4.0
    """

    def __init__(self, functions: Sequence[WeightedReward], resources: Sequence[Resource] = ()) -> None:
        names = [reward.name for reward in functions]
        if not names:
            raise RewardError("no reward function is given; name at least one under [[reward.functions]]")
        if len(set(names)) < len(names):
            raise RewardError(f"a reward function is named twice: {', '.join(names)}")
        self.functions = tuple(functions)
        self._resources = tuple(resources)

    def score(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        stop_reasons: Sequence[str] | None = None,
        *,
        shaping: bool = True,
    ) -> list[Score]:
        """One score per response; the sequences are parallel.

        Args:
            stop_reasons: the engine's; None for answers that no engine sampled.
            shaping: whether functions that only shape the reward of training take part.

        Raises:
            RewardError: a function raised, or returned something other than one allowed value per completion.
        """
        if not texts:
            return []
        request = make_request(prompts, texts, completion_ids, stop_reasons)
        functions = [reward for reward in self.functions if shaping or not reward.shaping]
        columns = _call_all(functions, request)
        checked = [
            [_check(reward.name, row, value) for row, value in enumerate(values)]
            for reward, values in zip(functions, columns, strict=True)
        ]
        return [_combine(functions, [values[row] for values in checked]) for row in range(len(request))]

    @property
    def counters(self) -> dict[str, int]:
        """What the verifier pools counted (items, timeouts, crashes, ...)."""
        total: dict[str, int] = {}
        for resource in self._resources:
            for name, count in resource.counters.items():
                total[name] = total.get(name, 0) + count
        return total

    def close(self) -> None:
        """Ends the processes of the verifiers."""
        for resource in self._resources:
            resource.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _call_all(functions: Sequence[WeightedReward], request: RewardRequest) -> list[list[Any]]:
    results = [_call(reward, request) for reward in functions]
    waiting = {index: result for index, result in enumerate(results) if inspect.isawaitable(result)}
    if waiting:
        done = run_coroutine(_gather([(functions[i].name, waiting[i]) for i in waiting]))
        for index, result in zip(waiting, done, strict=True):
            results[index] = result
    return [_as_list(reward.name, result, len(request)) for reward, result in zip(functions, results, strict=True)]


def _combine(functions: Sequence[WeightedReward], values: Sequence[float | Unscored | None]) -> Score:
    components: dict[str, float | None] = {}
    total, applied, failures = 0.0, False, []
    for reward, value in zip(functions, values, strict=True):
        if isinstance(value, Unscored):
            failures.append(f"{reward.name}: {value.reason}")
            components[reward.name] = None
            continue
        components[reward.name] = value
        if value is not None:
            total += reward.weight * value
            applied = True
    if failures:
        return Score(None, components, "; ".join(failures))
    return Score(total, components) if applied else Score(None, components, "no reward applied")


def make_request(
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    stop_reasons: Sequence[str] | None = None,
) -> RewardRequest:
    """The request for parallel prompts, texts, ids and stop reasons; a column that a row lacks is None there."""
    reasons = [None] * len(texts) if stop_reasons is None else [str(reason) for reason in stop_reasons]
    if not len(prompts) == len(texts) == len(completion_ids) == len(reasons):
        raise ValueError(
            f"{len(prompts)} prompts, {len(texts)} texts, {len(completion_ids)} rows of ids, {len(reasons)} reasons"
        )
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return RewardRequest(
        prompts=[p.content if isinstance(p.content, str) else [dict(m) for m in p.content] for p in prompts],
        completions=[
            text if isinstance(prompt.content, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ],
        completion_ids=[list(ids) for ids in completion_ids],
        columns={name: [prompt.columns.get(name) for prompt in prompts] for name in names},
        stop_reasons=reasons,
    )


def completion_text(completion: Any) -> str:
    """The text of a completion, for text and for chat prompts alike."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def gold_answers(columns: Mapping[str, Sequence[Any]], answer_column: str) -> Sequence[Any]:
    """The gold column; for verl's files ``reward_model["ground_truth"]``.

    Raises:
        RewardError: neither is there.
    """
    if answer_column in columns:
        return columns[answer_column]
    models = columns.get("reward_model", ())
    if models and all(isinstance(model, Mapping) and "ground_truth" in model for model in models):
        return [model["ground_truth"] for model in models]
    raise RewardError(f"the data have no column {answer_column!r} with gold answers{_nearest(answer_column, columns)}")


def _nearest(name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    close = get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {', '.join(map(repr, known))}" if known else "; there are no columns besides the prompt"


def _call(reward: WeightedReward, request: RewardRequest) -> Any:
    arguments = _arguments(reward, request)
    try:
        return reward.function(**arguments)
    except (RewardError, RunError):  # RunError: a verifier process cannot be started
        raise
    except Exception as error:
        raise _raised(reward.name, error) from error


def _raised(name: str, error: Exception) -> RewardError:
    return RewardError(f"reward {name!r} raised {type(error).__name__}: {error}")


def _arguments(reward: WeightedReward, request: RewardRequest) -> dict[str, Any]:
    """What the function accepts of prompts, completions, completion_ids, columns and its options."""
    own = {name: getattr(request, name) for name in _OWN_ARGUMENTS}
    offered = {**request.columns, **own, **reward.options}
    try:
        parameters = inspect.signature(reward.function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return offered
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        accepted = offered
    else:
        accepted = {name: value for name, value in offered.items() if name in parameters}
        unknown = [name for name in reward.options if name not in parameters]
        if unknown:
            raise RewardError(
                f"reward {reward.name!r} has no argument {unknown[0]!r}{_nearest(unknown[0], parameters)}"
            )
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in parameters.items():
        if parameter.kind in kinds and parameter.default is parameter.empty and name not in accepted:
            hint = _nearest(name, request.columns)
            raise RewardError(f"reward {reward.name!r} needs {name!r}, but the data have no such column{hint}")
    return accepted


async def _gather(waiting: Sequence[tuple[str, Awaitable[Any]]]) -> list[Any]:
    async def one(name: str, result: Awaitable[Any]) -> Any:
        try:
            return await result
        except (RewardError, RunError):  # RunError: a verifier process cannot be started
            raise
        except Exception as error:
            raise _raised(name, error) from error

    return list(await asyncio.gather(*(one(name, result) for name, result in waiting)))


def run_coroutine(coroutine: Any) -> Any:
    """Runs a coroutine to its end, also when this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((True, asyncio.run(coroutine)))
        except BaseException as error:  # raised again below, in the thread that asked
            outcome.append((False, error))

    thread = threading.Thread(target=target, name="gspo-rewards")
    thread.start()
    thread.join()
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    return value


def _as_list(name: str, result: Any, count: int) -> list[Any]:
    if hasattr(result, "tolist"):  # an array or tensor
        result = result.tolist()
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        raise RewardError(f"reward {name!r} returned {type(result).__name__} instead of a list of {count} numbers")
    values = list(result)
    if len(values) != count:
        raise RewardError(f"reward {name!r} returned {len(values)} values for {count} completions")
    return values


def _check(name: str, row: int, value: Any) -> float | Unscored | None:
    if value is None or isinstance(value, Unscored):
        return value
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()  # a tensor without dimensions
    if not isinstance(value, numbers.Real):
        raise RewardError(f"reward {name!r} returned {value!r} for completion {row}; a finite number or None is needed")
    number = float(value)
    if math.isinf(number):
        raise RewardError(f"reward {name!r} returned {number} for completion {row}; a finite number or None is needed")
    return Unscored("returned nan") if math.isnan(number) else number
