"""The peer's side of a workload: TRL's GRPOTrainer with GSPO's ratio, run from its own virtual environment.

    .venv-trl/bin/python benchmarks/peer_trl.py w1 MODEL_DIRECTORY

A round is what its trainer does between two generations: the generation, the scoring, M optimizer steps. For a
workload that only updates, the generation is replaced by made-up responses of the same lengths.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.protocol import claim_stdout, clock, hear, peak_resident_bytes, resident_bytes, say
from benchmarks.workloads import CLIP_HIGH, CLIP_LOW, LEARNING_RATE, WORKLOADS, Workload, prompt_texts


def main() -> None:
    channel = claim_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("model")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    trainer = make_trainer(workload, model, tokenizer)
    times = watch(trainer, workload)

    class TakesTurns(TrainerCallback):
        """Waits for its turn before each round and reports after it."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            say(channel, ready="trl", model_bytes=resident_bytes(), torch=torch.__version__, trl=trl.__version__)
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % workload.num_mini_batches:
                return
            total = clock() - times["start"]
            seconds = {"update": total - times["made"]}
            if workload.rollout:
                seconds |= {"rollout": times["generated"], "old_logprobs": times["made"] - times["generated"]}
            seconds["step"] = sum(seconds.values())
            say(channel, seconds=seconds, tokens=times["tokens"], peak_bytes=peak_resident_bytes())
            self.wait(control)

        def wait(self, control: Any) -> None:
            if hear() is None:
                control.should_training_stop = True
            times.update(start=clock(), made=0.0, generated=0.0, tokens=0)

    trainer.add_callback(TakesTurns())
    trainer.train()


def make_trainer(workload: Workload, model: Any, tokenizer: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = prompt_texts(workload)
    rows = workload.num_rows // workload.num_mini_batches
    longest = max(workload.lengths)
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        steps_per_generation=workload.num_mini_batches,
        num_iterations=1,
        num_generations=workload.group_size,
        max_completion_length=longest,
        generation_kwargs={"min_new_tokens": longest} if workload.rollout else None,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        max_steps=10**6,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [workload.reward(row) for row in range(len(completions))]

    data = Dataset.from_dict({"prompt": prompts * 4})
    return GRPOTrainer(model=model, reward_funcs=reward, args=settings, train_dataset=data, processing_class=tokenizer)


def watch(trainer: Any, workload: Workload) -> dict[str, Any]:
    """Times the trainer's own stages; returns the clock of the round."""
    import torch

    times: dict[str, Any] = {"start": 0.0, "made": 0.0, "generated": 0.0, "tokens": 0}
    generate, make = trainer._generate, trainer._generate_and_score_completions

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        result = generate(*args, **kwargs)
        times["generated"] += clock() - start
        return result

    def timed_make(inputs: Any) -> Any:
        start = clock()
        result = make(inputs) if workload.rollout else made_up(workload)
        times["made"] += clock() - start
        times["tokens"] += int(result["completion_mask"].sum())
        return result

    generator = torch.Generator().manual_seed(0)

    def made_up(workload: Workload) -> dict[str, Any]:
        lengths = torch.tensor(workload.response_lengths)
        prompt = torch.randint(4, 100, (workload.num_prompts, workload.prompt_length), generator=generator)
        rows, width = workload.num_rows, int(lengths.max())
        return {
            "prompt_ids": prompt.repeat_interleave(workload.group_size, 0),
            "prompt_mask": torch.ones(rows, workload.prompt_length, dtype=torch.long),
            "completion_ids": torch.randint(4, 100, (rows, width), generator=generator),
            "completion_mask": (torch.arange(width) < lengths[:, None]).long(),
            "advantages": torch.arange(rows) % 2 * 2.0 - 1.0,
            "num_items_in_batch": lengths.sum(),
        }

    trainer._generate, trainer._generate_and_score_completions = timed_generate, timed_make
    return times


if __name__ == "__main__":
    main()
