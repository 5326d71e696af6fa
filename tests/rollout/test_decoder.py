"""The decoder laid out for steps gives what the model's own forward gives, and steps aside where it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from gspo.policy.causal_lm import CausalPolicy, prepare_policy
from gspo.policy.native import load_native
from gspo.policy.packed_attention import make_plan
from gspo.policy.tiny import character_tokenizer
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded import engine as engine_module
from gspo.rollout.embedded import layout
from gspo.rollout.embedded.decoder import make_decoder
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.embedded.slots import Admission, PrefillPlan
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
        assert make_decoder(policy, 4, 64, 32) is not None
    fast = sample(policy)
    monkeypatch.setattr(engine_module, "make_decoder", lambda *_: None)
    for ours, theirs in zip(fast, sample(policy), strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "window"])
def test_prompts_and_responses_longer_than_a_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policies()[name]
    requests = [GenerationRequest("p", tuple(10 + i % 80 for i in range(n)), (n, n + 1)) for n in (15, 16, 17, 40)]
    fast = EmbeddedEngine(policy, max_slots=3).generate(requests, SamplingParams(40))
    monkeypatch.setattr(engine_module, "make_decoder", lambda *_: None)
    slow = EmbeddedEngine(policy, max_slots=3).generate(requests, SamplingParams(40))
    for ours, theirs in zip((c for row in fast for c in row), (c for row in slow for c in row), strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_number_of_threads_changes_no_bit_of_a_step(kind: str) -> None:
    """Of decoding; the prompt is computed once, before."""
    policy, before = small_policy(kind), torch.get_num_threads()
    tokens, positions = torch.arange(20, 60), torch.full((40,), 3)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(step_after_prompt(policy, tokens, positions))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_row_of_a_step_is_the_same_bit_for_bit_in_any_company(kind: str) -> None:
    policy = small_policy(kind)
    tokens, positions = torch.arange(20, 60), torch.full((40,), 3)
    together = step_after_prompt(policy, tokens, positions)
    for rows in (1, 2, 11, 13):
        assert torch.equal(step_after_prompt(policy, tokens[:rows], positions[:rows]), together[:rows])


def step_after_prompt(policy: CausalPolicy, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits of one step whose rows share a prompt of three tokens with made-up keys."""
    decoder = make_decoder(policy, len(tokens), 64, 32)
    assert decoder is not None
    plan = PrefillPlan(make_plan([(0, 3)], [], torch.arange(3)))
    for layer in range(2):
        heads = policy.base.layers[layer].self_attn.k_proj.out_features // 8  # type: ignore[union-attr,index]
        plan.keys[layer] = torch.cos(torch.arange(3.0 * heads * 8)).view(3, heads, 8)
        plan.values[layer] = plan.keys[layer].flip(0)
    decoder.admit(0, [Admission(0, 0, 3, len(tokens), len(tokens))], plan)
    with torch.no_grad():
        return decoder.step(tokens, positions, 4)[0].clone()


def test_a_mixture_that_is_not_known_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the routes are those that the hooks of its routers record."""
    policy = small_policy("qwen3_moe")
    params = SamplingParams(20, 0.8, policy.stop_token_ids, record_routing=True)
    known = EmbeddedEngine(policy, max_slots=4).generate(REQUESTS, params)
    monkeypatch.setattr(layout, "MIXTURES", {})
    called = EmbeddedEngine(policy, max_slots=4).generate(REQUESTS, params)
    for ours, theirs in zip((c for row in known for c in row), (c for row in called for c in row), strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert ours.routing is not None
        assert theirs.routing is not None
        assert torch.equal(ours.routing, theirs.routing)
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
    assert make_decoder(policy, 4, 64, 2) is None  # too few steps to lay out weights for
    handle = policy.base.layers[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr,index]
    assert make_decoder(policy, 4, 64, 32) is None  # somebody listens to a module it would go around
    handle.remove()
    assert make_decoder(policy, 4, 64, 32) is not None
    policy.base.rotary_emb.rope_type = "dynamic"  # type: ignore[union-attr]
    assert make_decoder(policy, 4, 64, 32) is None
