"""Norms, rotations and gates of known decoder families through the compiled kernels, forward and backward.

``fuse_modules`` replaces the forward of modules that it knows by name, and only after the module's own forward has
given the same numbers on a probe. Parameters, submodules and hooks stay what they are, so that saving, routing hooks
and adapters see the same model. What the kernels cannot do (another device or dtype, a call without a plan) goes to the
module's own forward.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gspo.policy.experts import experts_forward
from gspo.policy.layer import (
    AttentionHalf,
    AttentionSetting,
    GatedHalf,
    Norm,
    NormBranch,
    is_heard,
    plain_linears,
)
from gspo.policy.native import Native, native_for
from gspo.policy.packed_attention import PackedPlan, make_plan

#: Families whose modules compute exactly what the forwards below compute.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Mixtral")
NORMS = frozenset(f"{family}RMSNorm" for family in FAMILIES)
GATED_MLPS = frozenset(f"{family}MLP" for family in FAMILIES)
EXPERTS = frozenset(f"{family}Experts" for family in FAMILIES)
ATTENTIONS = frozenset(f"{family}Attention" for family in FAMILIES)
LAYERS = frozenset(f"{family}DecoderLayer" for family in FAMILIES)
#: MLPs that are a router and experts, and nothing else.
SPARSE_MLPS = frozenset(("Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock"))
#: Largest relative difference from the module's own forward: rounding, several times over. Norms of the library round
#: to float32 inside whatever the dtype, so the bound is the same for float64.
PROBE_BOUND = 1e-5


class RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, native: Native) -> Tensor:
        x = x.contiguous()
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
        native.rms_norm(x, weight, eps, out, inverse)
        ctx.save_for_backward(x, weight, inverse)
        ctx.native = native
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = ctx.native.rms_norm_backward(grads[0].contiguous(), x, weight, inverse, None, grad_x)
        return grad_x, grad_weight, None, None


class NormRotate(torch.autograd.Function):
    """Heads (S, heads, D), normed if there is a weight (D,), then rotated by tables (S, D)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cosine: Tensor, sine: Tensor, native: Native
    ) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        inverse = None if weight is None else x.new_empty(x.shape[:-1])
        native.norm_rotate(x, weight, eps, cosine, sine, out, inverse)
        ctx.save_for_backward(None if weight is None else x, weight, inverse, cosine, sine)
        ctx.native = native
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse, cosine, sine = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = torch.empty_like(grad)
        grad_weight = ctx.native.norm_rotate_backward(grad, x, weight, inverse, cosine, sine, grad_x)
        return grad_x, grad_weight, None, None, None, None


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up, elementwise; what the backward pass needs besides its inputs is recomputed."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, native: Native) -> Tensor:
        shape = gate.shape
        gate, up = gate.contiguous().view(-1, shape[-1]), up.contiguous().view(-1, shape[-1])
        out = torch.empty_like(gate)
        native.swiglu(gate, up, out)
        ctx.save_for_backward(gate, up)
        ctx.native, ctx.shape = native, shape
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        ctx.native.swiglu_backward(grads[0].contiguous(), gate, up, grad_gate, grad_up, None)
        return grad_gate.view(ctx.shape), grad_up.view(ctx.shape), None


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    native = native_for(hidden_states)
    if native is None or hidden_states.dtype != self.weight.dtype:
        return type(self).forward(self, hidden_states)
    out: Tensor = RmsNorm.apply(hidden_states, self.weight, norm_eps(self), native)  # type: ignore[no-untyped-call]
    return out


def mlp_forward(self: Any, x: Tensor, skip: Tensor | None = None, norm: Norm | None = None) -> Tensor:
    """skip, where given, is added: the other way through the layer. norm: that gave x from skip."""
    native = native_for(x)
    linears = (self.gate_proj, self.up_proj, self.down_proj)
    plain = plain_linears(linears) and all(m.bias is None and _alike(x, m.weight) for m in linears)
    if native is not None and skip is not None and plain:
        weights = (module.weight for module in linears)
        half: Tensor = GatedHalf.apply(*_rows(x, skip), *weights, native, norm)  # type: ignore[no-untyped-call]
        return half.view(skip.shape)
    if native is None:
        out = type(self).forward(self, x)
    else:
        out = self.down_proj(SwiGlu.apply(self.gate_proj(x), self.up_proj(x), native))  # type: ignore[no-untyped-call]
    return out if skip is None else skip + out  # type: ignore[no-any-return]


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    attention_plan: Any = None,
    skip: Tensor | None = None,
    norm: Norm | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """skip, where given, is added: the other way through the layer. norm: that gave hidden_states from skip."""
    native = native_for(hidden_states)
    if attention_plan is None or native is None or position_embeddings is None:
        extra = {} if attention_plan is None else {"attention_plan": attention_plan}
        out, weights = type(self).forward(
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **extra,
            **kwargs,
        )
        return (out if skip is None else skip + out), weights
    batch, length, _ = hidden_states.shape
    tables = [table.expand(batch, -1, -1).reshape(batch * length, -1).contiguous() for table in position_embeddings]
    if skip is not None and isinstance(attention_plan, PackedPlan) and batch == 1:
        linears = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        norms = (getattr(self, "q_norm", None), getattr(self, "k_norm", None))
        if plain_linears(linears) and not any(is_heard(norm) for norm in norms if norm is not None):
            half = _attention_half(self, hidden_states, skip, norm, linears, norms, tables, attention_plan, native)
            return half, None

    def heads(projected: Tensor) -> Tensor:
        return projected.view(batch * length, -1, self.head_dim)

    def rotated(projected: Tensor, norm: Any) -> Tensor:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm_eps(norm))
        out: Tensor = NormRotate.apply(heads(projected), weight, eps, *tables, native)  # type: ignore[no-untyped-call]
        return out

    query = rotated(self.q_proj(hidden_states), getattr(self, "q_norm", None))
    key = rotated(self.k_proj(hidden_states), getattr(self, "k_norm", None))
    value = heads(self.v_proj(hidden_states))
    by_head = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (query, key, value))
    attended = attention_plan.attend(int(self.layer_idx), *by_head, float(self.scaling), attention_window(self))
    out = self.o_proj(attended.reshape(batch, length, -1))
    return (out if skip is None else skip + out), None


def _attention_half(
    self: Any,
    hidden_states: Tensor,
    skip: Tensor,
    norm: Norm | None,
    linears: tuple[Any, ...],
    norms: tuple[Any, Any],
    tables: list[Tensor],
    plan: PackedPlan,
    native: Native,
) -> Tensor:
    window = attention_window(self)
    query_eps, key_eps = (0.0 if norm is None else norm_eps(norm) for norm in norms)
    setting = AttentionSetting(
        native,
        plan,
        (tables[0], tables[1]),
        int(self.head_dim),
        query_eps,
        key_eps,
        float(self.scaling),
        None if window is not None and window >= plan.longest else window,
        norm,
    )
    parameters = (
        *(module.weight for module in linears),
        *(module.bias for module in linears),
        *(None if norm is None else norm.weight for norm in norms),
    )
    out: Tensor = AttentionHalf.apply(*_rows(hidden_states, skip), setting, *parameters)  # type: ignore[no-untyped-call]
    return out.view(skip.shape)


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A decoder layer whose two sums are part of its halves, where a plan says how to attend."""
    if args or kwargs.get("attention_plan") is None or native_for(hidden_states) is None or not _has_halves(self):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    x, skip, norm = _branch(self.input_layernorm, hidden_states)
    hidden_states, _ = self.self_attn(hidden_states=x, skip=skip, norm=norm, **kwargs)
    x, skip, norm = _branch(self.post_attention_layernorm, hidden_states)
    if type(self.mlp).__name__ not in SPARSE_MLPS:
        return self.mlp(x, skip=skip, norm=norm)
    if is_heard(self.mlp) or "forward" in self.mlp.__dict__:
        return skip + self.mlp(x)
    x, around = _rows(x, skip)
    _, gates, ids = self.mlp.gate(x)
    return self.mlp.experts(x, ids, gates, skip=around).view(skip.shape)


def _has_halves(layer: Any) -> bool:
    """Whether attention and MLP take a ``skip``: nobody has put something else in their place since."""
    halves: list[tuple[Any, Any]] = [(layer.self_attn, attention_forward)]
    if type(layer.mlp).__name__ in SPARSE_MLPS:
        halves.append((layer.mlp.experts, experts_forward))
    else:
        halves.append((layer.mlp, mlp_forward))
    return all(getattr(module.forward, "__func__", None) is forward for module, forward in halves)


def _branch(norm: Any, x: Tensor) -> tuple[Tensor, Tensor, Norm | None]:
    """The norm of x, and x; and how to compute the first again, where that is known."""
    native = native_for(x)
    known = getattr(norm.forward, "__func__", None) is norm_forward and not is_heard(norm)
    if native is None or not known or x.dtype != norm.weight.dtype:
        return norm(x), x, None
    (rows,) = _rows(x)
    again = Norm(native, norm.weight, norm_eps(norm))
    normed, around = NormBranch.apply(rows, again.weight, again.eps, native)  # type: ignore[no-untyped-call]
    return normed.view(x.shape), around.view(x.shape), again


def _alike(x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel may read both: of one dtype, the weight without gaps."""
    return x.dtype == weight.dtype and weight.is_contiguous()


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(..., H) -> (S, H), contiguous."""
    return tuple(tensor.reshape(-1, tensor.shape[-1]).contiguous() for tensor in tensors)


def attention_window(module: Any) -> int | None:
    """Keys that a query of this layer sees; None: all before it. Some families say it per layer, some in the config."""
    owner = module if hasattr(module, "sliding_window") else module.config
    window = getattr(owner, "sliding_window", None)
    return None if window is None else int(window)


def norm_eps(norm: Any) -> float:
    return float(norm.variance_epsilon)


def fuse_modules(model: nn.Module) -> int:
    """Replaces the forwards of the known modules of a model; returns how many."""
    first = next(model.parameters())
    if native_for(first) is None:
        return 0
    rotary = getattr(getattr(model, "base_model", model), "rotary_emb", None)
    count = 0
    for module in sorted(
        model.modules(), key=lambda module: type(module).__name__ in LAYERS
    ):  # layers after their parts
        name = type(module).__name__
        if name in NORMS and _same(module, norm_forward):
            module.forward = MethodType(norm_forward, module)
        elif name in GATED_MLPS and _is_silu(module) and _same(module, mlp_forward):
            module.forward = MethodType(mlp_forward, module)
        elif name in EXPERTS and _is_silu(module) and _same_experts(module):
            module.forward = MethodType(experts_forward, module)
        elif name in ATTENTIONS and rotary is not None and _same_attention(module, rotary):
            module.forward = MethodType(attention_forward, module)
        elif name in LAYERS and rotary is not None and _has_known_parts(module) and _same_layer(module, rotary):
            module.forward = MethodType(layer_forward, module)
        else:
            continue
        count += 1
    return count


def _is_silu(module: Any) -> bool:
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


@torch.no_grad()
def _same(module: Any, forward: Any) -> bool:
    weight = module.weight if hasattr(module, "weight") else module.gate_proj.weight
    x = _probe(1, 3, weight.shape[-1], dtype=weight.dtype)
    return _close(forward(module, x), type(module).forward(module, x))


@torch.no_grad()
def _same_experts(module: Any) -> bool:
    """Compares on as many tokens as there are experts, two experts each."""
    num_experts, double, size = module.gate_up_proj.shape
    if module.down_proj.shape != (num_experts, size, double // 2):
        return False
    x = _probe(num_experts, size, dtype=module.gate_up_proj.dtype)
    first = torch.arange(num_experts)
    ids = torch.stack([first, (first + 1) % num_experts], dim=1)
    gates = _probe(num_experts, 2, dtype=x.dtype)
    return _close(experts_forward(module, x, ids, gates), type(module).forward(module, x, ids, gates))


@torch.no_grad()
def _same_attention(module: Any, rotary: Any) -> bool:
    """Compares on two short packed sequences. Norms of heads must be over the head's own entries."""
    norms = [norm for norm in (getattr(module, "q_norm", None), getattr(module, "k_norm", None)) if norm is not None]
    if any(type(norm).__name__ not in NORMS or len(norm.weight) != module.head_dim for norm in norms):
        return False
    weight = module.q_proj.weight
    x = _probe(1, 6, weight.shape[1], dtype=weight.dtype)
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    tables = rotary(x, positions[None])
    if tables[0].shape[-1] != module.head_dim or module.head_dim % 2:
        return False
    plans = [_Watched(make_plan([(0, 3), (3, 3)], [], positions)) for _ in range(2)]
    ours, _ = attention_forward(module, x, tables, None, attention_plan=plans[0])
    theirs, _ = type(module).forward(
        module, x, position_embeddings=tables, attention_mask=None, attention_plan=plans[1]
    )
    return plans[0].seen == plans[1].seen and _close(ours, theirs)


def _has_known_parts(layer: Any) -> bool:
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    return all(hasattr(layer, name) for name in names) and _has_halves(layer)


@torch.no_grad()
def _same_layer(layer: Any, rotary: Any) -> bool:
    weight = layer.input_layernorm.weight
    x = _probe(1, 6, len(weight), dtype=weight.dtype)
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    tables = rotary(x, positions[None])
    keywords = {"position_embeddings": tables, "attention_plan": make_plan([(0, 3), (3, 3)], [], positions)}
    return _close(layer_forward(layer, x, **keywords), type(layer).forward(layer, x, **keywords))


class _Watched:
    """A plan that notes what it was asked for besides tensors: a window is longer than any probe."""

    def __init__(self, plan: PackedPlan) -> None:
        self.plan = plan
        self.seen: list[tuple[int, float, int | None]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.seen.append((layer, scale, window))
        return self.plan.attend(layer, query, key, value, scale, window)


def _probe(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of both signs and several sizes, without touching a random stream."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (torch.sin(index * 1.7) * (1 + index % 5)).view(shape).to(dtype)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= PROBE_BOUND * (float(theirs.abs().max()) + 1e-6)
