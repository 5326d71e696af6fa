"""What the loop works with: its settings, its parts, and how it can end before its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from gspo.advantages import Scale
from gspo.errors import RunError
from gspo.objectives.base import Objective
from gspo.objectives.correction import Correction
from gspo.objectives.kl import KLPenalty
from gspo.policy.causal_lm import CausalPolicy
from gspo.train.bounds import Bounds, Calibration
from gspo.train.guard import Guard
from gspo.train.optimizer import Optimizer
from gspo.train.progress import Evaluation, Progress
from gspo.train.routing import RoutingSettings
from gspo.train.step import MicroBatching
from gspo.types import Prompt, RolloutGroup

#: What is done when a detector of the guard fires.
Reaction = Literal["off", "warn", "stop", "go_back"]


class StoppedError(RunError):
    """Somebody asked the run to end (SIGINT, SIGTERM); it can be continued."""

    exit_status = 3


class Collect(Protocol):
    """Samples and scores one group per prompt; ``first_draw`` tells later rounds of a step apart."""

    def __call__(
        self, prompts: Sequence[Prompt], step: int, first_draw: int = 0
    ) -> tuple[list[RolloutGroup], dict[str, float]]: ...


@dataclass(frozen=True)
class LoopSettings:
    """The schedule of a run; the names are the recipe's."""

    seed: int  # of everything that is drawn; another one each time that the run went back
    num_steps: int
    prompts_per_step: int
    num_mini_batches: int
    cut: MicroBatching
    temperature: float
    old_logprobs: Literal["auto", "engine", "recompute"]
    mismatch_bound: float
    groups_without_signal: Literal["keep", "drop", "refill"]
    max_refills: int
    truncated: Literal["keep", "exclude"]
    advantage_scale: Scale
    std_floor: float
    eval_every: int
    checkpoint_every: int
    num_logged_samples: int
    answer_column: str = "answer"  # shown as gold beside the logged samples
    num_probe_rows: int = 8
    random_drop: tuple[float, ...] = ()  # share of each mini-batch's rows that give no gradient; () drops none
    non_finite: Literal["stop", "skip"] = "stop"
    max_non_finite: int = 3
    reaction: Reaction = "warn"
    reactions: Mapping[str, Reaction] = field(default_factory=dict)  # by detector, in place of ``reaction``
    max_go_backs: int = 0  # times that the run may go back, those before included

    def reaction_to(self, detector: str) -> Reaction:
        return self.reactions.get(detector, self.reaction)


@dataclass(frozen=True, eq=False)
class Parts:
    """Everything that a run consists of, made by ``launch``."""

    policy: CausalPolicy
    optimizer: Optimizer
    next_prompts: Callable[[int], list[Prompt]]
    cursor: Callable[[], Mapping[str, Any]]  # position in the prompts, as JSON
    collect: Collect
    make_objective: Callable[[Bounds], Objective]
    bounds: Bounds
    paper_bounds: tuple[float, float] | None  # of the objective; None if it does not clip
    set_policy_version: Callable[[int], None]  # the engine samples with these weights from now on
    evaluate: Callable[[int], Evaluation] | None  # step -> its evaluation; None without held-out prompts
    save: Callable[[Progress], str]  # a checkpoint to continue from -> its path; writes none that is there already
    save_partial: Callable[[int], str]  # the weights of a step that broke off between its updates
    checkpoint_before: Callable[[int], Path | None]  # the newest good checkpoint of a step before this one
    events_size: Callable[[], int]  # bytes of the events so far
    check_stop: Callable[[], None]  # raises StoppedError
    counts: Callable[[], Mapping[str, int]]  # accidents so far, by metric: late verdicts, failures of the engine
    emit: Callable[..., None]
    phase: Callable[[str, int], None]
    guard: Guard | None = None  # detectors of collapse
    calibration: Calibration | None = None
    kl: KLPenalty | None = None
    reference: CausalPolicy | None = None  # frozen copy of the policy at the start, for the KL term
    correction: Correction | None = None  # for data of another engine
    routing: RoutingSettings | None = None  # of a mixture of experts


@dataclass
class Clock:
    """Wall-clock seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Any:
        start = time.perf_counter()
        yield
        self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
