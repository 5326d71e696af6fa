"""An estimate of the memory that a run takes, from sizes alone: nothing is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gspo.config.schema import Recipe
from gspo.errors import InputError, ModelError

_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Prompt length that is assumed where the recipe does not limit it.
ASSUMED_PROMPT_TOKENS: Final = 256
#: What the logits of one chunk of rows may take (as in policy/projection.py).
LOGIT_CHUNK_BYTES: Final = 96 << 20


@dataclass(frozen=True)
class ModelSizes:
    """What memory depends on."""

    num_parameters: int | None  # None: not known without loading the weights
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int  # of the MLP; of a mixture: experts per token times the size of one


def sizes_from_config(config: Mapping[str, Any], num_parameters: int | None = None) -> ModelSizes:
    """Sizes from the fields of a transformers ``config.json``. Raises ModelError if one is missing."""
    config = config.get("text_config", config)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        experts = config.get("num_experts_per_tok")
        intermediate = (
            int(experts) * int(config["moe_intermediate_size"])
            if experts and config.get("moe_intermediate_size")
            else int(config.get("intermediate_size") or 4 * hidden)
        )
        return ModelSizes(
            num_parameters=num_parameters,
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            intermediate_size=intermediate,
        )
    except KeyError as error:
        raise ModelError(f"the model's config.json has no {error.args[0]}; memory cannot be estimated") from None


def model_sizes(path: Path, gguf_file: str | None = None) -> ModelSizes:
    """Sizes of the model in a directory: config.json and the headers of its safetensors files, or a GGUF header.

    Raises:
        ModelError: config.json is not JSON or lacks a size, or a weights file is damaged.
        InputError: a GGUF file without the ``gguf`` package.
    """
    if gguf_file is not None:
        return _gguf_sizes(path / gguf_file)
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from None
    counts = [count_parameters(weights) for weights in sorted(path.glob("*.safetensors"))]
    return sizes_from_config(config, sum(counts) or None)


def count_parameters(file: Path) -> int:
    """Numbers in a safetensors file, by its header. Raises ModelError if that is damaged."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > file.stat().st_size:
                raise ModelError(f"{file}: the header says {size} bytes, more than the file has; copy it again")
            header = json.loads(stream.read(size))
        return sum(_product(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file}: not a safetensors file: {error}") from None


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total


def _gguf_sizes(file: Path) -> ModelSizes:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError("model.gguf_file needs the gguf package: pip install 'gspo[gguf]'") from None
    try:
        reader = GGUFReader(str(file))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not a GGUF file: {error}") from None
    prefix = f"{reader.fields['general.architecture'].contents()}."
    fields = {name.removeprefix(prefix): field for name, field in reader.fields.items() if name.startswith(prefix)}
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    config = {ours: fields[theirs].contents() for ours, theirs in names.items() if theirs in fields}
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    config["vocab_size"] = int(max(embedding.shape))
    return sizes_from_config(config, sum(int(tensor.n_elements) for tensor in reader.tensors))


def estimate_memory(
    recipe: Recipe,
    num_parameters: int,
    hidden_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    intermediate_size: int | None = None,
    prompt_tokens: int | None = None,
) -> dict[str, int]:
    """An estimate of the bytes that each part of a run takes, for one process.

    With b bytes per number of ``model.dtype``, N sequences per step and p + t the longest prompt and response:

    - ``weights``: parameters x b, and ``gradients`` the same.
    - ``optimizer``: parameters x 8 (AdamW, two float32 moments).
    - ``reference``: parameters x b, where there is a KL term.
    - ``kv_cache``: min(max_slots, N) x (p + t) x layers x 2 x KV heads x head size x b. A prompt that is shared by its
      group is counted for each response: an upper bound.
    - ``activations``: tokens of a micro-batch x b x values kept per token. A layer keeps 8 hidden + 2 KV + 3 MLP
      values; with gradient checkpointing every layer keeps its input only and one layer is whole.
    - ``logprobs``: the float32 logits of two chunks of rows, one of them kept where there are few.

    Rollout and update do not overlap, so ``peak`` is weights, gradients, optimizer and reference, and the larger of
    ``kv_cache`` and ``activations + logprobs``. What torch itself, fragmentation and other buffers take is left out.

    Args:
        num_parameters: numbers in the model.
        hidden_size, num_layers, num_kv_heads, head_dim, vocab_size: of its transformers config.
        intermediate_size: of the MLP (active experts together); default 4 x hidden_size.
        prompt_tokens: longest prompt; default data.max_prompt_tokens, or 256.
    """
    width = _BYTES[recipe.model.dtype]
    mlp = intermediate_size or 4 * hidden_size
    prompt = prompt_tokens or recipe.data.max_prompt_tokens or ASSUMED_PROMPT_TOKENS
    length = prompt + recipe.rollout.max_new_tokens
    num_sequences = recipe.rollout.prompts_per_step * recipe.rollout.group_size
    kv_values = 2 * num_kv_heads * head_dim
    tokens = _micro_batch_tokens(recipe, length, num_sequences)
    layer_values = 8 * hidden_size + kv_values + 3 * mlp
    kept = num_layers * layer_values
    if recipe.model.gradient_checkpointing:
        kept = num_layers * hidden_size + layer_values
    chunk_rows = min(tokens, max(16, LOGIT_CHUNK_BYTES // (4 * vocab_size)))
    parts = {
        "weights": num_parameters * width,
        "gradients": num_parameters * width,
        "optimizer": num_parameters * 8,
        "reference": num_parameters * width if recipe.objective.kl_coefficient > 0 else 0,
        "kv_cache": min(recipe.rollout.max_slots, num_sequences) * length * num_layers * kv_values * width,
        "activations": tokens * kept * width,
        "logprobs": 2 * 4 * chunk_rows * vocab_size,
    }
    fixed = parts["weights"] + parts["gradients"] + parts["optimizer"] + parts["reference"]
    return parts | {"peak": fixed + max(parts["kv_cache"], parts["activations"] + parts["logprobs"])}


def machine_memory() -> int | None:
    """Bytes that a process may have: those of the machine, or of its control group if fewer; None: not known."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdecimal() else total


def readable(size: int) -> str:
    """Bytes in units of 1024."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _micro_batch_tokens(recipe: Recipe, length: int, num_sequences: int) -> int:
    """Most tokens of one forward: by count or by tokens, never more than an update has, at least one sequence."""
    per_update = -(-num_sequences // recipe.train.num_mini_batches)
    if recipe.train.micro_batch_size is not None:
        return min(recipe.train.micro_batch_size, per_update) * length
    return max(length, min(recipe.train.micro_batch_tokens, per_update * length))
