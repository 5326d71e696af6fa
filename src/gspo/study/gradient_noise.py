"""Study gradient-noise: which estimator still points along the on-policy gradient when the weights have moved on.

theta_0 samples; theta_k is k updates further. An estimator makes a gradient at theta_k of responses that theta_0
sampled. It is compared with the gradient at theta_k of responses that theta_k itself has sampled, where every ratio is
1 and all estimators agree. All of it is the trainer's own update, with an optimizer that keeps the gradient and moves
nothing.

The estimators of a seed share the weights and the reference, most of the work: the first cell of a seed measures for
all of them and leaves the numbers beside the cells, the others read them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gspo.errors import ConfigError, RunError
from gspo.events import write_json
from gspo.objectives.base import Objective, check_terms
from gspo.objectives.clipping import check_bounds, clipped_surrogate
from gspo.objectives.grpo import GRPO
from gspo.objectives.gspo import GSPO
from gspo.objectives.metrics import objective_metrics
from gspo.objectives.pg import PolicyGradient
from gspo.study.execute import Job, Records
from gspo.study.laboratory import Laboratory, laboratory
from gspo.study.schema import Curve
from gspo.train.batch import rollout_batch
from gspo.train.optimizer import Optimizer
from gspo.train.routing import Replay, StepRouting
from gspo.train.schedule import mini_batches
from gspo.types import ObjectiveOutput, Prompt, TrainBatch, Unit

Numbers = Mapping[str, float]

#: What the updates say of the old responses at theta_k, beside the gradients.
_METRICS = {
    "clip_fraction": "clip_fraction/sequence",
    "clip_fraction_token": "clip_fraction/token",
    "log_s_std": "log_ratio/std",
    "kl_old": "kl/k3_old",
    "routing_drift": "moe/drift",
}


@dataclass(frozen=True)
class ProductRatio:
    """Importance sampling by the whole product: ``J = mean_i min(p_i A_i, clip(p_i) A_i)``, ``p_i = prod_t w_it``.

    Without a clip it is the unbiased off-policy estimator of the gradient that GSPO and GRPO have at pi = old (but for
    the groups' statistics, which stay those of old); its variance grows with length and drift. ``log p_i`` is bounded
    at 10 where it is exponentiated.
    """

    clip_low: float
    clip_high: float
    name: ClassVar[str] = "product"
    unit: ClassVar[Unit] = "sequence"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``."""
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        log_product = terms.token_log_ratio.sum(dim=-1, keepdim=True)
        clipped = clipped_surrogate(terms, log_product, self.clip_low, self.clip_high)
        return ObjectiveOutput(
            loss_sum=-terms.per_sequence(clipped.surrogate).sum(),
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, clipped.low, clipped.high),
        )


@dataclass(frozen=True)
class Estimator:
    """One arm. ``fresh`` estimates from responses of the present weights: what the others can reach at best."""

    objective: Objective
    replay: Replay = "none"
    fresh: bool = False


#: What every estimator is at k = 0.
PLAIN = Estimator(PolicyGradient())


@dataclass(frozen=True)
class Plan:
    """Sizes, in mini-batches of ``groups`` prompts each; the arm's options of the same names."""

    levels: tuple[int, ...]  # k: updates between sampling and now
    groups: int  # prompts of one mini-batch
    num_replicates: int  # R: mini-batches of old responses, and of fresh ones at each level
    num_reference: int  # mini-batches of the reference, one half of them in each half
    warm_up_updates: int  # on-policy updates before theta_0, so that AdamW has its moments


class GradientRecorder(Optimizer):
    """Keeps the gradient of an update and moves nothing."""

    gradient: Tensor  # (P,) float32, of the last update

    def apply(self) -> float:
        self.gradient = torch.cat([p.grad.detach().flatten() for p in self._parameters if p.grad is not None]).float()
        return float(self.gradient.norm())


@dataclass(frozen=True, eq=False)
class Gradients:
    """One gradient per mini-batch, and what the updates said (means over mini-batches)."""

    vectors: Tensor  # (R, P) float32
    metrics: Numbers


def run(job: Job) -> Records:
    """One estimator of one seed.

    Options: those of ``Plan``; ``estimators``, all of the study by name, each as ``estimator_of`` reads it; and
    ``estimator``, the name of this cell's.

    Raises:
        ConfigError: an option that is missing or cannot be.
    """
    plan = plan_of(job.options)
    options, name = job.options.get("estimators", {}), job.options.get("estimator")
    if name not in options:
        raise ConfigError(f"gradient-noise: options.estimator = {name!r} is none of {', '.join(options) or 'none'}")
    estimators = {each: estimator_of(found) for each, found in options.items()}
    shared = job.directory.parent / f"estimators+seed={job.cell.seed}+{_digest(job)}.json"
    with shared.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other worker waits instead of doing the same
        if not shared.exists():
            with laboratory(job.recipe) as lab:
                found = measured(lab, plan, estimators)
            write_json(shared, {each: {str(k): numbers for k, numbers in found[each].items()} for each in found})
    return _records(json.loads(shared.read_text(encoding="utf-8"))[name])


def _digest(job: Job) -> str:
    """Of all that the shared numbers depend on."""
    options = {key: value for key, value in job.options.items() if key != "estimator"}
    recipe = job.recipe.model_dump(exclude={"run": {"name"}})
    return hashlib.sha256(json.dumps([options, recipe], sort_keys=True).encode()).hexdigest()[:8]


def plan_of(options: Mapping[str, Any]) -> Plan:
    """Raises ConfigError for an option that is missing or no positive whole number."""
    levels = options.get("levels")
    if not isinstance(levels, list | tuple) or not levels or not all(isinstance(k, int) and k >= 0 for k in levels):
        raise ConfigError(f"gradient-noise: options.levels = {levels!r} is no list of numbers of updates, e.g. [0, 3]")
    sizes: dict[str, Any] = {}
    for name in ("groups", "num_replicates", "num_reference", "warm_up_updates"):
        sizes[name] = options.get(name)
        if not isinstance(sizes[name], int) or sizes[name] < 1:
            raise ConfigError(f"gradient-noise: options.{name} = {sizes[name]!r} is no positive whole number")
    plan = Plan(tuple(sorted(set(levels))), **sizes)
    if plan.num_replicates < 2 or plan.num_reference % 2:
        raise ConfigError("gradient-noise: a variance needs num_replicates >= 2, two halves an even num_reference")
    return plan


def estimator_of(options: Mapping[str, Any]) -> Estimator:
    """From ``objective``, ``clip_low``, ``clip_high`` (default: infinite) and ``replay``. Raises ConfigError."""
    name, replay = str(options.get("objective")), options.get("replay", "none")
    low, high = float(options.get("clip_low", math.inf)), float(options.get("clip_high", math.inf))
    if replay not in ("none", "r2"):
        raise ConfigError(f"gradient-noise: options.replay = {replay!r} is neither none nor r2")
    if name in ("pg", "fresh"):
        return Estimator(PolicyGradient(), replay, fresh=name == "fresh")
    makers: dict[str, type[GSPO] | type[GRPO] | type[ProductRatio]] = {
        "gspo": GSPO,
        "grpo": GRPO,
        "product": ProductRatio,
    }
    if name not in makers:
        raise ConfigError(f"gradient-noise: options.objective = {name!r} is none of fresh, pg, {', '.join(makers)}")
    return Estimator(makers[name](low, high), replay)


def measured(lab: Laboratory, plan: Plan, estimators: Mapping[str, Estimator]) -> dict[str, dict[int, Numbers]]:
    """Numbers by estimator and level, while the weights move away from theta_0.

    Those of ``gradient_numbers``; ``relative_cosine``, the cosine over that of as many fresh mini-batches on the same
    prompts; ``agreement``, the cosine of the mean gradient to that of plain policy gradient on the same responses; and
    what the updates said (clip fractions, spread of log s, drift). A level at which the policy has collapsed is left
    out, and so is an estimator that clips everything.
    """
    moving, recorder = lab.optimizer(Optimizer), lab.optimizer(GradientRecorder)
    for step in range(1, plan.warm_up_updates + 1):
        next(_moved(lab, moving, plan.groups, 1, step))
    step = plan.warm_up_updates + 1
    path = _moved(lab, moving, plan.groups, max(plan.levels), step)
    prompts = lab.cursor.next(plan.groups * plan.num_replicates)
    old = OldResponses.sampled(lab, prompts, step + 1)
    found: dict[str, dict[int, Numbers]] = {name: {} for name in estimators}
    for index, level in enumerate(plan.levels):
        for _ in range(level - (plan.levels[index - 1] if index else 0)):
            next(path)
        step += 2
        fresh = on_policy_gradients(lab, recorder, prompts, plan.num_replicates, step)
        others = lab.cursor.next(plan.groups * plan.num_reference)
        reference = on_policy_gradients(lab, recorder, others, plan.num_reference, step + 1).vectors
        halves = torch.stack([reference[0::2].mean(dim=0), reference[1::2].mean(dim=0)])
        if not (bool(halves.any()) and bool(fresh.vectors.any())):
            break  # the policy has collapsed: no fresh response has an advantage, and there is nothing to compare with
        best = mean_cosine(fresh.vectors, halves.mean(dim=0))
        plain = old.gradients(lab, recorder, PLAIN, plan.num_replicates)
        for name, estimator in estimators.items():
            made = plain
            if estimator != PLAIN:
                made = fresh if estimator.fresh else old.gradients(lab, recorder, estimator, plan.num_replicates)
            if not bool(made.vectors.any()):
                continue  # everything was clipped
            numbers = gradient_numbers(made.vectors, halves)
            beside = {
                "relative_cosine": numbers["cosine"] / best,
                "agreement": mean_cosine(made.vectors.mean(dim=0)[None], plain.vectors.mean(dim=0)),
            }
            found[name][level] = {**numbers, **beside, **made.metrics}
    return found


def _moved(lab: Laboratory, optimizer: Optimizer, groups: int, num_updates: int, step: int) -> Iterator[int]:
    """Samples with the weights as they are at the first ``next``, then makes one update at each.

    By plain policy gradient, which has no ratio and no clip: the path is none of the compared estimators' own. The
    responses are sampled when the generator is made.
    """
    if not num_updates:
        return iter(())
    sampled = lab.sample(groups * num_updates, step)
    rollouts = rollout_batch(sampled)
    batch = lab.batch(sampled, rollouts, rollouts.rollout_logprobs)

    def updates() -> Iterator[int]:
        for mini in mini_batches(batch, num_updates, seed=lab.settings.seed, step=step):
            lab.update(optimizer, PolicyGradient(), batch, mini)
            yield mini.index

    return updates()


@dataclass(frozen=True, eq=False)
class OldResponses:
    """Responses of theta_0, with its log-probs and its routes."""

    batch: TrainBatch
    routing: Mapping[Replay, StepRouting | None]
    step: int

    @classmethod
    def sampled(cls, lab: Laboratory, prompts: Sequence[Prompt], step: int) -> OldResponses:
        groups = lab.sample_for(prompts, step)
        rollouts = rollout_batch(groups)
        kinds: tuple[Replay, ...] = ("none", "r2")
        routing = {kind: lab.routing(rollouts, kind) for kind in kinds}
        scored = [lab.score(rollouts, routing[kind]) for kind in kinds]  # each records the trainer's routes
        return cls(lab.batch(groups, rollouts, scored[0]), routing, step)

    def gradients(self, lab: Laboratory, recorder: GradientRecorder, estimator: Estimator, number: int) -> Gradients:
        """The estimator's gradients under the weights as they are now, one for each mini-batch."""
        routing = self.routing[estimator.replay]
        if estimator.replay == "r2" and routing is None:
            raise ConfigError("gradient-noise: routes can be replayed in a mixture of experts only")
        return gradients(lab, recorder, self.batch, number, self.step, estimator.objective, routing)


def on_policy_gradients(
    lab: Laboratory, recorder: GradientRecorder, prompts: Sequence[Prompt], number: int, step: int
) -> Gradients:
    """Gradients of responses that the present weights sample."""
    groups = lab.sample_for(prompts, step)
    rollouts = rollout_batch(groups)
    batch = lab.batch(groups, rollouts, rollouts.rollout_logprobs)
    return gradients(lab, recorder, batch, number, step, PolicyGradient(), None)


def gradients(
    lab: Laboratory,
    recorder: GradientRecorder,
    batch: TrainBatch,
    number: int,
    step: int,
    objective: Objective,
    routing: StepRouting | None,
) -> Gradients:
    """One gradient for each of ``number`` mini-batches of the batch; the weights stay."""
    vectors, metrics = [], []
    for mini in mini_batches(batch, number, seed=lab.settings.seed, step=step):
        result = lab.update(recorder, objective, batch, mini, routing)
        vectors.append(recorder.gradient)
        metrics.append(result.metrics)
    means = {
        name: sum(m[key] for m in metrics) / len(metrics)
        for name, key in _METRICS.items()
        if all(key in m for m in metrics)
    }
    return Gradients(torch.stack(vectors), means)


def mean_cosine(vectors: Tensor, direction: Tensor) -> float:
    """Mean cosine of (R, P) vectors to a (P,) direction."""
    return float(torch.nn.functional.cosine_similarity(vectors, direction[None], dim=1).double().mean())


def gradient_numbers(replicates: Tensor, halves: Tensor) -> dict[str, float]:
    """What R independent gradients of one estimator are worth.

    With g_r the replicates, G the true on-policy gradient, and G_1, G_2 two independent estimates of it:

    - ``cosine``: mean cosine of one g_r to (G_1 + G_2) / 2; ``cosine_all``: of the mean of all g_r.
    - ``ceiling``: reliability of (G_1 + G_2) / 2, the cosine of G_1 and G_2 corrected by Spearman and Brown to the
      whole length, 2 c / (1 + c); no direction can have a cosine above its root but by chance.
    - ``snr``: ``|E g|^2 / E |g - E g|^2``, both estimated without bias (the first at least 0).
    - ``scale``: ``<E g, G> / |G|^2``, 1 for an unbiased estimator.
    - ``bias``: ``|E g - G| / |G|``, from unbiased estimates of the squares (at least 0).

    Args:
        replicates: (R, P), R >= 2.
        halves: (2, P).

    Raises:
        RunError: one of them is zero.
    """
    number = len(replicates)
    reference = halves.double().mean(dim=0)
    mean = replicates.double().mean(dim=0)
    norms = sum(float(g.double().square().sum()) for g in replicates)
    squared = (number**2 * float(mean.square().sum()) - norms) / (number * (number - 1))
    variance = norms / number - squared
    reliability = mean_cosine(halves[:1], halves[1])
    true_squared = float(halves[0].double() @ halves[1].double())
    if not norms or not true_squared:
        raise RunError("a gradient is exactly zero: no response had an advantage; start from weights that solve some")
    along = float(mean @ reference)
    return {
        "cosine": mean_cosine(replicates, halves.mean(dim=0)),
        "cosine_all": along / math.sqrt(float(mean.square().sum()) * float(reference.square().sum())),
        "ceiling": 2 * reliability / (1 + reliability),
        "snr": max(squared, 0.0) / variance if variance > 0 else math.inf,
        "scale": along / true_squared,
        "bias": math.sqrt(max(squared - 2 * along + true_squared, 0.0) / abs(true_squared)),
        "norm": math.sqrt(norms / number),
    }


def _records(by_level: Mapping[str, Numbers]) -> Records:
    """Scalars ``NAME_kK`` and, of each number, a curve over the levels."""
    scalars = {f"{name}_k{level}": value for level, numbers in by_level.items() for name, value in numbers.items()}
    levels = sorted(by_level, key=int)
    names = dict.fromkeys(name for numbers in by_level.values() for name in numbers)
    series = {
        name: Curve(x=tuple(map(float, levels)), y=tuple(by_level[level].get(name) for level in levels))
        for name in names
    }
    return Records(scalars=scalars, series=series)
