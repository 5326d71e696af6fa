"""Routing through one step: which routes are recorded, which are forced, and what is measured of them.

| replay | forced while old log-probs are computed | forced in the updates |
|---|---|---|
| none | nothing | nothing |
| r2 | nothing; the trainer's own routes are recorded | the trainer's routes under the old weights |
| r3 | the engine's routes | the engine's routes |

What an update is compared with ("drift") is what would be forced; without replay the trainer's routes under the old
weights where it has recorded them (``train.old_logprobs = "recompute"``), else the engine's. So measuring costs no
forward. Without a replay the engine is only asked to record where its routes are needed for that.

The auxiliary load-balancing loss (Switch Transformer, arXiv 2101.03961, equations (4) to (6)) of a mini-batch is
``mean over layers of E * sum over experts of f_e * P_e``: f the load, K in all, P the mean router probability, both
over the tokens of the loss. A product of two means does not add up over micro-batches. So f, which carries no gradient,
is counted from these recorded routes for the whole mini-batch before any cut; what is left is a sum over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gspo.errors import RunError
from gspo.policy.moe.capture import RouteCapture, padded_scores
from gspo.policy.moe.drift import RoutingStats, is_natural, routing_stats
from gspo.policy.moe.replay import RoutingShape
from gspo.types import Metric, RolloutBatch, Sequences

Replay = Literal["none", "r2", "r3"]
RoutingMetrics = Literal["none", "drift", "all"]


@dataclass(frozen=True)
class RoutingSettings:
    """[moe] of a recipe, for a model that has experts.

    metrics: "drift" measures what is at hand in the forwards that are made anyway; "all" also keeps the log scores of
    the old routes (4 bytes an expert of each token and layer) for the router shift.
    load_balancing_coefficient: weight of the auxiliary loss; 0 is none.
    """

    shape: RoutingShape
    replay: Replay = "none"
    metrics: RoutingMetrics = "drift"
    load_balancing_coefficient: float = 0.0

    @property
    def balances(self) -> bool:
        """Whether the updates have the auxiliary loss."""
        return self.load_balancing_coefficient > 0

    @property
    def compares(self) -> bool:
        """Whether the updates need recorded routes even where none are forced."""
        return self.metrics != "none" or self.balances

    @property
    def engine_records(self) -> bool:
        """Whether the sampling engine is asked for its routes."""
        return self.replay == "r3" or self.compares


@dataclass(eq=False)
class StepRouting:
    """The routes of one rollout batch. Filled while old log-probs are computed, read by the updates.

    Rows are told by their index in the rollout batch.
    """

    settings: RoutingSettings
    engine: Sequence[Tensor] | None  # per row, as the engine recorded them
    _old: dict[int, Tensor] = field(default_factory=dict)  # by row, the trainer's under the old weights
    _old_scores: dict[int, Tensor] = field(default_factory=dict)
    _engine_drift: RoutingStats | None = None
    _shares: Tensor | None = None  # (L, E), of the mini-batch that is being differentiated

    @classmethod
    def of(cls, settings: RoutingSettings | None, rollouts: RolloutBatch) -> StepRouting | None:
        """The routing of a step, or None where there is nothing to do.

        Raises:
            RunError: ``r3``, and the engine recorded no routes.
        """
        if settings is None or (settings.replay == "none" and not settings.compares):
            return None
        if settings.replay == "r3" and rollouts.routing is None:
            raise RunError(
                'moe.replay = "r3" forces the routes of the sampling engine, and this engine recorded none; take "r2", '
                "or an engine that records routing"
            )
        return cls(settings, rollouts.routing)

    # While old log-probs are computed.

    def scoring(self, rows: Tensor) -> dict[str, Any]:
        """Keyword arguments of ``sequence_logprobs`` for these rows under the old weights."""
        replay, metrics = self.settings.replay, self.settings.metrics
        engine = None if self.engine is None else [self.engine[n] for n in rows.tolist()]
        arguments: dict[str, Any] = {"routing": engine if replay == "r3" else None}
        if replay == "r2" or self.settings.compares:
            # Of the experts that the updates will be compared with.
            at: Literal["own", "reference"] = "reference" if replay == "r3" else "own"
            arguments["capture"] = RouteCapture(engine, scores=at if metrics == "all" else "none")
        return arguments

    def scored(self, rows: Tensor, arguments: Mapping[str, Any], mask: Tensor) -> None:
        """Keeps what the forward recorded. mask: (n, T) bool, response tokens of these rows."""
        capture: RouteCapture | None = arguments.get("capture")
        if capture is None or capture.tokens is None:
            return
        for place, row in enumerate(rows.tolist()):
            self._old[row] = capture.routes[place]
            if capture.log_scores:
                self._old_scores[row] = capture.log_scores[place]
        if capture.reference is not None and self.settings.metrics != "none":
            found = routing_stats(capture.tokens, self.settings.shape.num_experts, mask)
            self._engine_drift = found if self._engine_drift is None else self._engine_drift + found

    def engine_metrics(self) -> dict[str, float]:
        """Drift from the engine to the trainer at equal weights."""
        if self._engine_drift is None:
            return {}
        found = self._engine_drift.metrics("moe/engine_")
        return {name: value for name, value in found.items() if name.startswith("moe/engine_drift")}

    # In the updates.

    @property
    def balances(self) -> bool:
        """Whether the loss has the auxiliary term."""
        return self.settings.balances

    def training(self, rows: Tensor) -> dict[str, Any]:
        """Keyword arguments of ``sequence_logprobs`` for these rows in an update.

        Raises:
            RunError: ``r2``, and a row was not scored under the old weights.
        """
        replay, metrics = self.settings.replay, self.settings.metrics
        recorded = self._recorded(rows.tolist())
        if replay != "none" and recorded is None:
            raise RunError(
                f'moe.replay = "{replay}" has no recorded routes for rows {rows.tolist()}; with "r2" every row is '
                'scored under the old weights first: train.old_logprobs = "recompute"'
            )
        arguments: dict[str, Any] = {"routing": recorded if replay != "none" else None}
        if self.settings.compares:
            scores = self._scores(rows.tolist())
            at: Literal["none", "reference"] = "none" if scores is None else "reference"
            arguments["capture"] = RouteCapture(
                recorded, with_margins=metrics != "none", scores=at, shares=self._shares, by_row=False
            )
        return arguments

    def begin_update(self, rows: Tensor, lengths: Tensor, mask: Tensor) -> None:
        """Counts the load of a mini-batch, if it is to be balanced. lengths (N,), mask (N, T): of the whole batch.

        Raises:
            RunError: routes of these rows are not recorded.
        """
        if not self.settings.balances:
            return
        recorded = self._recorded(rows.tolist())
        if recorded is None:
            raise RunError(
                "moe.load_balancing_coefficient needs the experts of every response, and neither the engine nor the "
                'trainer has recorded them; set train.old_logprobs = "recompute"'
            )
        self._shares = expert_shares(recorded, lengths[rows], mask[rows], self.settings.shape)

    def balance_loss(self, arguments: Mapping[str, Any], mask: Tensor) -> tuple[Tensor, Metric] | None:
        """Sum of the auxiliary loss over the mask's tokens, with gradient and coefficient, and its plain metric.

        mask: (n, T) bool. None where nothing is balanced.
        """
        capture: RouteCapture | None = arguments.get("capture")
        if not self.settings.balances or capture is None or capture.tokens is None or capture.tokens.balance is None:
            return None
        tokens = capture.tokens
        total = capture.tokens.balance[mask[tokens.row, tokens.column]].sum()
        metric = (float(total.detach()), float(mask.sum()))
        return self.settings.load_balancing_coefficient * total, metric

    def trained(
        self, rows: Tensor, arguments: Mapping[str, Any], sequences: Sequences, mask: Tensor, token_log_ratio: Tensor
    ) -> RoutingStats | None:
        """What an update's forward says of these rows. mask, token_log_ratio: (n, T)."""
        capture: RouteCapture | None = arguments.get("capture")
        if capture is None or capture.tokens is None or self.settings.metrics == "none":
            return None
        scores = self._scores(rows.tolist()) if capture.tokens.log_scores is not None else None
        old = None if scores is None else padded_scores(scores, sequences, capture.tokens)
        return routing_stats(capture.tokens, self.settings.shape.num_experts, mask, token_log_ratio, old)

    def _recorded(self, rows: list[int]) -> list[Tensor] | None:
        """What these rows are compared with or forced to; None if it is not known of all of them."""
        if self.settings.replay != "r3" and all(row in self._old for row in rows):
            return [self._old[row] for row in rows]
        if self.settings.replay == "r2" or self.engine is None:
            return None
        return [self.engine[row] for row in rows]

    def _scores(self, rows: list[int]) -> list[Tensor] | None:
        known = self.settings.metrics == "all" and all(row in self._old_scores for row in rows)
        return [self._old_scores[row] for row in rows] if known else None


def expert_shares(routes: Sequence[Tensor], lengths: Tensor, mask: Tensor, shape: RoutingShape) -> Tensor:
    """(L, E) float32: choices of each expert by token, K in all, over the tokens by which the mask's are predicted.

    Args:
        routes: per row (p + t - 1, L, K); tokens that were left to the router (the sentinel) are not counted.
        lengths: (n,) response tokens t of each row.
        mask: (n, T) bool, response tokens.
    """
    counts = torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.float64)
    num_tokens = torch.zeros(shape.num_layers, 1, dtype=torch.float64)
    for ids, length, enters in zip(routes, lengths.tolist(), mask, strict=True):
        predictors = ids[len(ids) - length :][enters[:length]]
        for layer, chosen in enumerate(predictors.unbind(dim=1)):
            known = chosen[~is_natural(chosen)].long()
            counts[layer] += torch.bincount(known.flatten(), minlength=shape.num_experts)
            num_tokens[layer] += len(known)
    return (counts / num_tokens.clamp(min=1)).float()


def stack_routes(routes: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
    """Routes of all rows of a batch, or None if a row has none."""
    known = tuple(ids for ids in routes if ids is not None)
    return known if known and len(known) == len(routes) else None


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(n, T) log pi - log old, detached, 0 outside the mask."""
    return torch.where(mask, logprobs.detach() - old_logprobs, torch.zeros((), device=logprobs.device))
