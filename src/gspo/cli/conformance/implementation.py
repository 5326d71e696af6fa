"""What is tested: the calls that the cases go through. By default those of this package."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gspo.advantages import Scale, constant_groups, group_advantages
from gspo.config import BatchPlan, check_recipe, load_recipe, plan_batch
from gspo.evals.passk import pass_at_k, pass_at_k_mean
from gspo.objectives.base import Objective
from gspo.objectives.grpo import GRPO
from gspo.objectives.gspo import GSPO, GSPOToken
from gspo.objectives.kl import Estimator, KLPenalty, k1, k2, k3
from gspo.objectives.ratios import selected_logprobs
from gspo.types import Completion, ObjectiveOutput, Prompt, Rollout, RolloutGroup, Score, StopReason

#: log-probs, old or reference log-probs, advantages, mask: an objective, or a penalty called like one.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], ObjectiveOutput]
#: (gold, response) pairs to right, wrong or None (the gold answer cannot be read).
Judge = Callable[[Sequence[tuple[str, str]]], list[bool | None]]
#: (program, problem) pairs to right, wrong or None (could not be judged); a problem is {"tests": [...], "fn": ...}.
CodeJudge = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], list[bool | None]]


class NotCheckedError(Exception):
    """Nothing can be said here, and why: something is not installed, or an input says too little."""


@dataclass(frozen=True)
class EngineRow:
    """One row of an engine's padded buffer, and what the engine says of it."""

    ids: Sequence[int]  # with padding
    num_generated: int
    stop_reason: StopReason


@dataclass(frozen=True)
class ResponseTensors:
    """What the trainer makes of N engine rows."""

    mask: list[list[int]]  # (N, T) 0 or 1
    lengths: list[int]  # (N,)
    truncated: list[bool]  # (N,)


@dataclass(frozen=True)
class SampledStep:
    """One prompt and its responses, as the engine had them and as the trainer has them."""

    engine_prompt: list[int]
    trainer_prompt: list[int]
    trained_ids: list[list[int]]


class EngineRowReader(Protocol):
    """Engine rows to tensors."""

    def __call__(self, rows: Sequence[EngineRow]) -> ResponseTensors: ...


class SampledStepTaker(Protocol):
    """Takes (ids, log-probs) that an engine sampled to where the trainer reads them.

    Raises InputError or ValueError where there is not one log-prob for each id. ``decode`` gives the text of ids.
    """

    def __call__(
        self,
        prompt_ids: Sequence[int],
        samples: Sequence[tuple[Sequence[int], Sequence[float]]],
        decode: Callable[[Sequence[int]], str],
    ) -> SampledStep: ...


def _kl_objective(estimator: str) -> Loss:
    return KLPenalty(1.0, cast(Estimator, estimator), "token")


def _kl_per_token(estimator: str, policy: Tensor, reference: Tensor) -> Tensor:
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](policy, reference)


def _group_advantages(rewards: Tensor | Sequence[float | None], ids: Sequence[Any], scale: str) -> Tensor:
    return group_advantages(rewards, ids, scale=cast(Scale, scale))


def _engine_rows(rows: Sequence[EngineRow]) -> ResponseTensors:
    from gspo.rollout.base import pad_completions

    completions = []
    for row in rows:
        ids = torch.tensor(row.ids[: row.num_generated], dtype=torch.int64)
        completions.append(Completion(ids, torch.full((len(ids),), -1.0), row.stop_reason, 0))
    padded = pad_completions(completions)
    width = max((len(row.ids) for row in rows), default=0)
    mask = torch.nn.functional.pad(padded.mask, (0, width - padded.mask.shape[1]))
    return ResponseTensors(mask.int().tolist(), padded.lengths.tolist(), padded.truncated.tolist())


def _sampled_step(
    prompt_ids: Sequence[int],
    samples: Sequence[tuple[Sequence[int], Sequence[float]]],
    decode: Callable[[Sequence[int]], str],
) -> SampledStep:
    """Through the scripted engine, the runner and the trainer's batch, as in a step."""
    from gspo.envs.runner import collect
    from gspo.rewards.base import RewardSet, WeightedReward
    from gspo.rollout.base import GenerationRequest, SamplingParams
    from gspo.rollout.scripted import ScriptedEngine
    from gspo.train.batch import rollout_batch

    seen: list[GenerationRequest] = []

    class Recorder(ScriptedEngine):
        def generate(self, requests: Sequence[GenerationRequest], *args: Any, **options: Any) -> list[list[Completion]]:
            seen.extend(requests)
            return super().generate(requests, *args, **options)

    script = {"case": [{"token_ids": list(ids), "logprobs": list(values)} for ids, values in samples]}
    reward = RewardSet([WeightedReward("none", lambda completions, **_: [0.0] * len(completions), 1.0, {})])
    prompt = Prompt("case", "case", tuple(prompt_ids))
    groups, _ = collect(
        [prompt], Recorder(script), SamplingParams(max(len(ids) for ids, _ in samples) + 1), reward,
        step=0, seed=0, group_size=len(samples), decode=decode,
    )  # fmt: skip
    sequences = rollout_batch(groups).sequences
    rows = [ids[:length].tolist() for ids, length in zip(sequences.token_ids, sequences.lengths, strict=True)]
    return SampledStep(list(seen[0].token_ids), sequences.prompts[0].tolist(), rows)


def _response_metrics(lengths: Sequence[int], truncated: Sequence[bool], excluded: Sequence[bool]) -> dict[str, float]:
    """The trainer's metrics are of all rows; ``excluded`` rows are left out of the loss alone."""
    from gspo.train.batch import rollout_metrics

    def rollout(length: int, cut: bool) -> Rollout:
        ids = torch.zeros(length, dtype=torch.int64)
        reason = StopReason.LENGTH if cut else StopReason.EOS
        return Rollout(ids, torch.ones(length).bool(), torch.zeros(length), "", reason, 0, Score(0.0))

    rollouts = tuple(rollout(length, cut) for length, cut in zip(lengths, truncated, strict=True))
    return rollout_metrics([RolloutGroup(Prompt("case", "case", (0,)), rollouts)])


_RECIPE = '[model]\ntiny = "qwen3"\n[data]\ntask = "arithmetic:addition"\n'


def _check_recipe(settings: Mapping[str, str]) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_text(_RECIPE, encoding="utf-8")
        recipe = load_recipe(path, [f"--{name}={value}" for name, value in settings.items()])
    return [finding.sentence for finding in check_recipe(recipe)]


def _render_prompt(tokenizer: Any, content: Any) -> Sequence[int]:
    from gspo.data.chat import render_prompt

    return render_prompt(tokenizer, content)


@contextmanager
def _math_judge(limit_seconds: float, workers: int) -> Iterator[Judge]:
    """The ``math`` reward over its worker processes."""
    from gspo.rewards.base import Unscored
    from gspo.rewards.builtin import VERIFIERS, VerifierReward
    from gspo.rewards.pool import VerifierPool

    if not all(map(find_spec, ("math_verify", "mpmath", "sympy"))):
        raise NotCheckedError("math answers, which need pip install 'gspo[math]'")
    with VerifierPool(workers, limit_seconds, preload=[VERIFIERS["math"]]) as pool:
        reward = VerifierReward(VERIFIERS["math"], pool)

        def judge(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
            values = reward([response for _, response in pairs], answer=[gold for gold, _ in pairs])
            return [None if isinstance(value, Unscored) else value == 1.0 for value in values]

        yield judge


_SCALES = {"centered": "none", "ddof1": "group_std", "leave_one_out": "leave_one_out"}

#: Keys of a problem that decide about a program; what else a problem has is text for people.
_PROBLEM_KEYS = frozenset(("tests", "fn", "function", "fn_name", "inputs", "outputs", "comparison", "tolerance"))


@contextmanager
def _code_judge(limit_seconds: float, memory_mb: int) -> Iterator[CodeJudge]:
    """The ``code`` reward in its sandbox."""
    from gspo.errors import InputError
    from gspo.rewards.base import Unscored
    from gspo.rewards.code import CodeReward
    from gspo.sandbox import open_sandbox

    try:
        sandbox = open_sandbox()
    except InputError as error:
        raise NotCheckedError(f"programs: {error}") from error
    reward = CodeReward(sandbox, defaults={"cpu_s": limit_seconds, "memory_mb": memory_mb})

    def judge(pairs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[bool | None]:
        problems = [{key: problem[key] for key in problem if key in _PROBLEM_KEYS} for _, problem in pairs]
        values = reward([program for program, _ in pairs], answer=problems)
        return [None if isinstance(value, Unscored) else value == 1.0 for value in values]

    yield judge


@dataclass(frozen=True)
class Implementation:
    """What is tested; by default this package. To test another, put its calls in their place."""

    # Losses.
    gspo: Callable[[float, float], Objective] = GSPO
    gspo_token: Callable[[float, float], Objective] = GSPOToken
    sequence_mean: Callable[[], Objective] = GSPO
    token_mean: Callable[[], Objective] = lambda: GRPO(unit="token")
    kl_objective: Callable[[str], Loss] = _kl_objective
    kl_per_token: Callable[[str, Tensor, Tensor], Tensor] = _kl_per_token
    selected_logprobs: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = selected_logprobs
    # Advantages: rewards, group ids, scale. ``scales``: how a variant that cases know is called here.
    group_advantages: Callable[..., Tensor] = _group_advantages
    constant_groups: Callable[..., int] = constant_groups
    scales: Mapping[str, str] = field(default_factory=lambda: dict(_SCALES))
    # Evaluation: n samples of which c passed, k; and the mean over (n, c) of problems.
    pass_at_k: Callable[[int, int, int], float] = pass_at_k
    pass_at_k_mean: Callable[[Sequence[tuple[int, int]], int], float] = pass_at_k_mean
    # Rollouts.
    engine_rows: EngineRowReader = _engine_rows
    sampled_step: SampledStepTaker = _sampled_step
    response_metrics: Callable[[Sequence[int], Sequence[bool], Sequence[bool]], Mapping[str, float]] = _response_metrics
    render_prompt: Callable[[Any, Any], Sequence[int]] = _render_prompt
    # Batch arithmetic; and the warnings of a recipe with these settings (it raises InputError where they are wrong).
    plan_batch: Callable[..., BatchPlan] = plan_batch
    check_recipe: Callable[[Mapping[str, str]], Sequence[str]] = _check_recipe
    # Rewards: judges with a limit in seconds per item and a number of workers.
    math_judge: Callable[[float, int], AbstractContextManager[Judge]] = _math_judge
    code_judge: Callable[[float, int], AbstractContextManager[CodeJudge]] = _code_judge  # second: MB of memory
