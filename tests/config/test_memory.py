"""The memory estimate against sums done by hand, and sizes read from files without loading weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gspo.config import ModelSizes, Recipe, estimate_memory, model_sizes
from gspo.config.memory import count_parameters, sizes_from_config
from gspo.errors import ModelError

SHAPE = {
    "num_parameters": 1000,
    "hidden_size": 16,
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab_size": 50,
    "intermediate_size": 20,
}
SMALL = ["rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=6", "data.max_prompt_tokens=10"]


def test_each_part_is_its_formula(recipe: Callable[..., Recipe]) -> None:
    parts = estimate_memory(recipe(*SMALL), **SHAPE)
    assert parts["weights"] == parts["gradients"] == 4 * 1000
    assert parts["optimizer"] == 8 * 1000
    assert parts["reference"] == 0
    kv_values = 2 * 2 * 4  # keys and values, heads, head size
    assert parts["kv_cache"] == 8 * (10 + 6) * 3 * kv_values * 4  # 8 sequences of 16 tokens in 3 layers
    tokens = 8 // 4 * 16  # an update has 2 of the 8 sequences
    assert parts["activations"] == tokens * 3 * (8 * 16 + kv_values + 3 * 20) * 4
    assert parts["logprobs"] == 2 * 4 * tokens * 50  # logits and their gradient
    assert parts["peak"] == 16 * 1000 + max(parts["kv_cache"], parts["activations"] + parts["logprobs"])


def test_what_the_settings_change(recipe: Callable[..., Recipe]) -> None:
    plain = estimate_memory(recipe(*SMALL), **SHAPE)
    assert estimate_memory(recipe(*SMALL, "objective.kl_coefficient=0.1"), **SHAPE)["reference"] == 4 * 1000
    half = estimate_memory(recipe(*SMALL, "model.dtype=bfloat16"), **SHAPE)
    for name in ("weights", "gradients", "kv_cache", "activations"):
        assert half[name] * 2 == plain[name]
    assert half["optimizer"] == plain["optimizer"]
    assert estimate_memory(recipe(*SMALL, "rollout.max_slots=2"), **SHAPE)["kv_cache"] * 4 == plain["kv_cache"]
    assert (
        estimate_memory(recipe(*SMALL, "train.micro_batch_size=1"), **SHAPE)["activations"] * 2 == plain["activations"]
    )
    least = estimate_memory(recipe(*SMALL, "train.micro_batch_tokens=1"), **SHAPE)  # never less than one sequence
    assert least["activations"] * 2 == plain["activations"]
    checkpointed = estimate_memory(recipe(*SMALL, "model.gradient_checkpointing=true"), **SHAPE)
    layer = 8 * 16 + 16 + 3 * 20
    assert checkpointed["activations"] * 3 * layer == plain["activations"] * (3 * 16 + layer)


def test_prompt_tokens_are_assumed_where_nothing_limits_them(recipe: Callable[..., Recipe]) -> None:
    open_ended = estimate_memory(recipe(*SMALL[:3]), **SHAPE)
    assert open_ended == estimate_memory(recipe(*SMALL[:3]), **SHAPE, prompt_tokens=256)


def test_logit_chunk_is_limited(recipe: Callable[..., Recipe]) -> None:
    wide = {**SHAPE, "vocab_size": 1 << 20}  # 24 rows of float32 logits are 96 MiB
    assert estimate_memory(recipe(*SMALL), **wide)["logprobs"] == 2 * (96 << 20)


def test_sizes_of_a_directory(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_sizes(tmp_path).num_parameters is None
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}, tmp_path / "model-1.safetensors")
    save_file({"c": np.zeros((), np.float32)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert model_sizes(tmp_path) == ModelSizes(
        num_parameters=3 * 5 + 7 + 1,
        hidden_size=8,
        num_layers=3,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=11,
        intermediate_size=32,
    )


def test_sizes_of_a_mixture_and_of_a_nested_config() -> None:
    config = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 5,
        "intermediate_size": 99,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
    }
    sizes = sizes_from_config({"text_config": config})
    assert (sizes.num_kv_heads, sizes.head_dim, sizes.intermediate_size) == (1, 16, 2 * 6)


def test_sizes_of_a_gguf_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(8)
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(24)
    writer.add_tensor("token_embd.weight", np.zeros((50, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert model_sizes(tmp_path, "m.gguf") == ModelSizes(
        num_parameters=50 * 8 + 8,
        hidden_size=8,
        num_layers=3,
        num_kv_heads=2,
        head_dim=2,
        vocab_size=50,
        intermediate_size=24,
    )
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file at all")
    with pytest.raises(ModelError, match="not a GGUF file"):
        model_sizes(tmp_path, "bad.gguf")


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        model_sizes(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ModelError, match="has no num_attention_heads"):
        model_sizes(tmp_path)
    weights = tmp_path / "model.safetensors"
    for content in (b"\xff" * 20, b"", b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{"):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            count_parameters(weights)
