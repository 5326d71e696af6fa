from __future__ import annotations

import pytest
import torch

from gspo.errors import ModelError
from gspo.policy.tiny import character_tokenizer, tiny_model


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_defaults_have_about_a_million_parameters(kind: str) -> None:
    model, tokenizer = tiny_model(kind)
    assert 0.9e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    assert len(tokenizer) == model.config.vocab_size == 100


def test_the_tokenizer_is_lossless_and_one_token_per_character() -> None:
    tokenizer = character_tokenizer()
    text = " Ab 1+1=2;\n  ~{x}\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("é")) == ["<unk>"]


def test_the_chat_template_marks_turns_with_special_tokens() -> None:
    tokenizer = character_tokenizer()
    messages = [{"role": "user", "content": "1+1="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["<|im_start|>", "u", "1", "+", "1", "=", "<|im_end|>", "<|im_start|>", "a"]


def test_the_seed_decides_the_weights_and_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, again, other = (tiny_model("qwen3", {"num_hidden_layers": 1}, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    pairs = [(a, b, c) for a, b, c in zip(one.parameters(), again.parameters(), other.parameters(), strict=True)]
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("llama", {}, "no tiny model is called 'llama'; there are qwen3, qwen3_moe"),
        ("qwen3", {"hiden_size": 64}, "no config field 'hiden_size'; did you mean hidden_size"),
        ("qwen3", {"num_experts": 4}, "no config field 'num_experts'"),
        ("qwen3", {"vocab_size": 50}, "vocab_size is 50, but the character tokenizer needs 100 or more"),
        ("qwen3", {"hidden_act": "nothing"}, "no qwen3 model can be built"),
    ],
)
def test_wrong_requests_are_refused_by_name(name: str, overrides: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tiny_model(name, overrides)
