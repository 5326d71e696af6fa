"""The event types: the fields of each line of ``events.jsonl``. What the metrics in them mean is in ``metrics.py``."""

# No postponed annotations: they would hide NotRequired from __required_keys__, which the writer checks.

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NotRequired, Required, TypedDict


class Event(TypedDict, total=False):
    """Fields of every event. An event may carry more than its type lists; readers skip what they do not know."""

    type: Required[str]
    time: Required[float]  # seconds since 1970
    non_finite: dict[str, str]  # {"metrics.grad_norm": "nan"}: what stands as null in this event


class StartEvent(Event):
    """What the run is about to do. Further numbers of the batch arithmetic are welcome."""

    name: str
    objective: NotRequired[str]  # absent where there is only supervised training
    clip_low: NotRequired[float | None]  # lower bound of the ratio is 1 - clip_low
    clip_high: NotRequired[float | None]
    num_steps: NotRequired[int]
    num_mini_batches: NotRequired[int]
    prompts_per_step: NotRequired[int]
    group_size: NotRequired[int]
    num_sft_updates: NotRequired[int]


class AuditEvent(Event):
    """What the reward audit found before the first step; empty when all is well."""

    findings: list[str]


class WarningEvent(Event):
    message: str


class StepEvent(Event):
    """One rollout batch and all of its updates."""

    step: int  # 1 is the first
    num_updates: int  # optimizer updates of this step that were applied
    policy_version: int  # updates behind the weights after this step
    seconds: Mapping[str, float]  # rollout, reward, old_logprobs, update, evaluation, ..., total
    metrics: Mapping[str, float]


class UpdateEvent(Event):
    """One optimizer update."""

    step: int
    update: int  # counted over the whole run, 1 is the first
    mini_batch: int  # index within the step, 0 .. M-1
    metrics: Mapping[str, float]


class CalibrationEvent(Event):
    """The clip bounds that the measured log s led to; they stay from here on."""

    step: int
    clip_low: float
    clip_high: float


class Sample(TypedDict, total=False):
    """One response, to be read by people."""

    prompt_id: str
    prompt: str | list[Mapping[str, Any]]  # text or chat messages
    answer: str
    gold: Any
    reward: float | None  # None: could not be scored
    components: Mapping[str, float | None]
    ratio: float | None  # s of the sequence in its update
    advantage: float
    stop_reason: str
    num_tokens: int
    failure: str  # why there is no reward; only where there is none
    clipped: bool


class SamplesEvent(Event):
    step: int
    samples: list[Sample]


class EvaluationEvent(Event):
    """One evaluation. During supervised training ``name`` is "sft" and ``step`` counts its updates."""

    step: int  # 0 is before the first update
    name: str
    metrics: Mapping[str, float]
    num_prompts: int
    num_samples: int
    confidence: float
    outcomes: list[tuple[int, int]]  # per prompt: scored responses, and how many of them passed


class SftEvent(Event):
    """One update of supervised training."""

    update: int
    metrics: Mapping[str, float]


class CheckpointEvent(Event):
    step: int
    path: str  # relative to the run directory


class GoBackEvent(Event):
    """The run went back to an earlier checkpoint, since a detector of the guard fired; the steps after it come again.

    The events of the stretch that was left are in the file ``abandoned``.
    """

    step: int  # of the checkpoint; the next step event is the one after it
    from_step: int  # at which the detectors fired
    attempt: int  # 1 is the first time
    alarms: list[str]  # detector and evidence
    learning_rate: float  # peak, from here on, as are the next three
    clip_low: float | None
    clip_high: float | None
    num_mini_batches: int
    abandoned: str  # relative to the run directory


class EndEvent(Event):
    status: str  # "finished", or what ended the run: "interrupted", "failed"
    seconds: float
    message: NotRequired[str]


EVENT_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "start": StartEvent,
        "audit": AuditEvent,
        "warning": WarningEvent,
        "step": StepEvent,
        "update": UpdateEvent,
        "calibration": CalibrationEvent,
        "samples": SamplesEvent,
        "evaluation": EvaluationEvent,
        "sft": SftEvent,
        "checkpoint": CheckpointEvent,
        "go_back": GoBackEvent,
        "end": EndEvent,
    }
)
