"""Replaced forwards: the same model, value and gradient, and only where they are known to be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gspo.policy import fused
from gspo.policy.attention import hidden_states
from gspo.policy.causal_lm import prepare_policy
from gspo.policy.native import load_native
from gspo.policy.packed_attention import SharedPrompt, make_plan
from gspo.policy.tiny import character_tokenizer

pytestmark = pytest.mark.skipif(load_native(torch.float32) is None, reason="no C compiler here: torch code is used")
SHAPE: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.15,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3 rotation": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 4}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
}


def make(name: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    model_class, config_class, options = FAMILIES[name]
    torch.manual_seed(0)
    model = model_class(config_class(**(SHAPE | options)))
    for module in model.modules():  # weights of norms other than 1, and biases other than 0
        if type(module).__name__.endswith("RMSNorm"):
            module.weight.data.uniform_(0.5, 1.5)
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            module.bias.data.normal_(std=0.1)
    with monkeypatch.context() as patch:
        if not fuse:
            patch.setattr("gspo.policy.causal_lm.fuse_modules", lambda model: 0)
        return prepare_policy(model, character_tokenizer(), device="cpu")


def run(policy: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of a prompt with two responses, and all gradients."""
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 5, 6])
    plan = make_plan([(0, 5), (5, 3), (8, 2)], [SharedPrompt((5, 10), (0, 5))], positions)
    hidden = hidden_states(policy.base, torch.arange(10, 20)[None], positions[None], plan)
    weights = torch.cos(torch.arange(hidden.numel(), dtype=hidden.dtype)).view(hidden.shape)
    policy.model.zero_grad()
    (hidden * weights).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in policy.base.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_policy, plain_policy = (make(name, fuse, monkeypatch) for fuse in (True, False))
    kinds = {type(m).__name__ for m in fused_policy.model.modules() if "forward" in m.__dict__}
    assert any(kind.endswith("RMSNorm") for kind in kinds)
    assert any(kind.endswith("Attention") for kind in kinds)
    (hidden, gradients), (expected, expected_gradients) = run(fused_policy), run(plain_policy)
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, value in expected_gradients.items():
        bound = 5e-5 * float(value.abs().max()) + 1e-6
        torch.testing.assert_close(gradients[parameter], value, atol=bound, rtol=0, msg=parameter)


def test_an_unknown_family_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's norms add 1 to the weight and its gate is not silu."""
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE))
    assert fused.fuse_modules(model) == 0


def test_a_known_name_that_computes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    plain = modeling_qwen3.Qwen3RMSNorm.forward
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, x: plain(self, x) + self.weight * 1e-3)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    fused.fuse_modules(model)
    changed = {type(module).__name__ for module in model.modules() if "forward" in module.__dict__}
    assert changed == {"Qwen3MLP"}


def test_a_copy_computes_with_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make("qwen3", True, monkeypatch)
    other = copy.deepcopy(policy.model)
    with torch.no_grad():
        before = other(torch.arange(10, 16)[None]).logits
        for parameter in policy.model.parameters():
            parameter.zero_()
        assert torch.equal(other(torch.arange(10, 16)[None]).logits, before)


def test_hooks_and_adapters_on_projections_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make("qwen3", True, monkeypatch)
    seen: list[str] = []
    for name, module in policy.base.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    run(policy)
    assert len(seen) == len(set(seen)) == 2 * 7
