"""One decoding step of a known decoder family in few calls: what remains per layer is four matrix products.

A library forward spends most of a small step outside arithmetic, and a product of a few rows with a weight stored by
outputs runs well below the machine's rate. So for CPU models whose modules ``policy.fused`` has recognised (and probed
against their own forwards), a sampling call first lays the weights out by inputs, queries, keys and values of a layer
in one matrix, gates and ups in another, and then steps through compiled kernels. The weights are a copy that lives as
long as the call. Mixtures keep their own routers, so that routing hooks see every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.experts import Experts, experts_forward
from gspo.policy.fused import attention_forward, attention_window, mlp_forward, norm_eps, norm_forward
from gspo.policy.moe.replay import is_routing_hook
from gspo.policy.native import Native, native_for
from gspo.policy.projection import LogitHead
from gspo.rollout.embedded.slots import SlotCache

#: Decoding steps from which laying out the weights pays for itself.
WORTH_STEPS = 8
#: Rotations that depend on the length of the sequence cannot come from a table.
TABLE_ROTATIONS = ("default", "linear", "llama3", "yarn")


#: Mixtures whose output is the weighted sum of what a router chooses.
MIXTURES = ("Qwen3MoeSparseMoeBlock",)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """The weights of one layer, matrices as (inputs, outputs)."""

    index: int
    input_norm: tuple[Tensor, float]
    projection: Tensor  # (H, (Hq + 2 Hkv) D): queries, keys, values
    projection_bias: Tensor | None
    head_norms: tuple[Tensor, float, Tensor, float] | None
    num_query_heads: int
    window: int | None
    scale: float
    output: Tensor  # (Hq D, H)
    output_bias: Tensor | None
    mlp_norm: tuple[Tensor, float]
    gate_up: Tensor | None  # (H, 2 I); None: `mlp` is called
    down: Tensor | None  # (I, H)
    mlp: Any
    experts: tuple[Tensor, Tensor] | None  # (E, 2 I, H) and (E, H, I), each expert's matrix stored by inputs


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder laid out for steps of one token per row. No autograd."""

    native: Native
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: tuple[Tensor, float]
    tables: tuple[Tensor, Tensor]  # cosine and sine, (positions, D)
    head: LogitHead

    def step(self, token_ids: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Hidden states (n, H) after tokens (n,) of slots 0..n-1 at their positions (n,); the cache gets their keys."""
        hidden = self.embedding.index_select(0, token_ids)
        normed = torch.empty_like(hidden)
        for layer in self.layers:
            self._attention(layer, hidden, normed, positions, cache)
            self._mlp(layer, hidden, normed)
        self.native.rms_norm(hidden, *self.final_norm, normed, None)
        return normed

    def _attention(
        self, layer: DecoderLayer, hidden: Tensor, normed: Tensor, positions: Tensor, cache: SlotCache
    ) -> None:
        self.native.rms_norm(hidden, *layer.input_norm, normed, None)
        projected = _affine(normed, layer.projection, layer.projection_bias)
        attended = hidden.new_empty(len(hidden), layer.output.shape[0])
        keys, values = cache.layer(layer.index)
        self.native.decode_attention(
            projected, layer.head_norms, self.tables, keys, values, positions, layer.num_query_heads, layer.window,
            layer.scale, attended,
        )  # fmt: skip
        hidden.addmm_(attended, layer.output)
        if layer.output_bias is not None:
            hidden += layer.output_bias

    def _mlp(self, layer: DecoderLayer, hidden: Tensor, normed: Tensor) -> None:
        self.native.rms_norm(hidden, *layer.mlp_norm, normed, None)
        if layer.experts is not None:
            _, gates, ids = layer.mlp.gate(normed)
            hidden += Experts.apply(normed, ids, gates, *layer.experts, self.native)  # type: ignore[no-untyped-call]
            return
        if layer.gate_up is None or layer.down is None:
            hidden += layer.mlp(normed[None])[0]
            return
        gate, up = torch.mm(normed, layer.gate_up).chunk(2, dim=1)
        activated = hidden.new_empty(len(hidden), gate.shape[1])
        self.native.swiglu(gate, up, activated)
        hidden.addmm_(activated, layer.down)


def make_decoder(policy: CausalPolicy, num_positions: int, num_steps: int) -> Decoder | None:
    """Lays out the weights as they are now; None where the model's own forward has to be used.

    num_positions: most positions of a sequence. num_steps: decoding steps to come.
    """
    base: Any = policy.base
    native = native_for(policy.head.weight)
    if native is None or num_steps < WORTH_STEPS or not _known(base):
        return None
    positions = torch.arange(num_positions, device=policy.device)[None]
    cosine, sine = base.rotary_emb(base.embed_tokens.weight[:1], positions)
    head = policy.head
    return Decoder(
        native,
        base.embed_tokens.weight.detach(),
        tuple(_layer(layer) for layer in base.layers),
        _norm(base.norm),
        (cosine[0].contiguous(), sine[0].contiguous()),
        replace(head, weight=_by_inputs([head.weight]).t()),
    )


def _known(base: Any) -> bool:
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


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [part.bias for part in parts]
    fused_mlp = _has_forward(mlp, mlp_forward)
    query_norm = getattr(attention, "q_norm", None)
    return DecoderLayer(
        index=int(attention.layer_idx),
        input_norm=_norm(layer.input_layernorm),
        projection=_by_inputs([part.weight for part in parts]),
        projection_bias=None if biases[0] is None else torch.cat(biases).detach(),
        head_norms=None if query_norm is None else (*_norm(query_norm), *_norm(attention.k_norm)),
        num_query_heads=attention.q_proj.out_features // attention.head_dim,
        window=attention_window(attention),
        scale=float(attention.scaling),
        output=_by_inputs([attention.o_proj.weight]),
        output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_by_inputs([mlp.gate_proj.weight, mlp.up_proj.weight]) if fused_mlp else None,
        down=_by_inputs([mlp.down_proj.weight]) if fused_mlp else None,
        mlp=mlp,
        experts=_experts(mlp),
    )


def _experts(mlp: Any) -> tuple[Tensor, Tensor] | None:
    """Of a mixture that is a router and its experts, nothing else; other mixtures are called as they are."""
    if type(mlp).__name__ not in MIXTURES or not _has_forward(mlp.experts, experts_forward):
        return None
    if _foreign_hooks(mlp) or _foreign_hooks(mlp.experts):
        return None
    gate_up, down = mlp.experts.gate_up_proj.detach(), mlp.experts.down_proj.detach()
    if gate_up.dtype != mlp.gate.weight.dtype:
        return None
    return gate_up.mT.contiguous().mT, down.mT.contiguous().mT


def _by_inputs(weights: list[Tensor]) -> Tensor:
    """Weights (outputs, inputs) side by side as one contiguous (inputs, outputs)."""
    result = weights[0].new_empty(weights[0].shape[1], sum(len(weight) for weight in weights))
    start = 0
    for weight in weights:
        result[:, start : start + len(weight)] = weight.detach().t()
        start += len(weight)
    return result


def _norm(norm: Any) -> tuple[Tensor, float]:
    return norm.weight.detach(), norm_eps(norm)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
