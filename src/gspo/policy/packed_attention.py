"""Exact attention over one packed row of prompts and responses, without attention across sequences.

The row holds the prompts and then, in the same order, the responses to each::

    [prompt 0][prompt 1] ... [response 0.0][response 0.1][response 1.0] ...

Prompts and responses are *segments*: each attends causally to itself. Responses also attend to the whole of
their prompt, whose keys are computed once for the group; the two parts are joined by their log-sum-exp
(``kernels.py``). Segments of similar length are computed together in a bucket: right padding is never seen by a
real query of a causal segment, so no mask is built. Segments of equal length that lie side by side are read in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.policy.kernels import BlockRule, backward_block, forward_block
from gspo.policy.native import Native, native_for


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

    def add(self, target: Tensor, value: Tensor) -> None:
        """Adds (n, H, t, ...) to the bucket's places of (S, H, ...); padding adds nothing."""
        value = value.transpose(1, 2)
        if self.span:
            target[self.span[0] : self.span[1]].unflatten(0, self.shape).add_(value)
        elif self.real is None:
            target.index_add_(0, self.rows, value.flatten(0, 1))
        else:
            target.index_add_(0, self.rows[self.real], value.flatten(0, 1)[self.real])

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
class SharedBucket:
    """Several shared prompts of one length, each with the stretch of its responses, computed together."""

    queries: Bucket  # (n, t), one stretch per prompt, padded where the stretches differ
    keys: Bucket  # (n, p), never padded


@dataclass(frozen=True, eq=False)
class Sequences:
    """Segments with what they attend to, a prompt directly before the responses to it."""

    spans: Tensor  # (n, 4) int64: start and length of a segment, start and length of its prompt (0, 0: none)
    groups: Tensor  # (g + 1,) int64: where each prompt with its responses begins


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """How a packed row of S tokens attends; built once, used by every layer."""

    buckets: tuple[Bucket, ...]
    shared: tuple[SharedBucket, ...]
    sequences: Sequences | None  # the same for the compiled kernel; None where a prompt is no segment of its own
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

    def shared_rule(self, part: SharedBucket, scale: float, window: int | None) -> BlockRule:
        if window is None:
            return BlockRule(scale, causal=False)
        queries, keys = (self.positions[bucket.rows].view(bucket.shape) for bucket in (part.queries, part.keys))
        return BlockRule(scale, False, window, queries, keys)


class PackedAttention(torch.autograd.Function):
    """Queries (S, Hq, D), keys (S, Hkv, D), values (S, Hkv, Dv) -> (S, Hq, Dv)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: PackedPlan, scale: float, window: int | None
    ) -> Tensor:
        out, lse = attend(plan, query, key, value, scale, window)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.window = plan, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))
        attend_backward(ctx.plan, grads[0], (query, key, value), out, lse, ctx.scale, ctx.window, (dq, dk, dv))
        return dq, dk, dv, None, None, None


def attend(
    plan: PackedPlan, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output (S, Hq, Dv) and log-sum-exp (S, Hq), float32 (float64 for float64). No autograd."""
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = torch.empty(query.shape[:2], dtype=lse_dtype, device=query.device)
    native = _native(plan, query, key, value, window)
    if native is not None and plan.sequences is not None:
        q, k, v = _by_rows((query, key, value))
        native.attend(q, k, v, plan.sequences.spans, scale, out, lse)
        return out, lse
    for bucket in plan.buckets:
        q, k, v = (bucket.gather(tensor) for tensor in (query, key, value))
        bucket_out, bucket_lse = forward_block(q, k, v, plan.rule(bucket, scale, window))
        bucket.put(out, bucket_out)
        bucket.put(lse, bucket_lse.to(lse_dtype))
    for shared in plan.shared:
        q, k, v = shared.queries.gather(query), shared.keys.gather(key), shared.keys.gather(value)
        block_out, block_lse = forward_block(q, k, v, plan.shared_rule(shared, scale, window))
        _join(out, lse, shared.queries, block_out, block_lse)
    return out, lse


def attend_backward(
    plan: PackedPlan,
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes the gradients of query, key and value (``inputs``), given that of out, to ``into``."""
    native = _native(plan, *inputs, window)
    if native is not None and plan.sequences is not None:
        sequences = plan.sequences
        native.attend_backward(
            grad.contiguous(), _by_rows(inputs), out, lse, sequences.spans, sequences.groups, scale, into
        )
        return
    dq, dk, dv = into
    query, key, value = inputs
    for bucket in plan.buckets:
        q, k, v, o, log_sum = (bucket.gather(tensor) for tensor in (query, key, value, out, lse))
        blocks = backward_block(bucket.gather_grad(grad), q, k, v, o, log_sum, plan.rule(bucket, scale, window))
        for target, block in zip((dq, dk, dv), blocks, strict=True):
            bucket.put(target, block)
    for shared in plan.shared:
        q, o, log_sum = (shared.queries.gather(tensor) for tensor in (query, out, lse))
        k, v = shared.keys.gather(key), shared.keys.gather(value)
        rule = plan.shared_rule(shared, scale, window)
        block_q, *block_kv = backward_block(shared.queries.gather_grad(grad), q, k, v, o, log_sum, rule)
        shared.queries.add(dq, block_q)
        for target, block in zip((dk, dv), block_kv, strict=True):
            shared.keys.add(target, block)


def _native(plan: PackedPlan, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Native | None:
    """The kernels, where they can do this: no window, heads of whole vectors."""
    native = native_for(query)
    if native is None or plan.sequences is None or window is not None:
        return None
    return native if key.shape[-1] == value.shape[-1] and key.shape[-1] % native.lanes == 0 else None


def _by_rows(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(S, H, D) each, so that the heads of a token lie side by side."""
    first, second, third = (t if t.stride()[1:] == (t.shape[2], 1) else t.contiguous() for t in tensors)
    return first, second, third


def _join(out: Tensor, lse: Tensor, bucket: Bucket, block_out: Tensor, block_lse: Tensor) -> None:
    """Joins a second block into out and lse in place."""
    old = bucket.gather(lse)
    joined = torch.logaddexp(old, block_lse.to(old.dtype))
    first, second = torch.exp(old - joined)[..., None], torch.exp(block_lse - joined)[..., None]
    bucket.put(out, torch.addcmul(bucket.gather(out) * first, block_out, second).to(out.dtype))
    bucket.put(lse, joined)


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
    return PackedPlan(tuple(buckets), _shared_buckets(shared), _sequences(used, shared), positions, longest)


def _sequences(used: Sequence[tuple[int, int]], shared: Sequence[SharedPrompt]) -> Sequences | None:
    """used: (length, start) of the segments."""
    lengths = {start: length for length, start in used}
    starts = sorted(lengths)
    prompts: dict[tuple[int, int], list[int]] = {}
    for part in shared:
        inside = starts[bisect_left(starts, part.queries[0]) : bisect_left(starts, part.queries[1])]
        prompts.setdefault(part.keys, []).extend(inside)
    if any(lengths.get(start) != end - start for start, end in prompts):
        return None
    answers = {start for inside in prompts.values() for start in inside}
    responses = {keys[0]: inside for keys, inside in prompts.items()}
    spans, groups = [], [0]
    for start in starts:
        if start in answers:
            continue
        spans.append((start, lengths[start], 0, 0))
        spans += [(answer, lengths[answer], start, lengths[start]) for answer in responses.get(start, ())]
        groups.append(len(spans))
    return Sequences(torch.tensor(spans, dtype=torch.int64).view(-1, 4), torch.tensor(groups))


def _shared_buckets(shared: Sequence[SharedPrompt]) -> tuple[SharedBucket, ...]:
    """Prompts of equal length whose responses take up about as much together."""

    def lengths(part: SharedPrompt) -> tuple[int, int]:
        return part.keys[1] - part.keys[0], part.queries[1] - part.queries[0]

    groups: list[list[SharedPrompt]] = []
    for part in sorted(shared, key=lengths):
        num_keys, num_queries = lengths(part)
        first = lengths(groups[-1][0]) if groups else (0, 0)
        if first[0] == num_keys and num_queries <= 1.25 * first[1] + 8:
            groups[-1].append(part)
        else:
            groups.append([part])
    buckets = []
    for group in groups:
        group.sort(key=lambda part: part.queries)
        queries = _bucket([(part.queries[0], part.queries[1] - part.queries[0]) for part in group])
        keys = _bucket([(part.keys[0], part.keys[1] - part.keys[0]) for part in group])
        buckets.append(SharedBucket(queries, keys))
    return tuple(buckets)


def plan_to(plan: PackedPlan, device: torch.device) -> PackedPlan:
    """The same plan with its indices on another device."""
    if plan.positions.device == device:
        return plan
    buckets = tuple(_bucket_to(bucket, device) for bucket in plan.buckets)
    shared = tuple(SharedBucket(_bucket_to(s.queries, device), _bucket_to(s.keys, device)) for s in plan.shared)
    return replace(plan, buckets=buckets, shared=shared, positions=plan.positions.to(device))


def _bucket_to(bucket: Bucket, device: torch.device) -> Bucket:
    real = None if bucket.real is None else bucket.real.to(device)
    return replace(bucket, rows=bucket.rows.to(device), real=real)


def _bucket(group: list[tuple[int, int]]) -> Bucket:
    """Of (start, length); in the order of their starts, so that neighbours become one stretch."""
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
