"""The tree of a recipe, section by section. Every key changes something; unknown keys are refused.

Sizes are counted in the units that the name says: ``_s`` seconds, ``num_`` counts, ``max_new_tokens``
tokens. Cross-section rules are in ``config/check.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
#: What is done when a detector of collapse fires.
Reaction = Literal["off", "warn", "stop", "go_back"]


class RunConfig(Section):
    """[run]: identity of the run."""

    name: str = Field("run", description="shown in reports")
    seed: NonNegative = Field(0, description="every random stream is derived from it")
    device: str = Field("auto", description='"auto", "cpu", "cuda", "cuda:1", ...')
    num_threads: NonNegative = Field(0, description="CPU threads of torch; 0 leaves torch's own choice")
    preset: Literal["paper", "paper_5_4", "modern"] | None = Field(
        None, description="fills in what the recipe leaves open; see docs/algorithms/presets.md"
    )


class ModelConfig(Section):
    """[model]: where the weights come from."""

    path: str | None = Field(None, description="a Hugging Face directory or hub name")
    gguf_file: str | None = Field(None, description="name of a GGUF file inside `path`")
    tiny: Literal["qwen3", "qwen3_moe"] | None = Field(
        None, description="instead of `path`: a model with random weights and a character tokenizer"
    )
    tiny_config: dict[str, Any] = Field(
        default_factory=dict, description="overrides of the tiny model's transformers config"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the weights")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    trust_remote_code: bool = Field(False, description="run modelling code shipped with the weights")


class DataConfig(Section):
    """[data.eval]: the held-out prompts. Without `path` and `task` they are those of [data], from another seed."""

    path: str | None = Field(None, description="JSONL, Parquet or a Hugging Face dataset directory")
    task: str | None = Field(None, description='generated tasks: "arithmetic:addition" or "reasoning_gym:NAME"')
    task_options: dict[str, Any] = Field(default_factory=dict, description="options of the task's generator")
    num_prompts: Positive | None = Field(None, description="how many prompts; all of a file, 1000 of a task")
    seed: NonNegative | None = Field(None, description="of the generator and of the selection; default run.seed")
    prompt_column: str = Field("prompt", description="column with text or chat messages")
    system_prompt: str | None = Field(None, description="put before the prompt as a system message")
    instruction: str | None = Field(None, description="text appended to each text prompt")
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: applied to chat messages, and to text if the tokenizer has a template"
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="extra variables of the chat template, e.g. enable_thinking"
    )
    max_prompt_tokens: Positive | None = Field(None, description="default: what the model's context leaves")


class TrainDataConfig(DataConfig):
    """[data]: the training prompts. Exactly one of `path` and `task`."""

    eval: DataConfig | None = Field(None, description="held-out prompts; default: as [data], other seed")


class RolloutConfig(Section):
    """[rollout]: how a batch is sampled."""

    engine: Literal["embedded", "scripted"] = Field("embedded", description="who samples")
    script: str | None = Field(None, description="JSONL of completions, for the scripted engine")
    prompts_per_step: Positive = Field(32, description="P, prompts of one rollout batch")
    group_size: int = Field(8, description="G, responses per prompt")
    max_new_tokens: Positive = Field(256, description="response limit; longer ones are truncated")
    temperature: PositiveFloat = Field(1.0, description="of sampling, and of every log-prob trained on")
    stop_strings: tuple[str, ...] = Field((), description="end a response when one appears")
    max_slots: Positive = Field(256, description="rows that are decoded at the same time")
    prompts_per_call: Positive | None = Field(
        None,
        description="most prompts in one engine call; finished calls of a round are kept; default: 4 max_slots rows",
    )
    max_retries: NonNegative = Field(2, description="times that a call of the engine that failed is made again")
    engine_failure: Literal["stop", "keep"] = Field(
        "stop", description="when retries do not help; keep: go on with the finished responses, the others unscored"
    )


class RewardFunction(Section):
    """[[reward.functions]]: one term of the reward."""

    name: str = Field(
        description='built in ("exact_match", "number", "math", "code", "task", "overlong") or "module:function"'
    )
    weight: float = Field(1.0, allow_inf_nan=False, description="factor in the sum")
    kind: Literal["trl", "verl"] = Field("trl", description="signature of a module:function")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the function")


class RewardConfig(Section):
    """[reward]: how responses are scored."""

    functions: tuple[RewardFunction, ...] = Field((), description='default: "task" for generated tasks')
    timeout_s: PositiveFloat = Field(5.0, description="wall-clock limit of one verdict in a killable process")
    num_workers: Positive = Field(2, description="killable verifier processes")
    isolate: bool = Field(
        False, description="module:function rewards run in killable processes too, response by response"
    )
    memory_limit_mb: Positive = Field(4096, description="isolate: address space of one process")
    environment: tuple[str, ...] = Field(
        (), description="isolate: secret variables (*_KEY, *_TOKEN, ...) that the processes may see; by default none"
    )
    answer_column: str = Field("answer", description="column with the gold answer")
    audit: bool = Field(True, description="score gold, empty and junk answers before the first step")
    audit_num_prompts: Positive = Field(16, description="prompts that the audit looks at")


class CorrectionConfig(Section):
    """[objective.correction]: for data of another engine or of older weights (docs/algorithms/correction.md)."""

    kind: Literal["none", "tis", "icepop", "seq_geo", "seq_prod", "negative_mask"] = Field(
        "none", description="how tokens or responses are weighed by old / engine; one correction at a time"
    )
    low: PositiveFloat | None = Field(None, description="lower bound; default by kind")
    high: PositiveFloat | None = Field(None, description="upper bound; default by kind")


class ObjectiveConfig(Section):
    """[objective]: ratio, bounds and unit are one bundle; what the name does not have is refused."""

    name: Literal[
        "gspo",
        "gspo_token",
        "grpo",
        "ppo",
        "dapo",
        "dr_grpo",
        "cispo",
        "gmpo",
        "luspo",
        "fspo",
        "minirl",
        "sapo",
        "pg",
    ] = Field("gspo", description="see docs/algorithms/")
    clip: Literal["paper", "calibrated", "explicit"] = Field(
        "paper", description="where the bounds come from; explicit needs clip_low and clip_high"
    )
    clip_low: PositiveFloat | None = Field(None, description="lower bound is 1 - clip_low")
    clip_high: PositiveFloat | None = Field(None, description="upper bound is 1 + clip_high")
    unit: Literal["sequence", "token"] | None = Field(
        None, description="denominator; only grpo lets you choose (token = DAPO's token mean)"
    )
    clip_target: Fraction = Field(0.15, description="calibrated: share of responses to clip")
    calibration_steps: Positive = Field(
        5, description="calibrated: steps measured before the bounds freeze, the first after train.warmup_steps"
    )
    kl_coefficient: NonNegativeFloat = Field(0.0, description="weight of KL(policy || reference) in the loss")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="see docs/algorithms/kl.md")
    tau_positive: PositiveFloat = Field(1.0, description="sapo: temperature of the gate where the advantage is above 0")
    tau_negative: PositiveFloat = Field(1.05, description="sapo: the same, below 0")
    length_divisor: Positive | None = Field(
        None, description="dr_grpo: constant that a response is divided by; default rollout.max_new_tokens"
    )
    correction: CorrectionConfig = CorrectionConfig()  # type: ignore[call-arg]


class MoeConfig(Section):
    """[moe]: routing of a mixture of experts (docs/moe.md)."""

    replay: Literal["none", "r2", "r3"] = Field(
        "none", description="experts forced in the updates: r2 those of the trainer's old weights, r3 the engine's"
    )
    metrics: Literal["none", "drift", "all"] = Field(
        "drift", description="what is measured of the routing; all: the router shift too, which takes memory"
    )
    load_balancing_coefficient: NonNegativeFloat = Field(
        0.0, description="weight of the auxiliary loss on uneven expert load; off by default, and off in the paper"
    )


class AdvantageConfig(Section):
    """[advantage]: what a reward is compared with."""

    scale: Literal["group_std", "none", "batch_std", "leave_one_out"] = Field(
        "group_std", description="group_std is equation (6) of the GSPO paper"
    )
    std_floor: NonNegativeFloat = Field(1e-4, description="smallest standard deviation divided by")


class TrainConfig(Section):
    """[train]: the schedule of updates and the optimizer."""

    num_steps: Positive = Field(100, description="rollout batches")
    num_mini_batches: Positive = Field(4, description="M, updates per rollout batch")
    micro_batch_size: Positive | None = Field(None, description="sequences per forward/backward; default: by tokens")
    micro_batch_tokens: Positive = Field(16384, description="most tokens per forward/backward")
    old_logprobs: Literal["auto", "engine", "recompute"] = Field(
        "auto", description="denominator of the ratio; auto: the engine's where they agree with the trainer's"
    )
    mismatch_bound: PositiveFloat | None = Field(
        None,
        description="largest mean |engine - trainer| log-prob trusted (auto recomputes beyond it, engine refuses to "
        "start); default clip_low / 10",
    )
    groups_without_signal: Literal["keep", "drop", "refill"] = Field(
        "keep", description="keep counts them (paper); drop leaves them out; refill samples others (DAPO)"
    )
    max_refills: Positive = Field(3, description="refill: most extra rounds per step")
    truncated: Literal["keep", "exclude"] = Field("keep", description="whether truncated responses enter the loss")
    random_drop: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        (), description="a control: share of the responses of each mini-batch that give no gradient, at random"
    )
    learning_rate: PositiveFloat = Field(1e-6, description="of AdamW, after the warm-up")
    warmup_steps: NonNegative = Field(0, description="updates of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="of AdamW; each below 1")
    adam_eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.0, description="of AdamW, decoupled")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradients with a larger norm are scaled down to it")
    num_logged_samples: NonNegative = Field(4, description="responses written to the events each step")


class EvalConfig(Section):
    """[eval]: held-out prompts, before, during and after."""

    every: NonNegative = Field(0, description="steps between evaluations; 0: only before and after")
    num_samples: Positive = Field(4, description="responses per prompt")
    k: tuple[Positive, ...] = Field((1,), description="pass@k to report; each at most num_samples")
    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy")
    max_new_tokens: Positive | None = Field(None, description="default rollout.max_new_tokens")
    threshold: float = Field(1.0, allow_inf_nan=False, description="a response passes when its reward is at least this")
    confidence: Annotated[float, Field(gt=0, lt=1)] = Field(0.95, description="level of the reported intervals")


class CheckpointConfig(Section):
    """[checkpoint]: Hugging Face directories inside the run directory."""

    every: NonNegative = Field(10, description="steps between checkpoints; 0: only the last")
    keep_last: Positive = Field(2, description="newest checkpoints kept")
    keep_best: NonNegative = Field(0, description="checkpoints of highest held-out pass@1 kept besides")


class GoBackConfig(Section):
    """[guard.go_back]: what is changed when a run goes back to a good checkpoint (docs/reliability.md)."""

    max_times: Positive = Field(2, description="after so many times in a run, the reaction is to stop")
    learning_rate_factor: PositiveFloat = Field(0.5, description="train.learning_rate is multiplied by it each time")
    bounds_factor: PositiveFloat = Field(1.0, description="both clip bounds are multiplied by it each time")
    clip_low: PositiveFloat | None = Field(None, description="in place of bounds_factor: lower bound from then on")
    clip_high: PositiveFloat | None = Field(None, description="in place of bounds_factor: upper bound from then on")
    num_mini_batches: Positive | None = Field(None, description="updates per rollout batch from then on")


class GuardConfig(Section):
    """[guard]: what is done about numbers that are not finite and about runs that collapse (docs/reliability.md)."""

    non_finite: Literal["stop", "skip"] = Field(
        "skip", description="skip: leave the response out or the update undone, say so and count it"
    )
    max_non_finite: Positive = Field(3, description="skip: updates undone in a row that end the run")
    reaction: Reaction = Field(
        "warn",
        description="to a detector of collapse; stop: after the step, with a checkpoint; go_back: to a checkpoint from "
        "before it, with other settings",
    )
    reactions: dict[str, Any] = Field(
        default_factory=dict, description='by detector, in place of reaction: { reward_drop = "go_back" }'
    )
    go_back: GoBackConfig = GoBackConfig()  # type: ignore[call-arg]


class SftConfig(Section):
    """[sft]: cold start by next-token loss on responses."""

    path: str | None = Field(None, description="JSONL with prompt and response")
    task: str | None = Field(None, description='instead of a file: "arithmetic:addition"')
    task_options: dict[str, Any] = Field(default_factory=dict, description="options of the task's generator")
    num_pairs: Positive | None = Field(None, description="pairs generated by a task; 1000 by default")
    response_column: str = Field("response", description="column of the file with the text to learn")
    num_steps: Positive = Field(200, description="optimizer updates")
    batch_size: Positive = Field(64, description="pairs per update")
    micro_batch_tokens: Positive = Field(16384, description="most tokens per forward/backward")
    learning_rate: PositiveFloat = Field(1e-4, description="of AdamW, after the warm-up")
    warmup_steps: NonNegative = Field(10, description="updates of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="after the warm-up")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="of AdamW; each below 1")
    weight_decay: NonNegativeFloat = Field(0.0, description="of AdamW, decoupled")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradients with a larger norm are scaled down to it")
    stop_at_pass: Fraction | None = Field(
        None, description="end early once held-out pass@1 reaches this (measured every eval_every updates)"
    )
    eval_every: Positive = Field(20, description="updates between the evaluations of stop_at_pass")
    checkpoint_every: NonNegative = Field(
        100, description="updates between checkpoints to continue from; 0: only at its end"
    )


class Recipe(Section):
    """The whole file."""

    run: RunConfig = RunConfig()  # type: ignore[call-arg]
    model: ModelConfig
    data: TrainDataConfig = TrainDataConfig()  # type: ignore[call-arg]
    rollout: RolloutConfig = RolloutConfig()  # type: ignore[call-arg]
    reward: RewardConfig = RewardConfig()  # type: ignore[call-arg]
    objective: ObjectiveConfig = ObjectiveConfig()  # type: ignore[call-arg]
    moe: MoeConfig = MoeConfig()  # type: ignore[call-arg]
    advantage: AdvantageConfig = AdvantageConfig()  # type: ignore[call-arg]
    train: TrainConfig = TrainConfig()  # type: ignore[call-arg]
    eval: EvalConfig = EvalConfig()  # type: ignore[call-arg]
    checkpoint: CheckpointConfig = CheckpointConfig()  # type: ignore[call-arg]
    guard: GuardConfig = GuardConfig()  # type: ignore[call-arg]
    sft: SftConfig | None = None
