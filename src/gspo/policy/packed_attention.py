"""Exact attention over one packed row of prompts and responses, without attention across sequences.

The row holds, for every prompt, the prompt and then its responses::

    [prompt 0][response 0.0][response 0.1][prompt 1][response 1.0] ...

Prompts and responses are *segments*: each attends causally to itself. Responses also attend to the whole of
their prompt, whose keys are computed once for the group; the two parts are joined by their log-sum-exp
(``kernels.py``). Segments of similar length are computed together in a bucket: right padding is never seen by a
real query of a causal segment, so no mask is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.policy.kernels import BlockRule, backward_block, forward_block


@dataclass(frozen=True, eq=False)
class Bucket:
    """Segments of similar length, as a padded (n, t) gather of the packed row."""

    rows: Tensor  # (n * t,) int64 into the packed row; padding repeats the segment's first token
    real: Tensor | None  # indices of rows that are no padding; None: all of them
    shape: tuple[int, int]  # (n, t)
    span: tuple[int, int] | None  # start and end, where the rows are one unpadded stretch

    def gather(self, tensor: Tensor) -> Tensor:
        """(S, H, ...) -> (n, H, t, ...)."""
        part = tensor[self.span[0] : self.span[1]] if self.span else tensor.index_select(0, self.rows)
        return part.unflatten(0, self.shape).transpose(1, 2)

    def put(self, target: Tensor, value: Tensor) -> None:
        """Writes (n, H, t, ...) to the bucket's places of (S, H, ...)."""
        value = value.transpose(1, 2)
        if self.span:
            target[self.span[0] : self.span[1]].unflatten(0, self.shape).copy_(value)
            return
        value = value.flatten(0, 1)
        if self.real is None:
            target.index_copy_(0, self.rows, value)
        else:
            target.index_copy_(0, self.rows[self.real], value[self.real])

    def gather_grad(self, grad: Tensor) -> Tensor:
        """As gather, with zeros on padding: a padded query must give no gradient."""
        if self.real is None:
            return self.gather(grad)
        part = grad.new_zeros(len(self.rows), *grad.shape[1:])
        part.index_copy_(0, self.real, grad.index_select(0, self.rows[self.real]))
        return part.unflatten(0, self.shape).transpose(1, 2)


@dataclass(frozen=True)
class SharedPrompt:
    """The responses of one prompt (one stretch of queries) and the prompt itself (one stretch of keys)."""

    queries: tuple[int, int]
    keys: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """How a packed row of S tokens attends; built once, used by every layer."""

    buckets: tuple[Bucket, ...]
    shared: tuple[SharedPrompt, ...]
    positions: Tensor  # (S,) int64
    longest: int  # largest position + 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """(1, Hq, S, D), (1, Hkv, S, D), (1, Hkv, S, Dv) -> (1, S, Hq, Dv)."""
        if window is not None and window >= self.longest:
            window = None
        token_major = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out: Tensor = PackedAttention.apply(*token_major, self, scale, window)  # type: ignore[no-untyped-call]
        return out[None]

    def rule(self, bucket: Bucket, scale: float, window: int | None) -> BlockRule:
        if window is None:
            return BlockRule(scale, causal=True)
        positions = self.positions[bucket.rows].view(bucket.shape)
        return BlockRule(scale, True, window, positions, positions)

    def shared_rule(self, part: SharedPrompt, scale: float, window: int | None) -> BlockRule:
        if window is None:
            return BlockRule(scale, causal=False)
        queries, keys = self.positions[slice(*part.queries)][None], self.positions[slice(*part.keys)][None]
        return BlockRule(scale, False, window, queries, keys)


class PackedAttention(torch.autograd.Function):
    """Queries (S, Hq, D), keys (S, Hkv, D), values (S, Hkv, Dv) -> (S, Hq, Dv)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: PackedPlan, scale: float, window: int | None
    ) -> Tensor:
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = torch.empty(query.shape[:2], dtype=lse_dtype, device=query.device)
        for bucket in plan.buckets:
            q, k, v = (bucket.gather(tensor) for tensor in (query, key, value))
            bucket_out, bucket_lse = forward_block(q, k, v, plan.rule(bucket, scale, window))
            bucket.put(out, bucket_out)
            bucket.put(lse, bucket_lse.to(lse_dtype))
        for shared in plan.shared:
            block_out, block_lse = forward_block(
                *_stretches(shared, query, key, value), plan.shared_rule(shared, scale, window)
            )
            _join(out, lse, slice(*shared.queries), block_out[0].transpose(0, 1), block_lse[0].transpose(0, 1))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.window = plan, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, out, lse = ctx.saved_tensors
        plan: PackedPlan = ctx.plan
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))
        for bucket in plan.buckets:
            q, k, v, o, log_sum = (bucket.gather(tensor) for tensor in (query, key, value, out, lse))
            rule = plan.rule(bucket, ctx.scale, ctx.window)
            blocks = backward_block(bucket.gather_grad(grad), q, k, v, o, log_sum, rule)
            for target, block in zip((dq, dk, dv), blocks, strict=True):
                bucket.put(target, block)
        for shared in plan.shared:
            queries, keys = slice(*shared.queries), slice(*shared.keys)
            rule = plan.shared_rule(shared, ctx.scale, ctx.window)
            tensors = (*_stretches(shared, query, key, value), _head_major(out[queries]), _head_major(lse[queries]))
            block_q, block_k, block_v = backward_block(_head_major(grad[queries]), *tensors, rule)
            dq[queries] += block_q[0].transpose(0, 1)
            dk[keys] += block_k[0].transpose(0, 1)
            dv[keys] += block_v[0].transpose(0, 1)
        return dq, dk, dv, None, None, None


def _head_major(tensor: Tensor) -> Tensor:
    """(t, H, ...) -> (1, H, t, ...)."""
    return tensor.transpose(0, 1)[None]


def _stretches(shared: SharedPrompt, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = slice(*shared.keys)
    return _head_major(query[slice(*shared.queries)]), _head_major(key[keys]), _head_major(value[keys])


def _join(out: Tensor, lse: Tensor, rows: slice, block_out: Tensor, block_lse: Tensor) -> None:
    """Joins a second block into out and lse in place."""
    old = lse[rows]
    joined = torch.logaddexp(old, block_lse.to(old.dtype))
    out[rows] = (
        out[rows] * torch.exp(old - joined)[..., None] + block_out * torch.exp(block_lse - joined)[..., None]
    ).to(out.dtype)
    lse[rows] = joined


def make_plan(segments: Sequence[tuple[int, int]], shared: Sequence[SharedPrompt], positions: Tensor) -> PackedPlan:
    """The plan of a packed row.

    segments: (start, length) of every prompt and response in the row; those of length 0 are left out.
    positions: (S,) position of every token in its sequence.
    """
    used = sorted((length, start) for start, length in segments if length)
    buckets: list[Bucket] = []
    group: list[tuple[int, int]] = []
    for length, start in used:
        if group and length > 1.25 * group[0][1] + 8:
            buckets.append(_bucket(group))
            group = []
        group.append((start, length))
    if group:
        buckets.append(_bucket(group))
    longest = int(positions.max()) + 1 if positions.numel() else 0
    return PackedPlan(tuple(buckets), tuple(shared), positions, longest)


def plan_to(plan: PackedPlan, device: torch.device) -> PackedPlan:
    """The same plan with its indices on another device."""
    if plan.positions.device == device:
        return plan
    buckets = tuple(
        replace(b, rows=b.rows.to(device), real=None if b.real is None else b.real.to(device)) for b in plan.buckets
    )
    return replace(plan, buckets=buckets, positions=plan.positions.to(device))


def _bucket(group: list[tuple[int, int]]) -> Bucket:
    group = sorted(group)
    starts = torch.tensor([start for start, _ in group])
    lengths = torch.tensor([length for _, length in group])
    width = int(lengths.max())
    offsets = torch.arange(width)
    inside = offsets < lengths[:, None]
    rows = torch.where(inside, starts[:, None] + offsets, starts[:, None]).flatten()
    padded = not bool(inside.all())
    first = int(starts[0])
    stretch = not padded and bool(torch.equal(rows, torch.arange(first, first + len(rows))))
    real = inside.flatten().nonzero()[:, 0] if padded else None
    return Bucket(rows, real, (len(group), width), (first, first + len(rows)) if stretch else None)
