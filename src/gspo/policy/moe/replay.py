"""Forced routes: one object per forward says what the routers shall do and keeps what they did.

The object travels through the model as a keyword, beside the attention plan, to the attention of each layer; a hook
there hands it to the router that follows. So a recomputed layer (activation recomputation in the backward pass) gets
the object of ITS forward, whatever has run in between.

The router's own forward always runs. Its ids are then replaced by the recorded ones and its gates by those that the
model's own rule makes of the CURRENT logits for these ids: the router keeps its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gspo.errors import RunError
from gspo.policy.attention import ROUTING
from gspo.policy.moe.families import Router, find_routers


@dataclass(frozen=True)
class RoutingShape:
    """L routers that choose K of E experts each, and how ids are stored.

    A token whose K ids are all ``natural`` (the sentinel) is routed by the router itself. uint8 and 255 up to 256
    experts: K different ids are never all 255. Otherwise int16 and -1.
    """

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        small = self.num_experts <= 255 or (self.num_experts == 256 and self.top_k > 1)
        return torch.uint8 if small else torch.int16

    @property
    def natural(self) -> int:
        return 255 if self.dtype == torch.uint8 else -1


@dataclass(eq=False)
class RoutingPass:
    """The routing of one forward over S tokens."""

    shape: RoutingShape
    forced: Tensor | None = None  # (S, L, K) ids to use; None: natural routing
    reference: Tensor | None = None  # (S, L, K) ids to compare with
    with_margins: bool = False
    scores: Literal["none", "own", "reference"] = "none"  # which experts' log scores are kept
    shares: Tensor | None = None  # (L, E) load of each expert, for ``balance``
    _ids: dict[int, Tensor] = field(default_factory=dict)
    _margins: dict[int, Tensor] = field(default_factory=dict)
    _scores: dict[int, Tensor] = field(default_factory=dict)
    _balance: dict[int, Tensor] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor:
        """(S, L, K) what the routers would have chosen by themselves."""
        return self._stack(self._ids)

    @property
    def margins(self) -> Tensor:
        """(S, L) selection score of the K-th expert minus that of the next one; without gradient."""
        return self._stack(self._margins)

    @property
    def log_scores(self) -> Tensor:
        """(S, L, K) float32 log scores of the natural or the reference's experts; without gradient."""
        return self._stack(self._scores)

    @property
    def balance(self) -> Tensor:
        """(S, L) ``E * sum over experts of share * probability``, with gradient through the probabilities."""
        return self._stack(self._balance)

    def _stack(self, by_router: dict[int, Tensor]) -> Tensor:
        missing = [index for index in range(self.shape.num_layers) if index not in by_router]
        if missing:
            raise RunError(
                f"routers {missing} of {self.shape.num_layers} were not seen in this forward: something ran the model "
                "around its modules, and its routes can neither be recorded nor replayed"
            )
        return torch.stack([by_router[index] for index in range(self.shape.num_layers)], dim=1)

    def route(self, index: int, router: Router, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What router ``index`` hands on."""
        logits, gates, ids = output
        if index not in self._ids:  # a recomputed layer has been recorded already
            self._record(index, router, logits.detach(), ids)
        if self.shares is not None:
            self._add_balance(index, router, logits, self.shares)
        if self.forced is None:
            return output
        wanted = _fill_natural(self.forced[:, index], ids, self.shape.natural)
        return logits, router.family.gates(router.module, logits, wanted).to(gates.dtype), wanted

    def _add_balance(self, index: int, router: Router, logits: Tensor, shares: Tensor) -> None:
        """A layer that is recomputed does the same arithmetic again, or its saved tensors would not match."""
        probabilities = router.family.log_scores(router.module, logits).softmax(dim=-1)
        found = self.shape.num_experts * (probabilities * shares[index].to(probabilities)).sum(dim=-1)
        self._balance.setdefault(index, found)

    @torch.no_grad()
    def _record(self, index: int, router: Router, logits: Tensor, ids: Tensor) -> None:
        self._ids[index] = ids.to(self.shape.dtype)
        if self.with_margins and self.shape.num_experts > self.shape.top_k:
            best = router.family.selection(router.module, logits).topk(self.shape.top_k + 1, dim=-1).values
            self._margins[index] = (best[:, -2] - best[:, -1]).float()
        elif self.with_margins:
            self._margins[index] = torch.zeros(len(ids), device=ids.device)
        if self.scores != "none":
            at = ids
            if self.scores == "reference" and self.reference is not None:
                at = _fill_natural(self.reference[:, index], ids, self.shape.natural)
            self._scores[index] = router.family.log_scores(router.module, logits).gather(1, at).float()


def _fill_natural(wanted: Tensor, own: Tensor, natural: int) -> Tensor:
    """(S, K) int64: the wanted ids, and the router's own where all wanted ones are the sentinel."""
    return torch.where((wanted == natural).all(dim=-1, keepdim=True), own, wanted.to(own.dtype))


class RouterHook:
    """Sits on one router and on the attention before it."""

    def __init__(self, index: int, router: Router) -> None:
        self.index = index
        self.router = router
        self.current: RoutingPass | None = None

    def before_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.current = kwargs.get(ROUTING)

    def after_router(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        current, self.current = self.current, None
        return None if current is None else current.route(self.index, self.router, output)


def is_routing_hook(hook: Any) -> bool:
    """Whether a hook of a module is one of ours, which does nothing unless a forward carries a ``RoutingPass``."""
    return isinstance(getattr(hook, "__self__", None), RouterHook)


def hand_over(base: nn.Module, routing: RoutingPass | None) -> None:
    """Gives the pass to every router at once: for a forward that calls the routers and not the attention before them.

    Good for one call of each router; not for layers that are recomputed.
    """
    for router in find_routers(base):
        hook: RouterHook = router.module.__dict__["routing_hook"]
        hook.current = routing


def prepare_routing(base: nn.Module) -> RoutingShape | None:
    """Puts the hooks on a model (again and again is harmless) and says what shape its routes have; None if dense.

    Raises:
        ModelError: a mixture of experts whose routers are not understood, or differ between layers.
    """
    routers = find_routers(base)
    if not routers:
        return None
    for index, router in enumerate(routers):
        if "routing_hook" in router.module.__dict__:
            continue
        hook = RouterHook(index, router)
        router.module.__dict__["routing_hook"] = hook
        router.attention.register_forward_pre_hook(hook.before_attention, with_kwargs=True)
        router.module.register_forward_hook(hook.after_router)
    first = routers[0].module
    return RoutingShape(len(routers), int(first.top_k), int(first.num_experts))
