"""The decoder laid out for steps gives what the model's own forward gives, and steps aside where it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from gspo.policy.causal_lm import CausalPolicy, prepare_policy
from gspo.policy.native import load_native
from gspo.policy.tiny import character_tokenizer
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded import engine as engine_module
from gspo.rollout.embedded.decoder import make_decoder
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.types import Completion

from ..policy.models import DENSE, small_policy

pytestmark = pytest.mark.skipif(load_native(torch.float32) is None, reason="no C compiler here: torch code is used")
REQUESTS = [
    GenerationRequest("a", tuple(range(10, 19)), (1, 2, 3)),
    GenerationRequest("b", (40, 41), (4, 5)),
    GenerationRequest("c", tuple(range(50, 60)), (6,)),
]


def policies() -> dict[str, CausalPolicy]:
    shape: dict[str, Any] = {k: v for k, v in DENSE.items() if k != "head_dim"}
    shape |= {"vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    biased = Qwen2ForCausalLM(Qwen2Config(**shape))
    for name, parameter in biased.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.2)
    windowed = MistralForCausalLM(MistralConfig(**shape, head_dim=8, sliding_window=5))
    return {
        "qwen3": small_policy(),
        "qwen3_moe": small_policy("qwen3_moe"),
        "qwen3 float64": small_policy(dtype="float64"),
        "biases": prepare_policy(biased, character_tokenizer(), device="cpu"),
        "window": prepare_policy(windowed, character_tokenizer(), device="cpu"),
    }


def sample(policy: CausalPolicy, num_tokens: int = 20) -> list[Completion]:
    rows = EmbeddedEngine(policy, max_slots=4).generate(
        REQUESTS, SamplingParams(num_tokens, 0.8, policy.stop_token_ids)
    )
    return [completion for row in rows for completion in row]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3 float64", "biases", "window"])
def test_tokens_and_logprobs_are_those_of_the_models_own_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slots for six responses: rows retire, move and join."""
    policy = policies()[name]
    if name != "qwen3 float64":  # its norms were replaced by the test's own exact ones
        assert make_decoder(policy, 64, 32) is not None
    fast = sample(policy)
    monkeypatch.setattr(engine_module, "make_decoder", lambda *_: None)
    for ours, theirs in zip(fast, sample(policy), strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=2e-5, rtol=0)


def test_it_reads_the_weights_of_now() -> None:
    policy = small_policy()
    before = sample(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    after = sample(policy)
    assert any(not torch.equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True))


def test_it_steps_aside() -> None:
    policy = small_policy()
    assert make_decoder(policy, 64, 2) is None  # too few steps to lay out weights for
    handle = policy.base.layers[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr,index]
    assert make_decoder(policy, 64, 32) is None  # somebody listens to a module it would go around
    handle.remove()
    assert make_decoder(policy, 64, 32) is not None
    policy.base.rotary_emb.rope_type = "dynamic"  # type: ignore[union-attr]
    assert make_decoder(policy, 64, 32) is None
