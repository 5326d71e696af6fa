"""Attention of one block of queries over one block of keys, with the log-sum-exp that joins blocks.

A query that attends to several blocks (its prompt, its own response) is computed block by block. With the
output ``o_b`` and log-sum-exp ``l_b`` of each block, ``l = logsumexp_b l_b`` and ``o = sum_b exp(l_b - l) o_b``.
The backward pass of a block needs only the joined ``o`` and ``l``: the weight of key j is
``exp(q k_j - l)``, and ``d s_j = p_j (do v_j - do o)`` (the identity behind flash attention,
arXiv 2205.14135 section 3, read with a global l).

Shapes: queries (n, Hq, t, D), keys (n, Hkv, L, D), values (n, Hkv, L, Dv), outputs (n, Hq, t, Dv), log-sum-exp
(n, Hq, t) float32 (float64 for float64). Hq is a multiple of Hkv; query head h reads key head h // (Hq / Hkv).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Numbers that one block of dense scores may hold.
DENSE_SCORES = 1 << 24


@dataclass(frozen=True)
class BlockRule:
    """Which keys a query sees. ``positions`` are needed for a window only."""

    scale: float
    causal: bool  # query i sees keys 0..i of its own block
    window: int | None = None  # and none that is `window` or more positions behind it
    query_positions: Tensor | None = None  # (n, t) int64
    key_positions: Tensor | None = None  # (n, L) int64


def forward_block(query: Tensor, key: Tensor, value: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    """Output (n, Hq, t, Dv) and log-sum-exp (n, Hq, t) of one block. No autograd."""
    if not _flash_on_cpu(query, key, value, rule):
        return _dense_forward(query, key, value, rule)
    outputs, lses = [], []
    for heads in _heads_of_a_key(query, key):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, heads], key, value, 0.0, rule.causal, scale=rule.scale
        )
        outputs.append(out)
        lses.append(lse)
    if len(outputs) == 1:
        return outputs[0], lses[0]
    return _interleave(outputs), _interleave(lses)


def backward_block(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rule: BlockRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given the JOINED output and log-sum-exp of all blocks."""
    if not _flash_on_cpu(query, key, value, rule):
        return _dense_backward(grad, query, key, value, out, lse, rule)
    grad_queries: list[Tensor] = []
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    for heads in _heads_of_a_key(query, key):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, heads],
            query[:, heads],
            key,
            value,
            out[:, heads],
            lse[:, heads],
            0.0,
            rule.causal,
            scale=rule.scale,
        )
        grad_queries.append(dq)
        grad_key = dk if grad_key is None else grad_key.add_(dk)
        grad_value = dv if grad_value is None else grad_value.add_(dv)
    assert grad_key is not None
    assert grad_value is not None
    return grad_queries[0] if len(grad_queries) == 1 else _interleave(grad_queries), grad_key, grad_value


def _flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, rule: BlockRule) -> bool:
    return query.device.type == "cpu" and rule.window is None and key.shape[-1] == value.shape[-1]


def _heads_of_a_key(query: Tensor, key: Tensor) -> list[slice]:
    """Slices of query heads, each with exactly one query head per key head: no key is ever repeated in memory."""
    repeats = query.shape[1] // key.shape[1]
    return [slice(r, None, repeats) for r in range(repeats)]


def _interleave(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts, dim=2).flatten(1, 2)


def _dense_forward(query: Tensor, key: Tensor, value: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    lse = torch.empty(query.shape[:3], dtype=_score_dtype(query), device=query.device)
    for rows in _query_blocks(query, key):
        scores = _scores(query, key, rule, rows)
        part = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - _finite(part)[..., None])
        out[:, :, rows] = torch.matmul(weights.to(value.dtype), value[:, :, None]).flatten(1, 2)
        lse[:, :, rows] = part.flatten(1, 2)
    return out, lse


def _dense_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rule: BlockRule
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query = torch.empty_like(query)
    grad_key = torch.zeros(key.shape, dtype=_score_dtype(key), device=key.device)
    grad_value = torch.zeros(value.shape, dtype=_score_dtype(value), device=value.device)
    for rows in _query_blocks(query, key):
        scores = _scores(query, key, rule, rows)
        weights = torch.exp(scores - _finite(_by_key_head(lse[:, :, rows], key))[..., None])
        do = _by_key_head(grad[:, :, rows], key).to(weights.dtype)
        delta = (do * _by_key_head(out[:, :, rows], key)).sum(-1, keepdim=True)
        dscores = weights * (torch.matmul(do, value[:, :, None].transpose(-1, -2).to(weights.dtype)) - delta)
        dscores = dscores * rule.scale
        grad_query[:, :, rows] = torch.matmul(dscores, key[:, :, None].to(dscores.dtype)).flatten(1, 2).to(query.dtype)
        queries = _by_key_head(query[:, :, rows], key).to(dscores.dtype)
        grad_key += torch.matmul(dscores.transpose(-1, -2), queries).sum(2)
        grad_value += torch.matmul(weights.transpose(-1, -2), do).sum(2)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, rule: BlockRule, rows: slice) -> Tensor:
    """(n, Hkv, Hq / Hkv, rows, L), -inf where a query does not see a key."""
    queries = _by_key_head(query[:, :, rows], key)
    scores = torch.matmul(queries, key[:, :, None].transpose(-1, -2)).to(_score_dtype(query)) * rule.scale
    hidden = _hidden(query, key, rule, rows)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _hidden(query: Tensor, key: Tensor, rule: BlockRule, rows: slice) -> Tensor | None:
    """(n or 1, 1, 1, rows, L) bool: keys that a query does not see."""
    hidden: Tensor | None = None
    if rule.causal:
        index = torch.arange(query.shape[2], device=query.device)[rows]
        hidden = (torch.arange(key.shape[2], device=key.device) > index[:, None])[None, None, None]
    if rule.window is not None:
        assert rule.query_positions is not None
        assert rule.key_positions is not None
        distance = rule.query_positions[:, rows, None] - rule.key_positions[:, None, :]
        far = (distance >= rule.window)[:, None, None]
        hidden = far if hidden is None else hidden | far
    return hidden


def _by_key_head(tensor: Tensor, key: Tensor) -> Tensor:
    """(n, Hq, ...) -> (n, Hkv, Hq / Hkv, ...)."""
    return tensor.unflatten(1, (key.shape[1], -1))


def _query_blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    per_row = max(1, query.shape[0] * query.shape[1] * key.shape[2])
    step = max(1, DENSE_SCORES // per_row)
    return (slice(start, min(start + step, query.shape[2])) for start in range(0, query.shape[2], step))


def _score_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _finite(lse: Tensor) -> Tensor:
    """A query that sees no key of a block has log-sum-exp -inf; its weights are then exp(-inf - 0) = 0."""
    return torch.where(torch.isinf(lse), 0.0, lse)
