"""Which models the compiled decoding step knows, and their weights packed for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.experts import experts_forward
from gspo.policy.fused import attention_forward, attention_window, mlp_forward, norm_eps, norm_forward
from gspo.policy.moe.replay import is_routing_hook
from gspo.rollout.embedded.library import FOREIGN, GATED, MIXTURE, Layer, Library, Weight, room

#: Rotations that depend on the length of the sequence cannot come from a table.
TABLE_ROTATIONS = ("default", "linear", "llama3", "yarn")
#: Mixtures that are the weighted sum of what a router chooses, with the router: softmax over all experts, the K
#: largest, and with ``norm_topk_prob`` divided by their sum.
MIXTURES = {"Qwen3MoeSparseMoeBlock": "Qwen3MoeTopKRouter"}


@dataclass(frozen=True, eq=False)
class Layout:
    """Packed weights of a decoder as they were when it was made."""

    layers: ctypes.Array[Layer]
    head: Weight
    kept: list[Tensor]  # everything that the structures point to
    mlps: list[Any]  # by layer, the module of a FOREIGN layer

    def most(self, *names: str) -> int:
        """Largest product of these numbers of a layer, where a name is a field or the width of a weight."""
        return max(_product(layer, names) for layer in self.layers)


def _product(layer: Layer, names: tuple[str, ...]) -> int:
    result = 1
    for name in names:
        value = getattr(layer, name)
        result *= value.width if isinstance(value, Weight) else value
    return int(result)


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A weight to be packed: parts (outputs, inputs) one below the other, or gates with ups."""

    weight: Weight
    parts: tuple[Tensor, ...]
    ups: Tensor | None = None


def is_known(base: Any) -> bool:
    """Whether every module that a step bypasses is one that was recognised, and nobody listens to it."""
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or type(getattr(base, "embed_tokens", None)) is not nn.Embedding:
        return False
    if getattr(getattr(base, "rotary_emb", None), "rope_type", None) not in TABLE_ROTATIONS:
        return False
    norms = [getattr(base, "norm", None)]
    bypassed: list[Any] = [base, base.embed_tokens]
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        mlp: Any = getattr(layer, "mlp", None)
        if not _has_forward(attention, attention_forward) or mlp is None:
            return False
        norms += [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        if _has_forward(mlp, mlp_forward):
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            if any(linear.bias is not None for linear in linears[4:]):
                return False
            bypassed.append(mlp)
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
        bypassed += [layer, attention, *linears]
    if not all(_has_forward(norm, norm_forward) for norm in norms):
        return False
    return not any(_foreign_hooks(module) for module in (*bypassed, *norms))


def _foreign_hooks(module: Any) -> bool:
    """Hooks other than those of routing, to which the engine hands the routes itself."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(is_routing_hook(hook) for hook in hooks)


def _has_forward(module: Any, function: Any) -> bool:
    return getattr(getattr(module, "forward", None), "__func__", None) is function


def _kind(mlp: Any) -> int:
    if _has_forward(mlp, mlp_forward):
        return GATED
    router = getattr(mlp, "gate", None)
    if router is None or MIXTURES.get(type(mlp).__name__) != type(router).__name__:
        return FOREIGN
    if not _has_forward(mlp.experts, experts_forward):
        return FOREIGN
    if "forward" in vars(router) or any(_foreign_hooks(module) for module in (mlp, router, mlp.experts)):
        return FOREIGN
    weights = (router.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj)
    return MIXTURE if len({weight.dtype for weight in weights}) == 1 else FOREIGN


def lay_out(policy: CausalPolicy, library: Library) -> Layout:
    """Packs the weights as they are now, in the order in which a step reads them."""
    base: Any = policy.base
    kinds = [_kind(layer.mlp) for layer in base.layers]
    if FOREIGN in kinds:  # then routes are recorded by the routers' own hooks, and by all of them
        kinds = [FOREIGN if kind == MIXTURE else kind for kind in kinds]
    layers, kept = (Layer * len(kinds))(), []
    matrices: list[_Matrix] = []
    for target, layer, kind in zip(layers, base.layers, kinds, strict=True):
        kept += _attention(target, layer, matrices)
        target.kind = kind
        if kind == GATED:
            _gated(target, layer.mlp, matrices)
        elif kind == MIXTURE:
            _mixture(target, layer.mlp, matrices)
    head = Weight()
    bias = policy.head.bias
    matrices.append(_matrix(head, (policy.head.weight.detach(),)))
    if bias is not None:
        kept.append(bias.detach().to(library.dtype).contiguous())
        head.bias = kept[-1].data_ptr()
    kept.append(_pack(matrices, library))
    return Layout(layers, head, kept, [layer.mlp for layer in base.layers])


def _attention(target: Layer, layer: Any, matrices: list[_Matrix]) -> list[Tensor]:
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    kept = []

    def at(tensor: Tensor) -> int:
        kept.append(tensor.detach().contiguous())
        return kept[-1].data_ptr()

    matrices.append(_matrix(target.projection, tuple(part.weight.detach() for part in parts)))
    matrices.append(_matrix(target.output, (attention.o_proj.weight.detach(),)))
    if attention.q_proj.bias is not None:
        target.projection.bias = at(torch.cat([part.bias for part in parts]))
    if attention.o_proj.bias is not None:
        target.output.bias = at(attention.o_proj.bias)
    target.input_norm, target.input_eps = at(layer.input_layernorm.weight), norm_eps(layer.input_layernorm)
    target.mlp_norm, target.mlp_eps = (
        at(layer.post_attention_layernorm.weight),
        norm_eps(layer.post_attention_layernorm),
    )
    if getattr(attention, "q_norm", None) is not None:
        target.query_norm, target.query_eps = at(attention.q_norm.weight), norm_eps(attention.q_norm)
        target.key_norm, target.key_eps = at(attention.k_norm.weight), norm_eps(attention.k_norm)
    target.scale, target.window = float(attention.scaling), attention_window(attention) or 0
    return kept


def _gated(target: Layer, mlp: Any, matrices: list[_Matrix]) -> None:
    gate, up, down = (part.weight.detach() for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    matrices.append(_matrix(target.gate_up, (gate,), up))
    matrices.append(_matrix(target.down, (down,)))


def _mixture(target: Layer, mlp: Any, matrices: list[_Matrix]) -> None:
    gate_up, down = mlp.experts.gate_up_proj.detach(), mlp.experts.down_proj.detach()
    target.experts, target.choices = len(gate_up), int(mlp.gate.top_k)
    target.normalised = bool(mlp.gate.norm_topk_prob)
    matrices.append(_matrix(target.router, (mlp.gate.weight.detach(),)))
    for expert, both in enumerate(gate_up):
        gate, up = both.chunk(2)
        matrices.append(_matrix(target.gate_up if expert == 0 else Weight(), (gate,), up))
    for expert, weight in enumerate(down):
        matrices.append(_matrix(target.down if expert == 0 else Weight(), (weight,)))


def _matrix(weight: Weight, parts: tuple[Tensor, ...], ups: Tensor | None = None) -> _Matrix:
    weight.depth, weight.width = parts[0].shape[1], sum(len(part) for part in parts)
    return _Matrix(weight, parts, ups)


def _pack(matrices: list[_Matrix], library: Library) -> Tensor:
    """One buffer with all panels; fills in where each weight begins."""
    sizes = [library.panel_numbers(m.weight.width, m.weight.depth, m.ups is not None) for m in matrices]
    memory = room(sum(sizes), library.dtype)
    for matrix, target in zip(matrices, memory.split(sizes), strict=True):
        matrix.weight.panels = target.data_ptr()
        for part, place in _places(matrix, target, library):
            library.pack(part.to(library.dtype), matrix.ups, place)
    return memory


def _places(matrix: _Matrix, target: Tensor, library: Library) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a matrix with their panels; parts that do not fill whole panels are joined first."""
    parts = matrix.parts
    if any(len(part) % library.panel for part in parts[:-1]):
        parts = (torch.cat(parts),)
    start = 0
    for part in parts:
        size = library.panel_numbers(len(part), part.shape[1], matrix.ups is not None)
        yield part, target[start : start + size]
        start += size
