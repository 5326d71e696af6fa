"""How far routing moved: sums over tokens that can be added over micro-batches, updates and processes.

Drift is the share of (token, layer, slot) whose expert under the current weights is not in the recorded set. It is the
argument of arXiv 2507.18071, section 5.3 (about 10 % of the experts after one update of a 48-layer model). Router shift
follows arXiv 2510.23027: the mean |log score now - log score then| of the experts that were recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gspo.policy.moe.capture import TokenRoutes


@dataclass(frozen=True, eq=False)
class RoutingStats:
    """Sums over n tokens, float64, on the CPU."""

    num_tokens: Tensor  # () n
    changed_slots: Tensor  # (L,) slots whose expert is not in the recorded set
    changed_sets: Tensor  # (L,) tokens whose set of experts differs
    changed_tokens: Tensor  # () tokens with at least one layer whose set differs
    slots: Tensor  # () slots compared in each layer, n * K; 0 where nothing was recorded before
    margin: Tensor  # (L,)
    shift: Tensor  # (L,) sum over tokens and slots of |log score now - then|
    shift_slots: Tensor  # () slots in that sum, in each layer
    load: Tensor  # (L, E) how often each expert was chosen
    moments: Tensor  # (5,) sums of x, y, x^2, y^2, x y with x = |log ratio|, y = share of layers changed

    def __add__(self, other: RoutingStats) -> RoutingStats:
        return RoutingStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self, prefix: str = "moe/") -> dict[str, float]:
        """See docs/metrics.md; what was not measured is left out. Empty for no tokens."""
        n = float(self.num_tokens)
        if not n:
            return {}
        found = self._load_metrics(prefix) if float(self.load.sum()) else {}
        if float(self.slots):
            by_layer = self.changed_slots / self.slots
            found |= {
                f"{prefix}drift": float(by_layer.mean()),
                f"{prefix}changed_tokens": float(self.changed_tokens) / n,
                f"{prefix}changed_layers": float((self.changed_sets / n).mean()),
                **{f"{prefix}drift/layer_{i:02d}": value for i, value in enumerate(by_layer.tolist())},
            }
            correlation = self._correlation(n)
            if correlation is not None:
                found[f"{prefix}log_ratio_correlation"] = correlation
        if float(self.margin.abs().sum()):
            found[f"{prefix}margin"] = float((self.margin / n).mean())
        if float(self.shift_slots):
            found[f"{prefix}router_shift"] = float((self.shift / self.shift_slots).mean())
        return found

    def _load_metrics(self, prefix: str) -> dict[str, float]:
        """Mean over layers of: busiest expert against an even share, entropy against the even one, idle experts."""
        share = self.load / self.load.sum(dim=1, keepdim=True)
        num_experts = share.shape[1]
        return {
            f"{prefix}load_max": float(share.amax(dim=1).mean()) * num_experts,
            f"{prefix}load_entropy": float(torch.special.entr(share).sum(dim=1).mean()) / math.log(max(num_experts, 2)),
            f"{prefix}load_idle": float((share == 0).double().mean()),
        }

    def _correlation(self, n: float) -> float | None:
        """Pearson's, over tokens; None where one side does not vary."""
        x, y, xx, yy, xy = (self.moments / n).tolist()
        spread = (xx - x * x) * (yy - y * y)
        if not spread > 1e-18:
            return None
        return (xy - x * y) / math.sqrt(spread)


@torch.no_grad()
def routing_stats(
    tokens: TokenRoutes,
    num_experts: int,
    enters: Tensor,
    token_log_ratio: Tensor | None = None,
    old_log_scores: Tensor | None = None,
) -> RoutingStats:
    """The sums of one forward.

    Args:
        tokens: as recorded; compared with its ``reference`` where it has one.
        num_experts: E.
        enters: (N, T) bool, response tokens that count.
        token_log_ratio: (N, T) log pi - log old, for the correlation.
        old_log_scores: (R, L, K) of the reference's experts under the old weights, for the router shift.
    """
    at = (tokens.row, tokens.column)
    keep = enters.to(tokens.row.device)[at]
    if tokens.reference is not None:
        keep &= ~is_natural(tokens.reference).flatten(1).any(dim=1)
    ids = tokens.ids[keep].long()
    n, num_layers, top_k = ids.shape
    per_layer = torch.zeros(num_layers, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    stats = {
        "num_tokens": zero + n,
        "changed_slots": per_layer,
        "changed_sets": per_layer,
        "changed_tokens": zero,
        "slots": zero,
        "margin": per_layer if tokens.margins is None else _sum(tokens.margins[keep]),
        "shift": per_layer,
        "shift_slots": zero,
        "load": _load(ids, num_experts),
        "moments": torch.zeros(5, dtype=torch.float64),
    }
    if tokens.reference is not None:
        changed = _not_in(ids, tokens.reference[keep].long())
        sets = changed.any(dim=-1)
        stats |= {
            "changed_slots": _sum(changed.sum(dim=-1)),
            "changed_sets": _sum(sets),
            "changed_tokens": sets.any(dim=-1).sum().double().cpu(),
            "slots": zero + n * top_k,
        }
        if token_log_ratio is not None:
            stats["moments"] = _moments(token_log_ratio.detach()[at][keep].abs(), sets.double().mean(dim=-1))
    if old_log_scores is not None and tokens.log_scores is not None:
        moved = (tokens.log_scores[keep] - old_log_scores.to(tokens.log_scores.device)[keep]).abs()
        stats |= {"shift": _sum(moved.sum(dim=-1)), "shift_slots": zero + n * top_k}
    return RoutingStats(**stats)


def is_natural(ids: Tensor) -> Tensor:
    """(..., L) bool: sentinels in stored ids (..., L, K), see ``RoutingShape``."""
    return (ids == (255 if ids.dtype == torch.uint8 else -1)).all(dim=-1)


def _sum(values: Tensor) -> Tensor:
    """(n, L) to (L,)."""
    return values.sum(dim=0, dtype=torch.float64).cpu()


def _not_in(ids: Tensor, recorded: Tensor) -> Tensor:
    """(n, L, K) bool: experts that are not among the K recorded ones of the same token and layer."""
    return torch.stack([(ids[..., k, None] != recorded).all(dim=-1) for k in range(ids.shape[-1])], dim=-1)


def _load(ids: Tensor, num_experts: int) -> Tensor:
    num_layers = ids.shape[1]
    offset = torch.arange(num_layers, device=ids.device)[:, None] * num_experts
    counts = torch.bincount((ids + offset).flatten(), minlength=num_layers * num_experts)
    return counts.view(num_layers, num_experts).double().cpu()


def _moments(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.double(), y.double()
    return torch.stack([x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]).cpu()
