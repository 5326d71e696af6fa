"""The peer's side of a rollout: vLLM on the CPU, run from its own virtual environment.

    .venv-vllm/bin/python benchmarks/peer_vllm.py w3 MODEL_DIRECTORY

A round is one generation of all responses of the workload, of exactly the given length, with the log-prob of each
chosen token, at temperature 1 and from the whole distribution: what a trainer asks for. No weights are exchanged.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.protocol import claim_stdout, clock, hear, peak_resident_bytes, resident_bytes, say
from benchmarks.workloads import WORKLOADS, Workload, prompt_texts

#: The engine in this process, so that its time and memory are this process's; no compiler at start.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def main() -> None:
    channel = claim_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=[name for name, workload in WORKLOADS.items() if workload.rollout])
    parser.add_argument("model")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    os.environ.update(SETTINGS, VLLM_CPU_OMP_THREADS_BIND=bound_to())
    import torch
    import vllm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in prompt_texts(workload)]
    engine = make_engine(workload, arguments.model, max(len(prompt["prompt_token_ids"]) for prompt in prompts))
    say(channel, ready="vllm", model_bytes=resident_bytes(), torch=torch.__version__, vllm=vllm.__version__)
    number = 0
    while hear() is not None:
        seconds, tokens = measure(engine, workload, prompts, seed=number)
        say(channel, seconds={"rollout": seconds}, tokens=tokens, peak_bytes=peak_resident_bytes())
        number += 1


def bound_to() -> str:
    """Which processors its threads are bound to: as many of ours as step.py asked for."""
    ours = sorted(os.sched_getaffinity(0))
    return ",".join(str(processor) for processor in ours[: int(os.environ.get("OMP_NUM_THREADS", "1"))])


def make_engine(workload: Workload, model: str, prompt_length: int) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,
        max_model_len=prompt_length + max(workload.lengths),
        max_num_seqs=workload.num_rows,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
    )


def measure(engine: Any, workload: Workload, prompts: list[dict[str, Any]], seed: int) -> tuple[float, int]:
    """(seconds, sampled tokens) of one generation.

    Raises:
        RuntimeError: a response of another length than was asked for.
    """
    from vllm import SamplingParams

    length = workload.lengths[0]
    params = SamplingParams(
        n=workload.group_size, temperature=1.0, max_tokens=length, min_tokens=length, ignore_eos=True, logprobs=0,
        seed=seed, detokenize=False,
    )  # fmt: skip
    engine.reset_prefix_cache()  # the weights change between two rollouts of a training run
    start = clock()
    results = engine.generate(prompts, params, use_tqdm=False)
    seconds = clock() - start
    lengths = [len(output.token_ids) for result in results for output in result.outputs]
    if lengths != [length] * workload.num_rows:
        raise RuntimeError(f"vLLM returned responses of {lengths} tokens; {length} each were asked for")
    return seconds, sum(lengths)


if __name__ == "__main__":
    main()
