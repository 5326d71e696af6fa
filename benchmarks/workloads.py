"""The workloads: which model, which batch, and how much arithmetic a step of them must do.

Plain data, read by both sides: the worker of the peer runs in another virtual environment, so nothing here imports more
than the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 100,
}
MOE: dict[str, Any] = DENSE | {"num_experts": 16, "moe_intermediate_size": 128, "num_experts_per_tok": 4}
#: A real pretrained model; `make smollm2` puts it there.
SMOLLM2 = "build/smollm2-135m-instruct"
#: Both sides clip at the same bounds. Nothing is clipped at this learning rate, so both do the same arithmetic.
CLIP_LOW, CLIP_HIGH = 3e-3, 4e-3
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Workload:
    """One row of the table in docs/performance.md."""

    name: str
    what: str
    num_prompts: int
    group_size: int
    prompt_length: int
    lengths: tuple[int, ...]  # response tokens, by row, repeated over the rows
    num_mini_batches: int = 1
    tiny: str | None = "qwen3"
    tiny_config: Mapping[str, Any] = field(default_factory=lambda: DENSE)
    path: str | None = None
    rollout: bool = False  # sample, or only update on made-up responses
    silent: bool = False  # every second group has equal rewards
    rounds: int = 5  # measured pairs, after one that is not
    versus: str = "peer"  # what it is compared with: the peer, or ourselves in another setting

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    def reward(self, row: int) -> float:
        """Rewards alternate inside a group, so that it has signal, unless it is a silent one."""
        silent = self.silent and row // self.group_size % 2
        return 0.0 if silent else float(row % 2)

    @property
    def response_lengths(self) -> list[int]:
        return [self.lengths[row % len(self.lengths)] for row in range(self.num_rows)]


def _uneven(num: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths from least to most, geometric, short and long ones mixed in a fixed order."""
    return tuple(round(least * (most / least) ** ((i * 37 % num) / (num - 1))) for i in range(num))


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("w1", "dense, 16 x 8 x 64", 16, 8, 8, (64,), 4, rollout=True),
        Workload("w1s", "w1, half without signal", 16, 8, 8, (64,), 4, rollout=True, silent=True),
        Workload("w2", "mixture, 16 x 8 x 64", 16, 8, 8, (64,), 4, "qwen3_moe", MOE, rollout=True),
        Workload("w3", "SmolLM2-135M, 4 x 8 x 48", 4, 8, 60, (48,), 4, None, {}, SMOLLM2, rollout=True, rounds=3),
        Workload("w4", "vocabulary 151,936", 1, 8, 8, (1016,), tiny_config=DENSE | {"vocab_size": 151_936}, rounds=3),
        Workload("w4q", "vocabulary 37,984", 1, 8, 8, (1016,), tiny_config=DENSE | {"vocab_size": 37_984}, rounds=3),
        Workload("w5", "shared prompt of 768", 1, 16, 768, (64,)),
        Workload("w6", "lengths 8 to 512", 16, 4, 8, _uneven(64, 8, 512), versus="lengths"),
        Workload("w7", "half without signal, 30 % clipped", 16, 8, 8, (64,), 4, versus="skipping"),
    )
}


@dataclass(frozen=True)
class Size:
    """What the arithmetic of a model depends on."""

    layer_parameters: int  # of all layers, those that one token uses
    head_parameters: int
    attention: int  # layers x query heads x head size


def model_size(config: Any, layer_parameters: int) -> Size:
    """From a transformers config and the number of parameters of all layers together."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts = getattr(config, "num_experts", 0) or 0
    if experts:
        expert = 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
        layer_parameters -= expert * (experts - config.num_experts_per_tok)
    return Size(
        layer_parameters,
        config.vocab_size * config.hidden_size,
        config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


def forward_flops(size: Size, prompts: Sequence[int], rows: Sequence[tuple[int, int]]) -> float:
    """Of one forward over prompts (lengths) and responses (index of the prompt, length), each token once.

    A product of a weight with one token is 2 operations; scores and weighted sums of attention are 4 per pair of a
    query and a key it sees, per entry of a head. The last response token is no input. Only response tokens are
    projected to the vocabulary.
    """
    inputs = sum(prompts) + sum(max(length - 1, 0) for _, length in rows)
    predicted = sum(length for _, length in rows)
    pairs = sum(p * (p + 1) / 2 for p in prompts)
    for prompt, length in rows:
        t = max(length - 1, 0)
        pairs += t * prompts[prompt] + t * (t + 1) / 2
    return 2.0 * (size.layer_parameters * inputs + size.head_parameters * predicted) + 4.0 * size.attention * pairs


def step_flops(workload: Workload, size: Size) -> tuple[float, float]:
    """(rollout, update) of one step; the update is three forwards, the rollout one."""
    prompts = [workload.prompt_length] * workload.num_prompts
    rows = [(row // workload.group_size, length) for row, length in enumerate(workload.response_lengths)]
    forward = forward_flops(size, prompts, rows)
    return forward if workload.rollout else 0.0, 3 * forward


def prompt_texts(workload: Workload) -> list[str]:
    """Prompts of a sampled workload: eight characters for the character tokenizer, about sixty tokens of English."""
    if workload.path is None:
        return [f"{i:02d}+{(7 * i) % 100:02d}=??" for i in range(workload.num_prompts)]
    story = (
        "A farmer has {a} sheep and {b} goats on a hill. In spring every second sheep has a lamb, and in summer the "
        "farmer buys {c} goats more at the market in town. How many animals does the farmer have in autumn? "
        "Answer with the number."
    )
    return [story.format(a=10 + 2 * i, b=7 + i, c=3 + i) for i in range(workload.num_prompts)]
