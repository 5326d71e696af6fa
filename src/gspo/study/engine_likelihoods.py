"""Study engine-likelihoods: what the ratio does when its denominator comes from an engine with slightly other weights.

The engine samples with a rounded or perturbed COPY of the weights and reports the log-probs of the distribution it
sampled from, as a quantized or low-precision server does. It is the embedded engine on that copy; the loop, the
objective and the bounds are the trainer's. Held-out prompts are answered with the trainer's own weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gspo.diagnostics import mismatch, sequence_log_ratio
from gspo.errors import ConfigError
from gspo.launch.settings import calibration_of, first_bounds, objective_of
from gspo.objectives.bundle import PAPER_BOUNDS
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.logprobs import sequence_logprobs
from gspo.rollout.base import GenerationRequest, OnFinished, SamplingParams, pad_completions
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.seeding import derive_seed
from gspo.study.execute import Job, Records
from gspo.study.laboratory import Laboratory, laboratory
from gspo.study.schema import Curve
from gspo.train.loop import run as train
from gspo.train.optimizer import Optimizer
from gspo.train.parts import Parts
from gspo.types import Completion, Sequences

#: Name of a perturbation to a function of (parameter name, values, scale, generator).
Perturbation = Callable[[str, Tensor, float, torch.Generator], Tensor]


def rounded_to_bfloat16(name: str, values: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Every weight to the nearest bfloat16; scale is not read."""
    return values.to(torch.bfloat16).to(values.dtype)


def rounded_to_integers(name: str, values: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Every row of a matrix (its output channel) to ``scale`` bits, symmetric about 0; vectors stay.

    The largest magnitude of a row is ``2^(scale - 1) - 1`` steps; a row of zeros stays.
    """
    if values.dim() < 2:
        return values
    step = values.abs().amax(dim=-1, keepdim=True) / (2 ** (scale - 1) - 1)
    return torch.where(step > 0, (values / step).round() * step, values)


def noisy_router(name: str, values: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise on the routers' weights, ``scale`` times their standard deviation; all else stays."""
    if not name.endswith("mlp.gate.weight"):
        return values
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
    return values + scale * values.std() * noise


def unchanged(name: str, values: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """The exact engine."""
    return values


PERTURBATIONS: Mapping[str, Perturbation] = {
    "exact": unchanged,
    "bf16": rounded_to_bfloat16,
    "int": rounded_to_integers,
    "router_noise": noisy_router,
}


class PerturbedEngine:
    """Samples with a perturbed copy of the policy's weights, taken anew at every call.

    What it says is honest: the log-probs are those of the copy. With ``centred`` a constant is added to all log-probs
    of a call, so that their mean over the tokens of ``num_probe`` responses is that of the policy under training.
    """

    exact = False

    def __init__(
        self,
        policy: CausalPolicy,
        perturbation: str,
        scale: float,
        *,
        seed: int,
        max_slots: int,
        centred: bool = False,
        num_probe: int = 32,
    ) -> None:
        if perturbation not in PERTURBATIONS:
            raise ConfigError(f"there is no perturbation {perturbation!r}; there are {', '.join(PERTURBATIONS)}")
        self.policy = policy
        self.perturbation = PERTURBATIONS[perturbation]
        self.scale, self.seed, self.centred, self.num_probe = scale, seed, centred, num_probe
        self.copy = replace(policy, model=copy.deepcopy(policy.model))
        self.inner = EmbeddedEngine(self.copy, max_slots)
        self.policy_version = 0
        self.mismatches: list[dict[str, float]] = []  # of each call, as the engine reported it (before centring)

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Completion]]:
        """See ``Engine.generate``."""
        self._load()
        self.inner.policy_version = self.policy_version
        completions = self.inner.generate(requests, params, on_finished)
        shift = self._probe(requests, completions, params.temperature)
        if not self.centred:
            return completions
        return [[replace(c, logprobs=c.logprobs + shift) for c in group] for group in completions]

    @torch.no_grad()
    def _load(self) -> None:
        """The policy's weights as they are now, perturbed; the noise is the same at every call."""
        own = dict(self.copy.model.named_parameters())
        for name, values in self.policy.model.named_parameters():
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "perturbation", name))
            own[name].copy_(self.perturbation(name, values.detach(), self.scale, generator))

    @torch.no_grad()
    def _probe(
        self, requests: Sequence[GenerationRequest], completions: Sequence[Sequence[Completion]], temperature: float
    ) -> float:
        """Notes the mismatch on responses spread over the call; returns the mean of trainer minus engine by token."""
        rows = [(n, completion) for n, group in enumerate(completions) for completion in group]
        rows = rows[:: math.ceil(len(rows) / self.num_probe)]
        padded = pad_completions([completion for _, completion in rows])
        prompts = tuple(torch.tensor(request.token_ids) for request in requests)
        sequences = Sequences(prompts, torch.tensor([n for n, _ in rows]), padded.token_ids, padded.lengths)
        ours = sequence_logprobs(self.policy, sequences, temperature).logprobs
        log_s = sequence_log_ratio(ours, padded.logprobs, padded.mask)
        spread = {"log_s/mean": float(log_s.mean()), "log_s/std": float(log_s.std(correction=1))}
        self.mismatches.append(mismatch(padded.logprobs, ours, padded.mask) | spread)
        return float((ours - padded.logprobs)[padded.mask].mean())


@dataclass(eq=False)
class Events:
    """What the loop emits, in memory."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def emit(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields))

    def metrics(self, kind: str, name: str, **where: Any) -> list[float]:
        """The values of a metric, in order, of the events whose fields are as given; events without it are left out."""
        return [
            event["metrics"][name]
            for seen, event in self.seen
            if seen == kind
            and name in event["metrics"]
            and all(event.get(key) == value for key, value in where.items())
        ]


def run(job: Job) -> Records:
    """One cell.

    Options: ``perturbation`` (default "exact"), ``scale`` (0 where none is read), ``centred`` (default false), and
    ``evaluate`` (default true): whether held-out prompts are answered before and after; ``first_step`` (default 1):
    clip fractions are means over three steps from there on.
    """
    with laboratory(job.recipe) as lab:
        return trained(lab, job.options)


def trained(lab: Laboratory, options: Mapping[str, Any]) -> Records:
    """A training run with a perturbed engine, from the weights as they are."""
    recipe = lab.house.recipe
    engine = PerturbedEngine(
        lab.policy,
        str(options.get("perturbation", "exact")),
        float(options.get("scale", 0)),
        seed=recipe.run.seed,
        max_slots=recipe.rollout.max_slots,
        centred=bool(options.get("centred", False)),
    )
    events = Events()
    train(parts_of(lab, engine, events, evaluated=bool(options.get("evaluate", True))), lab.settings)
    first = int(options.get("first_step", 1))
    return Records(scalars=_scalars(events, engine, slice(first - 1, first + 2)), series=_series(events))


def parts_of(lab: Laboratory, engine: PerturbedEngine, events: Events, *, evaluated: bool) -> Parts:
    """What the trainer's loop works with; nothing is written to disk."""
    recipe, own = lab.house.recipe, lab.house
    sampling = lab.with_engine(engine).house
    return Parts(
        policy=lab.policy,
        optimizer=lab.optimizer(Optimizer),
        next_prompts=lab.cursor.next,
        cursor=lab.cursor.state,
        collect=sampling.collect,
        make_objective=lambda bounds: objective_of(recipe, bounds),
        bounds=first_bounds(recipe),
        paper_bounds=PAPER_BOUNDS[recipe.objective.name],
        set_policy_version=sampling.set_policy_version,
        evaluate=own.evaluate if evaluated else None,
        save=lambda progress: "",
        save_partial=lambda step: "",
        checkpoint_before=lambda step: None,
        events_size=lambda: 0,
        check_stop=lambda: None,
        counts=dict,
        emit=events.emit,
        phase=lambda name, step: None,
        calibration=calibration_of(recipe),
        routing=own.routing,
    )


def _scalars(events: Events, engine: PerturbedEngine, steps: slice) -> dict[str, float | None]:
    """First updates of a step (mini-batch 0) have no drift: under recomputed log-probs nothing can be clipped there.

    steps: whose clip fractions count, from 0.
    """

    def first(name: str) -> float | None:
        return _mean(events.metrics("update", name, mini_batch=0)[steps])

    def probed(name: str) -> float:
        return sum(found[name] for found in engine.mismatches) / len(engine.mismatches)

    passes = events.metrics("evaluation", "pass@1")
    rewards = events.metrics("step", "reward/mean")
    bound = events.metrics("step", "clip_low")[-1]
    return {
        "kl": probed("mismatch/k3"),
        "mean_abs_mismatch": probed("mismatch/mean_abs"),
        "kl_over_bound": probed("mismatch/k3") / bound,
        "shift_over_bound": abs(probed("log_s/mean")) / bound,
        "spread_over_bound": probed("log_s/std") / bound,
        "clip_low_bound": bound,
        "clip_first": first("clip_fraction/sequence"),
        "clip_first_low": first("clip_fraction/sequence_low"),
        "clip_first_high": first("clip_fraction/sequence_high"),
        "clip_first_token": first("clip_fraction/token"),
        "clip": _mean(events.metrics("step", "clip_fraction/sequence")[steps]),
        "clip_low": _mean(events.metrics("step", "clip_fraction/sequence_low")[steps]),
        "clip_high": _mean(events.metrics("step", "clip_fraction/sequence_high")[steps]),
        "pass_before": passes[0] if passes else None,
        "pass_after": passes[-1] if passes else None,
        "gain": passes[-1] - passes[0] if passes else None,
        "reward_last_half": _mean(rewards[len(rewards) // 2 :]),
    }


def _series(events: Events) -> dict[str, Curve]:
    indices = sorted({event["mini_batch"] for kind, event in events.seen if kind == "update"})
    by_index = [_mean(events.metrics("update", "clip_fraction/sequence", mini_batch=index)) for index in indices]
    rewards = events.metrics("step", "reward/mean")
    return {
        "clip_by_mini_batch": Curve(x=tuple(map(float, indices)), y=tuple(by_index)),
        "reward": Curve(x=tuple(map(float, range(1, len(rewards) + 1))), y=tuple(rewards)),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
