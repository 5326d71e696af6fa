"""What a decoding step needs of a model, for any model: its own forward over slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gspo.policy.attention import hidden_states
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.moe.replay import RoutingPass, RoutingShape
from gspo.rollout.embedded.slots import Admission, PrefillPlan, SlotCache


class Steps(Protocol):
    """Computes logits of the next token for the rows in slots 0..n-1, and keeps their keys and values."""

    def admit(self, first_slot: int, prompts: Sequence[Admission], plan: PrefillPlan) -> None:
        """Prompts that the plan has computed begin in slots first_slot, first_slot + 1, ..."""
        ...

    def first_logits(self, states: Tensor) -> Tensor:
        """Hidden states (n, H) after prompts -> logits (n, V)."""
        ...

    def step(self, token_ids: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor | None]:
        """Logits (n, V) after tokens (n,) at positions (n,), and their routes (n, L, K) if they are to be recorded.

        longest: largest position + 1. The next call overwrites the logits.
        """
        ...

    def release(self, slots: Tensor, lengths: Tensor) -> None:
        """Rows in slots (m,) have finished; lengths (m,) of their response tokens were inputs."""
        ...

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Rows in slots source (m,) take the slots target (m,); longest: most positions of a row."""
        ...


class ModelSteps:
    """Through the model's own forward."""

    def __init__(self, policy: CausalPolicy, num_slots: int, limit: int, routing: RoutingShape | None) -> None:
        """limit: most positions of a row. routing: of routes that are to be recorded."""
        self._routing = routing
        self._base, self._head = policy.base, policy.head
        self._cache = SlotCache(num_slots, limit, policy.device)

    def admit(self, first_slot: int, prompts: Sequence[Admission], plan: PrefillPlan) -> None:
        self._cache.admit(first_slot, prompts, plan)

    def first_logits(self, states: Tensor) -> Tensor:
        return self._head.logits(states)

    def step(self, token_ids: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor | None]:
        self._cache.begin_step(positions, longest)
        routing = None if self._routing is None else RoutingPass(self._routing)
        hidden = hidden_states(self._base, token_ids[:, None], positions[:, None], self._cache, routing)
        return self._head.logits(hidden[:, 0]), None if routing is None else routing.ids

    def release(self, slots: Tensor, lengths: Tensor) -> None:
        """A slot is free as it is."""

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        self._cache.move(source, target, longest)
