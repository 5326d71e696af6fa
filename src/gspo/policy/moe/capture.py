"""Recording: what a forward over packed sequences shall keep of its routers, and what it kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gspo.errors import ModelError
from gspo.policy.moe.packing import check_routes, pack_routes, unpack_routes
from gspo.policy.moe.replay import RoutingPass, RoutingShape, prepare_routing
from gspo.policy.packing import PackedRow
from gspo.types import Sequences

if TYPE_CHECKING:
    from gspo.policy.causal_lm import CausalPolicy


@dataclass(frozen=True, eq=False)
class TokenRoutes:
    """The routes by which R response tokens were predicted: those of the input token before each. On the device."""

    ids: Tensor  # (R, L, K) the natural choice under the weights of the forward
    reference: Tensor | None  # (R, L, K) what was recorded before
    margins: Tensor | None  # (R, L)
    log_scores: Tensor | None  # (R, L, K) float32
    row: Tensor  # (R,) which sequence
    column: Tensor  # (R,) which response token
    balance: Tensor | None = None  # (R,) load-balancing term, mean over layers, with gradient


@dataclass(eq=False)
class RouteCapture:
    """Handed to ``sequence_logprobs``, which fills it.

    reference: recorded routes per row, to be compared with; they are not forced.
    with_margins: also record margins.
    scores: also record log scores, of the naturally chosen ("own") or of the reference's experts.
    shares: (L, E) load of each expert; then ``tokens.balance`` is filled.
    by_row: also fill ``routes`` and ``log_scores``; False spares the copy to the CPU where only ``tokens`` are read.
    """

    reference: Sequence[Tensor] | None = None
    with_margins: bool = False
    scores: Literal["none", "own", "reference"] = "none"
    shares: Tensor | None = None
    by_row: bool = True
    routes: tuple[Tensor, ...] = ()  # per row (p + t - 1, L, K), CPU: the natural choice
    log_scores: tuple[Tensor, ...] = ()  # per row (p + t - 1, L, K) float32, CPU
    tokens: TokenRoutes | None = None

    def fill(self, done: RoutingPass, sequences: Sequences, packed: PackedRow) -> None:
        """Takes over what the forward recorded."""
        ids, at = done.ids, packed.predictor
        scores = done.log_scores if self.scores != "none" else None
        if self.by_row:
            self.routes = unpack_routes(ids, sequences, packed)
        if self.by_row and scores is not None:
            self.log_scores = unpack_routes(scores, sequences, packed)
        self.tokens = TokenRoutes(
            ids[at],
            None if done.reference is None else done.reference[at],
            done.margins[at] if self.with_margins else None,
            None if scores is None else scores[at],
            packed.row,
            packed.column,
            None if self.shares is None else done.balance.mean(dim=1)[at],
        )


def routing_shape(policy: CausalPolicy) -> RoutingShape:
    """The shape of the policy's routes. Raises ModelError for a dense model or routers that are not understood."""
    shape = prepare_routing(policy.base)
    if shape is None:
        raise ModelError(
            f"{type(policy.model).__name__} has no experts, so there is no routing to record or replay; "
            'set moe.replay = "none"'
        )
    return shape


def start_pass(
    policy: CausalPolicy,
    sequences: Sequences,
    packed: PackedRow,
    routing: Sequence[Tensor] | None,
    capture: RouteCapture | None,
) -> RoutingPass | None:
    """What the routers of one forward shall do; None where nothing is asked of them.

    Raises:
        RunError: recorded ids that do not fit the sequences or the model.
        ModelError: as ``routing_shape``.
    """
    if routing is None and capture is None:
        return None
    shape = routing_shape(policy)

    def dense(routes: Sequence[Tensor] | None) -> Tensor | None:
        if routes is None or not len(routes):
            return None
        check_routes(routes, sequences, shape)
        return pack_routes(routes, sequences, packed, shape.natural).to(policy.device)

    forced = dense(routing)
    if capture is None:
        return RoutingPass(shape, forced)
    same = capture.reference is routing
    reference = forced if same else dense(capture.reference)
    return RoutingPass(shape, forced, reference, capture.with_margins, capture.scores, capture.shares)


def padded_scores(log_scores: Sequence[Tensor], sequences: Sequences, tokens: TokenRoutes) -> Tensor:
    """(R, L, K) on the CPU: the recorded log scores of the input tokens that predict the response tokens."""
    prompts = torch.tensor([len(sequences.prompts[i]) for i in sequences.prompt_index.tolist()])
    row, column = tokens.row.cpu(), tokens.column.cpu()
    parts = [log_scores[n][int(prompts[n]) - 1 + column[row == n]] for n in range(len(log_scores))]
    return torch.cat(parts) if parts else torch.empty(0)
