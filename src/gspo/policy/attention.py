"""The attention function of every policy, and the probe that refuses a model in which packing leaks.

Transformers' attention registry is the way in, so no modelling code is copied. A forward with the keyword
``attention_plan`` attends as the plan says: ``PackedPlan`` for packed rows, the engine's cached plan for decoding.
Without a plan it is ordinary scaled-dot-product attention with the model's own mask, so that the same
module still works in foreign code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gspo.errors import ModelError
from gspo.policy.packed_attention import make_plan, plan_to

if TYPE_CHECKING:
    from gspo.policy.causal_lm import CausalPolicy
    from gspo.policy.moe.replay import RoutingPass

#: Name in transformers' registry.
ATTENTION = "gspo_plan"

#: Keyword by which the routing of a forward travels; see policy/moe/replay.py.
ROUTING = "expert_routing"

#: What some families put into attention besides queries and keys; a plan knows none of it.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "indices", "head_mask")


class AttentionPlan(Protocol):
    """How the tokens of one forward attend."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Queries (b, Hq, t, D), keys (b, Hkv, t, D), values (b, Hkv, t, Dv) of the new tokens -> (b, t, Hq, Dv)."""
        ...


def register_attention() -> str:
    """Registers the attention function with transformers (again and again is harmless); returns its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, plan_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    return ATTENTION


def plan_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function in the registry. Raises ModelError for a kind of attention that a plan cannot compute."""
    if attention_plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    extra = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if extra or not getattr(module, "is_causal", True):
        what = ", ".join(extra) or "attention that is not causal"
        raise ModelError(f"{type(module).__name__} uses {what}, which packed rows cannot compute; use another model")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return attention_plan.attend(int(module.layer_idx), query, key, value, scale, sliding_window), None  # type: ignore[arg-type]


def hidden_states(
    base: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    plan: AttentionPlan,
    routing: RoutingPass | None = None,
) -> Tensor:
    """Last hidden states (b, t, H) of ids (b, t) at their positions (b, t), attending as the plan says.

    The plan travels as a keyword. The 4-D mask is a placeholder: transformers hands a 4-D mask through untouched
    instead of building one of (t, t), and the plan does not read it.
    routing: what the routers of a mixture of experts shall do; it travels as a keyword too (``policy/moe/replay.py``).
    """
    placeholder = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
    extra = {} if routing is None else {ROUTING: routing}
    output = base(
        input_ids=input_ids,
        attention_mask=placeholder,
        position_ids=position_ids,
        use_cache=False,
        attention_plan=plan,
        **extra,
    )
    return output.last_hidden_state


@torch.no_grad()
def probe_packing(policy: CausalPolicy) -> None:
    """Packs two short sequences, changes the first and looks at the second.

    Raises ModelError if the second one's hidden states move, or if they differ from the same sequence
    alone, i.e. if this model cannot be trained packed.
    """
    vocabulary = policy.vocab_size
    ids = torch.arange(12, device=policy.device) % vocabulary
    changed = torch.cat([(ids[:6] + vocabulary // 2) % vocabulary, ids[6:]])
    was_training = policy.model.training
    policy.model.eval()
    try:
        packed, moved, alone = (_probe(policy, x) for x in (ids, changed, ids[6:]))
    except TypeError as error:
        raise ModelError(
            f"{type(policy.model).__name__} takes no packed rows ({error}); use a decoder of the "
            "transformers library that supports attention backends"
        ) from error
    finally:
        policy.model.train(was_training)
    size = float(alone.abs().max()) + 1e-6
    bound = 1e-3 if alone.dtype in (torch.float32, torch.float64) else 5e-2
    for other, what in ((moved, "the content of another packed sequence"), (alone, "being packed at all")):
        error_size = float((packed[-6:] - other[-6:]).abs().max()) / size
        if not error_size < bound:
            raise ModelError(
                f"{type(policy.model).__name__} cannot be trained on packed rows: a sequence's hidden states "
                f"depend on {what} (relative change {error_size:.1e}, at most {bound:.0e} is rounding)"
            )


def _probe(policy: CausalPolicy, ids: Tensor) -> Tensor:
    """Hidden states (t, H) of packed sequences of six tokens."""
    positions = torch.arange(len(ids)) % 6
    plan = plan_to(make_plan([(start, 6) for start in range(0, len(ids), 6)], [], positions), ids.device)
    return hidden_states(policy.base, ids[None], positions[None].to(ids.device), plan)[0]
