"""Run directories as a training run would leave them, with curves of the usual shapes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from gspo.events import EventWriter, RunDirectory

HOSTILE = "<script>document.title = 'hacked'</script></script><img src=x onerror=\"document.title='hacked'\">"


def write_run(
    path: Path,
    *,
    name: str = "tiny-moe",
    objective: str = "gspo",
    clip: tuple[float, float] = (3e-3, 4e-3),
    num_steps: int = 5,
    num_sft: int = 0,
    seed: int = 0,
    ended: bool = True,
) -> Path:
    """Writes a run of ``num_steps`` steps of 4 updates, after ``num_sft`` updates of cold start."""
    rng = np.random.default_rng(seed)
    with (
        RunDirectory.create(
            path, command=["gspo", "train", "recipe.toml"], config_text='[run]\nname = "tiny-moe"\n', seed=seed
        ) as run,
        run.event_writer() as events,
    ):
        events.write(
            "start",
            name=name,
            objective=objective,
            clip_low=clip[0],
            clip_high=clip[1],
            num_steps=num_steps,
            num_mini_batches=4,
            prompts_per_step=32,
            group_size=8,
        )
        events.write("audit", findings=[])
        for update in range(1, num_sft + 1):
            value = 0.15 + 2.8 * math.exp(-update / 40) + rng.normal(0, 0.03)
            events.write("sft", update=update, metrics={"loss": abs(value), "grad_norm": 1.0, "learning_rate": 1e-3})
            if update % 20 == 0:
                _evaluate(events, update, "sft", 0.4 * update / num_sft, rng)
        if num_steps:
            _evaluate(events, 0, "held_out", 0.42, rng)
        for step in range(1, num_steps + 1):
            _step(events, step, num_steps, objective, clip, rng)
            if step % max(1, num_steps // 4) == 0:
                _evaluate(events, step, "held_out", _skill(step, num_steps, seed), rng)
        if ended:
            events.write("checkpoint", step=num_steps, path=f"checkpoints/step-{num_steps:06d}")
            events.write("end", status="finished", seconds=3.1 * num_steps + num_sft * 0.2)
    return path


def _skill(step: int, num_steps: int, seed: int) -> float:
    return 0.42 + (0.34 - 0.08 * (seed % 2)) * (1 - math.exp(-3 * step / num_steps))


def _evaluate(events: EventWriter, step: int, name: str, rate: float, rng: np.random.Generator) -> None:
    counts = rng.binomial(4, np.clip(rng.beta(2 * rate + 0.05, 2 * (1 - rate) + 0.05, 100), 0, 1))
    mean = float(counts.mean() / 4)
    half = 1.98 * float((counts / 4).std(ddof=1)) / 10
    metrics = {"pass@1": mean, "pass@1/low": max(0.0, mean - half), "pass@1/high": min(1.0, mean + half)}
    metrics |= {"pass@4": float((counts > 0).mean()), "reward/mean": mean, "length/mean": 18.0}
    metrics |= {"truncated_fraction": 0.01, "unscored_fraction": 0.0}
    events.write(
        "evaluation",
        step=step,
        name=name,
        metrics=metrics,
        num_prompts=100,
        num_samples=4,
        confidence=0.95,
        outcomes=[(4, int(c)) for c in counts],
    )


def _step(
    events: EventWriter, step: int, num_steps: int, objective: str, clip: tuple[float, float], rng: np.random.Generator
) -> None:
    fraction = (0.18 if objective == "gspo" else 0.012) * float(rng.uniform(0.7, 1.3))
    for mini_batch in range(4):
        clipped = fraction * mini_batch / 1.5
        events.write(
            "update",
            step=step,
            update=4 * (step - 1) + mini_batch + 1,
            mini_batch=mini_batch,
            metrics={
                "loss": float(rng.normal(0, 2e-3)) * (mini_batch + 0.2),
                "grad_norm": 0.4 * math.exp(float(rng.normal(0, 0.25))) * (1 + 0.5 * math.sin(step / 9)),
                "learning_rate": 3e-4 * min(1.0, (4 * step + mini_batch) / 20),
                "clip_fraction/sequence": clipped,
                "clip_fraction/token": clipped * 1.1,
                "num_sequences": 64,
                "num_tokens": 1152,
            },
        )
    width = 3.2e-3 * float(rng.uniform(0.85, 1.2)) if objective == "gspo" else 4e-3
    quantiles = {1: -2.33, 5: -1.64, 25: -0.67, 50: 0.0, 75: 0.67, 95: 1.64, 99: 2.33}
    mean = _skill(step, num_steps, 0) + float(rng.normal(0, 0.03))
    length = 18 + 2 * math.sin(step / 12) + float(rng.normal(0, 0.3))
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(max(0.0, mean * (1 - mean))),
        "reward/unscored": 0,
        "groups/total": 32,
        "groups/constant": int(rng.integers(2, 9)),
        "groups/dropped": 0,
        "length/mean": length,
        "length/min": length - 6,
        "length/max": length + 14,
        "truncated_fraction": float(rng.uniform(0, 0.02)),
        "clip_fraction/sequence": fraction,
        "clip_fraction/sequence_low": fraction * 0.45,
        "clip_fraction/sequence_high": fraction * 0.55,
        "clip_fraction/token": fraction * 1.1,
        "clip_fraction/token_low": fraction * 0.52,
        "clip_fraction/token_high": fraction * 0.58,
        **{f"log_ratio/q{q:02d}": width * z - 2e-4 for q, z in quantiles.items()},
        "entropy": 0.55 * math.exp(-step / num_steps) + 0.08,
        "kl/k3_old": 1e-4 * float(rng.uniform(0.8, 1.3)),
        "mismatch/mean_abs": 2e-7 * float(rng.uniform(0.8, 1.3)),
        "mismatch/max_abs": 3e-6 * float(rng.uniform(0.8, 1.3)),
        "grad_norm": 0.4,
        "loss": 0.001,
        "learning_rate": 3e-4,
        "clip_low": clip[0],
        "clip_high": clip[1],
    }
    seconds = {"rollout": float(rng.uniform(0.9, 1.1)), "reward": 0.05, "old_logprobs": 0.04}
    seconds |= {"update": float(rng.uniform(1.3, 1.6))}
    events.write(
        "step",
        step=step,
        num_updates=4,
        policy_version=4 * step,
        seconds={**seconds, "total": sum(seconds.values())},
        metrics=metrics,
    )
    events.write("samples", step=step, samples=_samples(step))


def _samples(step: int) -> list[dict[str, object]]:
    shared = {"prompt": "47+38=", "gold": "85", "prompt_id": "arithmetic/12"}
    return [
        shared
        | {
            "answer": "7+8=15,4+3+1=8;85",
            "reward": 1.0,
            "components": {"task": 1.0},
            "ratio": 1.00213,
            "advantage": 0.94,
            "stop_reason": "eos",
            "num_tokens": 18,
            "clipped": False,
        },
        shared
        | {
            "prompt": [{"role": "user", "content": "47+38="}],
            "answer": f"7+8=14,4+3+1=8;{80 + step % 9} {HOSTILE}",
            "reward": 0.0,
            "components": {"task": 0.0},
            "ratio": 0.99618,
            "advantage": -1.06,
            "stop_reason": "length",
            "num_tokens": 24,
            "clipped": True,
        },
    ]
