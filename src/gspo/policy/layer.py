"""A decoder layer of a known family in a few autograd functions, each the products of one half of the layer.

A layer is ``h + attention(norm(h))`` and then ``h + mlp(norm(h))``. Here the sums with h are part of the last product
of each half and, in the backward pass, of the norm's kernel; queries, keys and values share one buffer; the gate's
activation is never stored. Weights stay where they are, so that saving and loading see the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo.policy.native import Native
from gspo.policy.packed_attention import PackedPlan, attend, attend_backward
from gspo.policy.products import product

#: Rows of a gated MLP that are computed at a time: what passes between its products is never larger than that.
BLOCK_ROWS = 4096
#: Rows from which a half computes the norm that it begins with again and does not keep it: memory counts more there.
NORMED_AGAIN_FROM = 4096


class NormBranch(torch.autograd.Function):
    """x (S, H) -> (norm(x), x): the two ways through a layer, whose gradients are added by the norm's kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, native: Native) -> tuple[Tensor, Tensor]:
        out, inverse = torch.empty_like(x), x.new_empty(len(x))
        native.rms_norm(x, weight, eps, out, inverse)
        ctx.save_for_backward(x, weight, inverse)
        ctx.native = native
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        through, around = (None if grad is None else grad.contiguous() for grad in grads)
        if through is None:
            return around, None, None, None
        x, weight, inverse = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = ctx.native.rms_norm_backward(through, x, weight, inverse, around, grad_x)
        return grad_x, grad_weight, None, None


@dataclass(frozen=True, eq=False)
class Norm:
    """The norm before a half, without its gradients, which are NormBranch's."""

    native: Native
    weight: Tensor  # (H,)
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.native.rms_norm(x, self.weight, self.eps, out, None)
        return out


def norm_again(norm: Norm | None, x: Tensor) -> Norm | None:
    """The norm that gave x, if a half computes x again for its backward pass."""
    return norm if len(x) >= NORMED_AGAIN_FROM else None


@dataclass(frozen=True, eq=False)
class AttentionSetting:
    """What an attention needs besides tensors with gradient."""

    native: Native
    plan: PackedPlan
    tables: tuple[Tensor, Tensor]  # cosines and sines, (S, D)
    head_size: int
    query_eps: float
    key_eps: float
    scale: float
    window: int | None
    norm: Norm | None = None  # that gave x from skip, where it may be computed again


class AttentionHalf(torch.autograd.Function):
    """x, skip (S, H) -> skip + attention of x.

    weights and biases (or None): of queries, keys, values, output; norms: of queries and keys, (D,) or None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor, setting: AttentionSetting, *parameters: Tensor | None) -> Tensor:
        weights, biases, norms = parameters[:4], parameters[4:8], parameters[8:]
        sizes = [len(weight) for weight in weights[:3] if weight is not None]
        joined = torch.cat(weights[:3])  # type: ignore[arg-type]  # one product reads x once
        raw = product(x, joined.t(), base=_joined_bias(biases[:3], sizes, x))
        query, key, value = _heads(raw, sizes, setting.head_size)
        turned, inverses = [], []
        for heads, norm, eps in zip((query, key), norms, (setting.query_eps, setting.key_eps), strict=True):
            out = heads if norm is None else heads.new_empty(heads.shape)
            inverse = None if norm is None else heads.new_empty(heads.shape[:2])
            setting.native.norm_rotate(heads, norm, eps, *setting.tables, out, inverse)
            turned.append(out)
            inverses.append(inverse)
        out, lse = attend(setting.plan, turned[0], turned[1], value, setting.scale, setting.window)
        result = product(out.flatten(1), weights[3].t(), base=skip)  # type: ignore[union-attr]
        if biases[3] is not None:
            result += biases[3]
        kept = (None, None) if norms[0] is None else turned
        ctx.again = norm_again(setting.norm, x)
        given = x if ctx.again is None else skip
        ctx.save_for_backward(given, raw, *kept, *inverses, out, lse, joined, weights[3], *norms)
        ctx.setting, ctx.sizes = setting, sizes
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given, raw, query, key, query_inverse, key_inverse, out, lse, joined, weight, *norms = ctx.saved_tensors
        setting: AttentionSetting = ctx.setting
        grad = grads[0].contiguous()
        before = _heads(raw, ctx.sizes, setting.head_size)
        inputs = (before[0] if query is None else query, before[1] if key is None else key, before[2])
        grad_raw = torch.empty_like(raw)
        into = _heads(grad_raw, ctx.sizes, setting.head_size)
        upstream = product(grad, weight).view(out.shape)
        attend_backward(setting.plan, upstream, inputs, out, lse, setting.scale, setting.window, into)
        grad_norms = [
            setting.native.norm_rotate_backward(heads, source, norm, inverse, *setting.tables, heads)
            for heads, source, norm, inverse in zip(
                into[:2], before[:2], norms, (query_inverse, key_inverse), strict=True
            )
        ]
        need = ctx.needs_input_grad[3:]
        x = given if ctx.again is None else ctx.again(given)
        together = product(grad_raw.t(), x).split(ctx.sizes) if any(need[:3]) else (None,) * 3
        last = product(grad.t(), out.flatten(1)) if need[3] else None
        grad_weights = [g if n else None for g, n in zip((*together, last), need[:4], strict=True)]
        sources = (*grad_raw.split(ctx.sizes, dim=1), grad)
        grad_biases = [g.sum(0) if n else None for g, n in zip(sources, need[4:8], strict=True)]
        grad_x = product(grad_raw, joined)
        return grad_x, grads[0], None, *grad_weights, *grad_biases, *grad_norms


class GatedHalf(torch.autograd.Function):
    """x, skip (S, H) -> skip + down (silu(gate x) * (up x)), in blocks of rows. norm: that gave x from skip."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        skip: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        native: Native,
        norm: Norm | None = None,
    ) -> Tensor:
        size = len(gate)
        projected, result = x.new_empty(len(x), 2 * size), torch.empty_like(skip)
        blocks = row_blocks(len(x))
        room = x.new_empty(blocks[0].stop, size)
        for rows in blocks:
            activated = room[: rows.stop - rows.start]
            native.gated_product(x[rows], gate, up, projected[rows], activated)
            product(activated, down.t(), out=result[rows], base=skip[rows])
        ctx.again = norm_again(norm, x)
        ctx.save_for_backward(x if ctx.again is None else skip, projected, gate, up, down)
        ctx.native, ctx.blocks = native, blocks
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given, projected, gate, up, down = ctx.saved_tensors
        x = given if ctx.again is None else ctx.again(given)
        grad, size = grads[0].contiguous(), len(gate)
        grad_x = torch.empty_like(x)
        need_gate, need_up, need_down = ctx.needs_input_grad[2:5]
        grad_sides_weight = x.new_empty(2 * size, x.shape[1]) if need_gate or need_up else None
        grad_down = torch.empty_like(down) if need_down else None
        most = ctx.blocks[0].stop
        room = [x.new_empty(most, width) for width in (size, 2 * size)]
        for rows in ctx.blocks:
            activated, grad_projected = (buffer[: rows.stop - rows.start] for buffer in room)
            ctx.native.gated_product_backward(grad[rows], down, projected[rows], grad_projected, activated)
            grad_sides = grad_projected.chunk(2, dim=1)
            product(grad_sides[0], gate, out=grad_x[rows])
            product(grad_sides[1], up, out=grad_x[rows], base=grad_x[rows])
            sources = ((grad_sides_weight, grad_projected, x[rows]), (grad_down, grad[rows], activated))
            for into, left, right in sources:
                if into is not None:
                    product(left.t(), right, out=into, base=into if rows.start else None)
        grad_gate, grad_up = (None, None) if grad_sides_weight is None else grad_sides_weight.chunk(2)
        return grad_x, grads[0], grad_gate if need_gate else None, grad_up if need_up else None, grad_down, None, None


def row_blocks(num_rows: int) -> list[slice]:
    """Stretches of about equal length, the first one longest; at least one, perhaps empty."""
    count = max(1, -(-num_rows // BLOCK_ROWS))
    length = max(1, -(-num_rows // count))
    return [slice(start, min(start + length, num_rows)) for start in range(0, max(num_rows, 1), length)]


def plain_linears(modules: Sequence[Any]) -> bool:
    """Whether these are linear layers and nothing else listens to them or takes their place."""
    return all(type(module) is nn.Linear and not is_heard(module) for module in modules)


def is_heard(module: nn.Module) -> bool:
    """Whether a call of the module would run anything but its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def _joined_bias(biases: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Tensor | None:
    """Side by side, 0 where a part has none; None where none has one."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([like.new_zeros(size) if bias is None else bias for bias, size in pairs])


def _heads(projected: Tensor, sizes: Sequence[int], head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(S, sum of sizes) -> queries, keys and values (S, heads, D), in place."""
    query, key, value = (part.unflatten(1, (-1, head_size)) for part in projected.split(list(sizes), dim=1))
    return query, key, value
