from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from gspo.errors import ModelError
from gspo.policy import attention
from gspo.policy.attention import probe_packing
from gspo.policy.causal_lm import prepare_policy
from gspo.policy.logprobs import sequence_logprobs
from gspo.policy.tiny import character_tokenizer
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded import EmbeddedEngine
from gspo.types import Sequences

from .models import plain_logprobs, small_policy, some_sequences

SHAPE = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 3, "pad_token_id": 0}


def test_a_model_that_leaks_between_packed_sequences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy()
    probe_packing(policy)  # a good one passes

    class Leaky:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
            return nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            ).transpose(1, 2)

    real = attention.hidden_states
    monkeypatch.setattr(attention, "hidden_states", lambda base, ids, places, _: real(base, ids, places, Leaky()))
    with pytest.raises(ModelError, match="depend on the content of another packed sequence"):
        probe_packing(policy)


def test_soft_capped_attention_is_refused_at_load() -> None:
    config = Gemma2Config(**SHAPE, **HEADS, sliding_window=4, query_pre_attn_scalar=8)
    with pytest.raises(ModelError, match="Gemma2Attention uses softcap"):
        prepare_policy(Gemma2ForCausalLM(config), character_tokenizer(), device="cpu")


def test_a_sliding_window_is_computed_right_by_trainer_and_engine() -> None:
    """Window 4, prompts up to 12 and responses up to 9: the window cuts both parts."""
    torch.manual_seed(0)
    config = MistralConfig(**SHAPE, **HEADS, sliding_window=4, initializer_range=0.15)
    policy = prepare_policy(MistralForCausalLM(config), character_tokenizer(), device="cpu")
    sequences = some_sequences()
    expected, _ = plain_logprobs(policy, sequences, 1.0)
    torch.testing.assert_close(sequence_logprobs(policy, sequences, 1.0).logprobs, expected, atol=2e-5, rtol=0)
    prompt = tuple(range(10, 20))
    (completions,) = EmbeddedEngine(policy).generate([GenerationRequest("p", prompt, (1, 2))], SamplingParams(8))
    ids = torch.stack([c.token_ids for c in completions])
    sampled = Sequences((torch.tensor(prompt),), torch.tensor([0, 0]), ids, torch.tensor([8, 8]))
    scored = sequence_logprobs(policy, sampled, 1.0).logprobs
    torch.testing.assert_close(scored, torch.stack([c.logprobs for c in completions]), atol=2e-5, rtol=0)


def test_without_a_plan_the_model_is_an_ordinary_one() -> None:
    """Foreign code may call the module: a padded batch with a mask must give what each row gives alone."""
    policy = small_policy()
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        batch = policy.model(ids, attention_mask=mask, position_ids=places).logits
        alone = policy.model(ids[:1, 2:]).logits
    torch.testing.assert_close(batch[:1, 2:], alone, atol=1e-5, rtol=0)
    assert dataclasses.is_dataclass(policy)
