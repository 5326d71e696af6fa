"""Which routers are understood: where they sit, how they choose, and by what rule they make gates of their logits.

Every router of transformers here returns (logits (S, E), gates (S, K), expert ids (S, K)). A family only has to say how
gates follow from logits for GIVEN ids. A model with one more family needs one more line in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gspo.errors import ModelError

#: (router, logits (S, E), ids (S, K)) -> (S, K)
GateRule = Callable[[Any, Tensor, Tensor], Tensor]
#: (router, logits (S, E)) -> (S, E)
Scores = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class RouterFamily:
    """One kind of router."""

    path: str  # of the router inside a decoder layer
    gates: GateRule  # the model's own rule, for given ids
    selection: Scores  # the K largest of these are chosen
    log_scores: Scores  # logarithm of what an expert is weighed by before anything is normalised


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _softmax_gates(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Softmax over all experts, then the chosen ones, made to sum to 1 where the config says so (Mixtral: always)."""
    chosen = torch.softmax(logits, dim=-1, dtype=_precise(logits)).gather(1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else chosen


def _softmax_of_chosen(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Softmax over the chosen experts' logits."""
    return torch.softmax(logits.gather(1, ids), dim=1, dtype=logits.dtype)


def _sigmoid_gates(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Sigmoid of the chosen logits, made to sum to 1 where the config says so, times a constant."""
    chosen = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * router.routed_scaling_factor


def _logits(router: Any, logits: Tensor) -> Tensor:
    return logits


def _biased_in_best_groups(router: Any, logits: Tensor) -> Tensor:
    """Sigmoid plus the balancing bias, -inf outside the groups with the largest sum of their two best experts."""
    scores = logits.sigmoid() + router.e_score_correction_bias
    grouped = scores.unflatten(-1, (router.num_group, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(router.topk_group, dim=-1).indices
    inside = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
    return grouped.masked_fill(~inside[..., None], -torch.inf).flatten(1)


def _log_softmax(router: Any, logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=_precise(logits))


def _log_sigmoid(router: Any, logits: Tensor) -> Tensor:
    return nn.functional.logsigmoid(logits)


_SOFTMAX: Final = RouterFamily("mlp.gate", _softmax_gates, _logits, _log_softmax)
_SIGMOID: Final = RouterFamily("mlp.gate", _sigmoid_gates, _biased_in_best_groups, _log_sigmoid)

#: By the class name of the router.
FAMILIES: Final[Mapping[str, RouterFamily]] = MappingProxyType(
    {
        "Qwen3MoeTopKRouter": _SOFTMAX,
        "Qwen2MoeTopKRouter": _SOFTMAX,
        "OlmoeTopKRouter": _SOFTMAX,
        "FlexOlmoTopKRouter": _SOFTMAX,
        "MixtralTopKRouter": _SOFTMAX,
        "DeepseekV3TopkRouter": _SIGMOID,
        "Glm4MoeTopkRouter": _SIGMOID,
        "Dots1TopkRouter": _SIGMOID,
        "GptOssTopKRouter": RouterFamily("mlp.router", _softmax_of_chosen, _logits, _log_softmax),
    }
)
_PATHS: Final = tuple(dict.fromkeys(family.path for family in FAMILIES.values()))


@dataclass(frozen=True, eq=False)
class Router:
    """One router of a model."""

    module: Any
    attention: nn.Module  # of the same decoder layer; it runs before the router
    layer: int  # index of the decoder layer
    family: RouterFamily


def find_routers(base: nn.Module) -> list[Router]:
    """The routers of a decoder in the order of its layers; empty for a dense model.

    Raises:
        ModelError: a mixture of experts whose routers are of no known family.
    """
    layers: Any = getattr(base, "layers", ())
    found = [router for index, layer in enumerate(layers) if (router := _router_of(index, layer)) is not None]
    if not found and has_experts(base):
        known = ", ".join(sorted(name.partition("Top")[0] for name in FAMILIES))
        raise ModelError(
            f"the routers of {type(base).__name__} are not understood, so its routing cannot be recorded or replayed; "
            f'known are {known}. Set moe.replay = "none" and moe.metrics = "none"'
        )
    return found


def has_experts(base: nn.Module) -> bool:
    """Whether a model is a mixture of experts."""
    return any(hasattr(m, "gate_up_proj") and hasattr(m, "num_experts") for m in base.modules())


def understands(base: nn.Module) -> bool:
    """Whether a model has routers, and all of them are of a known family."""
    try:
        return bool(find_routers(base))
    except ModelError:
        return False


def _router_of(index: int, layer: nn.Module) -> Router | None:
    for path in _PATHS:
        module: Any = layer
        for name in path.split("."):
            module = getattr(module, name, None)
        family = FAMILIES.get(type(module).__name__)
        if family is not None and family.path == path:
            return Router(module, layer.self_attn, index, family)  # type: ignore[arg-type]
    return None
