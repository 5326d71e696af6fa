"""Every family in the table on a tiny random model: its choice comes back, forced experts are used by its own rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.errors import ModelError
from gspo.policy.attention import ROUTING
from gspo.policy.moe.families import FAMILIES, find_routers
from gspo.policy.moe.replay import RoutingPass, RoutingShape, prepare_routing

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
QWEN: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen3_moe, not normalised": ("Qwen3Moe", QWEN | {"norm_topk_prob": False}),
    "qwen2_moe": ("Qwen2Moe", QWEN | {"shared_expert_intermediate_size": 16}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "glm4_moe": (
        "Glm4Moe",
        {k: v for k, v in DEEPSEEK.items() if "lora" not in k and "qk_" not in k and k != "v_head_dim"},
    ),
    "dots1": ("Dots1", {k: v for k, v in DEEPSEEK.items() if "lora" not in k and "qk_" not in k and k != "v_head_dim"}),
    "gpt_oss": ("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 3}),
}
IDS = torch.arange(14)[None] % 11


def tiny(name: str) -> Any:
    import transformers

    family, fields = CONFIGS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | fields))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for router in find_routers(model.base_model):  # some start at zero, where every choice is a tie
        torch.nn.init.normal_(router.module.weight)
        if hasattr(router.module, "e_score_correction_bias"):
            router.module.e_score_correction_bias.normal_(std=0.1)
        if getattr(router.module, "bias", None) is not None:
            torch.nn.init.normal_(router.module.bias)
    return model.base_model


def forward(base: Any, routing: RoutingPass | None = None) -> Tensor:
    extra = {} if routing is None else {ROUTING: routing}
    return base(input_ids=IDS, use_cache=False, **extra).last_hidden_state


@pytest.mark.parametrize("name", CONFIGS)
def test_recording_and_replaying_the_own_choice_changes_no_bit(name: str) -> None:
    base = tiny(name)
    plain = forward(base)
    shape = prepare_routing(base)
    assert shape is not None
    assert shape.top_k == 3
    record = RoutingPass(shape, with_margins=True, scores="own")
    assert torch.equal(forward(base, record), plain)
    assert record.ids.shape == (14, shape.num_layers, 3)
    assert (record.margins >= 0).all()
    assert (record.log_scores <= 0).all()
    assert torch.equal(forward(base, RoutingPass(shape, record.ids)), plain)
    assert torch.equal(forward(base), plain)  # nothing stays behind


@pytest.mark.parametrize("name", CONFIGS)
def test_after_the_router_was_disturbed_the_recorded_experts_give_its_selection_back(name: str) -> None:
    """The layers see the routes and, of the router, the gates; equal logits with another choice are the proof."""
    base = tiny(name)
    shape = prepare_routing(base)
    assert shape is not None
    record = RoutingPass(shape)
    plain = forward(base, record)
    routers = find_routers(base)
    seen: list[Tensor] = []
    experts = [r.module for r in routers]
    for module in experts:
        original = module.forward

        def other_choice(hidden: Tensor, original: Any = original, seen: list[Tensor] = seen) -> Any:
            logits, gates, ids = original(hidden)
            seen.append(ids)
            return logits, gates * 0 + 7.0, (ids + 1) % shape.num_experts

        module.forward = other_choice
    disturbed = forward(base)
    assert not torch.allclose(disturbed, plain, atol=1e-2)
    replayed = forward(base, RoutingPass(shape, record.ids))
    assert torch.equal(replayed, plain)
    assert len(seen) == 2 * len(routers)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_margin_is_what_separates_the_choice_from_the_next_expert(name: str) -> None:
    base = tiny(name)
    router = find_routers(base)[0]
    hidden = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    logits, _, ids = router.module(hidden)
    scores = router.family.selection(router.module, logits)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, True)
    assert (scores.masked_fill(~chosen, torch.inf).amin(1) >= scores.masked_fill(chosen, -torch.inf).amax(1)).all()


def test_every_family_of_the_table_is_tested() -> None:
    found = {type(router.module).__name__ for name in CONFIGS for router in find_routers(tiny(name))}
    assert found == set(FAMILIES)


def test_dense_layers_have_no_router_and_keep_their_place() -> None:
    assert [router.layer for router in find_routers(tiny("deepseek_v3"))] == [1, 2]


def test_a_dense_model_has_no_routing() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    assert prepare_routing(Qwen3ForCausalLM(Qwen3Config(**SHAPE)).base_model) is None


def test_a_mixture_with_unknown_routers_is_refused_by_name() -> None:
    base = tiny("qwen3_moe")
    for router in find_routers(base):
        router.module.__class__ = type("FancyRouter", (type(router.module),), {})
    with pytest.raises(ModelError, match=r"routers of Qwen3MoeModel are not understood.*Qwen3Moe"):
        prepare_routing(base)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "dtype", "sentinel"),
    [(8, 2, torch.uint8, 255), (256, 8, torch.uint8, 255), (256, 1, torch.int16, -1), (512, 10, torch.int16, -1)],
)
def test_ids_take_one_byte_up_to_256_experts(num_experts: int, top_k: int, dtype: torch.dtype, sentinel: int) -> None:
    shape = RoutingShape(48, top_k, num_experts)
    assert (shape.dtype, shape.natural) == (dtype, sentinel)
