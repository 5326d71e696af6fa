"""Ten minutes on one GPU: does everything run there, are the numbers right, and how fast is it.

    python -m benchmarks.gpu --json gpu.jsonl [--model DIRECTORY]

Each check prints one JSON line and none stops the next: agreement of CPU and GPU, and of engine and trainer, in float32
and bfloat16; rollout and update rates with bfloat16 weights and float32 log-probs; the decoder under torch.compile.
The model is Qwen3-shaped with random weights (0.6B parameters), or a given directory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gspo.objectives import make_objective
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.policy.logprobs import sequence_logprobs
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.train.batch import rollout_batch, train_batch
from gspo.train.optimizer import Optimizer
from gspo.train.schedule import mini_batches
from gspo.train.step import MicroBatching, update
from gspo.types import Prompt, Rollout, RolloutGroup, Score, TrainBatch

LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
CUT = MicroBatching(None, 16_384)


def load(model: str | None, dtype: Any, device: str, small: bool = False) -> CausalPolicy:
    if model is not None and not small:
        return load_policy(path=model, dtype=dtype, device=device)
    return load_policy(tiny="qwen3", tiny_config={} if small else LARGE, dtype=dtype, device=device)


def sampled(policy: CausalPolicy, num_prompts: int, group_size: int, num_tokens: int) -> TrainBatch:
    """A rollout batch of the engine; rewards alternate."""
    requests = [
        GenerationRequest(str(i), tuple(range(5 + i, 37 + i)), tuple(range(i * group_size, (i + 1) * group_size)))
        for i in range(num_prompts)
    ]
    groups = []
    for request, row in zip(
        requests, EmbeddedEngine(policy).generate(requests, SamplingParams(num_tokens)), strict=True
    ):
        rollouts = tuple(
            Rollout(
                c.token_ids, torch.ones(len(c.token_ids), dtype=torch.bool), c.logprobs, "", c.stop_reason, 0,
                Score(float(j % 2)),
            )
            for j, c in enumerate(row)
        )  # fmt: skip
        groups.append(RolloutGroup(Prompt(request.prompt_id, "", request.token_ids), rollouts))
    batch = rollout_batch(groups)
    included = torch.ones(len(batch.rewards), dtype=torch.bool)
    return train_batch(batch, batch.rollout_logprobs, advantage_scale="group_std", std_floor=1e-4, included=included)


def cpu_against_gpu(model: str | None) -> dict[str, Any]:
    batch = sampled(load(None, "float32", "cpu", small=True), 2, 4, 16)
    values = [
        sequence_logprobs(load(None, "float32", device, small=True), batch.rollouts.sequences, 1.0)
        .logprobs.detach()
        .cpu()
        for device in ("cpu", "cuda")
    ]
    return {"max_difference": float((values[0] - values[1]).abs().max())}


def engine_against_trainer(model: str | None, dtype: str) -> dict[str, Any]:
    policy = load(model, dtype, "cuda")
    batch = sampled(policy, 4, 4, 64)
    with torch.no_grad():
        scored = sequence_logprobs(policy, batch.rollouts.sequences, 1.0).logprobs.cpu()
    difference = (scored - batch.rollouts.rollout_logprobs).abs()[batch.loss_mask]
    return {"dtype": dtype, "mean_difference": float(difference.mean()), "max_difference": float(difference.max())}


def rates(model: str | None) -> dict[str, Any]:
    policy = load(model, "bfloat16", "cuda")
    torch.cuda.reset_peak_memory_stats()
    start = _now()
    batch = sampled(policy, 32, 8, 256)
    rollout = _now() - start
    optimizer = Optimizer(
        policy.model, learning_rate=1e-6, num_updates=100, warmup_steps=0, schedule="constant", betas=(0.9, 0.95),
        adam_eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    objective = make_objective("gspo", 3e-4, 4e-4)
    seconds = []
    for mini in mini_batches(batch, 4, seed=0, step=1):
        start = _now()
        update(policy, optimizer, objective, batch, mini, temperature=1.0, cut=CUT)
        seconds.append(_now() - start)
    tokens = int(batch.loss_mask.sum())
    return {
        "rollout_tokens_per_s": round(tokens / rollout),
        "update_tokens_per_s": round(tokens / 4 / sorted(seconds)[len(seconds) // 2]),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def compiled(model: str | None) -> dict[str, Any]:
    """The layers under torch.compile, and that they give the same log-probs."""
    policy = load(model, "bfloat16", "cuda")
    batch = sampled(policy, 4, 8, 64)
    with torch.no_grad():
        plain = sequence_logprobs(policy, batch.rollouts.sequences, 1.0).logprobs
        for layer in policy.base.layers:  # type: ignore[union-attr]
            layer.mlp.compile()
        start = _now()
        fast = sequence_logprobs(policy, batch.rollouts.sequences, 1.0).logprobs
    return {"first_call_s": round(_now() - start, 1), "max_difference": float((plain - fast).abs().max())}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face directory")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; this script has nothing to measure")
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "cpu_against_gpu": lambda: cpu_against_gpu(arguments.model),
        "engine_against_trainer_float32": lambda: engine_against_trainer(arguments.model, "float32"),
        "engine_against_trainer_bfloat16": lambda: engine_against_trainer(arguments.model, "bfloat16"),
        "rates": lambda: rates(arguments.model),
        "compiled": lambda: compiled(arguments.model),
    }
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            result = check()
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch raises; the others still run
            result = {"error": f"{type(error).__name__}: {error}"}
        torch.cuda.empty_cache()
        line = json.dumps({"check": name, **result, "seconds": round(time.perf_counter() - start, 1)})
        print(line, flush=True)
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
