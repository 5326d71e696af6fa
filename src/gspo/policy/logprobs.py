"""THE place that shifts and projects: log-probs of response tokens under the policy.

Everywhere else ``x[n, t]`` belongs to ``token_ids[n, t]``; only here does one hidden state predict the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gspo.policy.attention import hidden_states
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.moe.capture import RouteCapture, start_pass
from gspo.policy.packing import pack
from gspo.policy.projection import selected_logprobs
from gspo.types import Sequences


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Per response token, aligned with ``sequences.token_ids``."""

    logprobs: Tensor  # (N, T) float32, with gradient, 0 in padding
    entropy: Tensor | None  # (N, T) float32 nats, without gradient, 0 in padding
    num_input_tokens: int  # tokens that went through the model


def sequence_logprobs(
    policy: CausalPolicy,
    sequences: Sequences,
    temperature: float,
    with_entropy: bool = False,
    share_prompts: bool = True,
    routing: Sequence[Tensor] | None = None,
    capture: RouteCapture | None = None,
) -> TokenLogprobs:
    """Log-probs of every response token at the sampling temperature, on the policy's device.

    The rows are packed without padding and the prompt of a group is computed once, forward and backward
    (``share_prompts=False``: once per response, for comparison). Logits exist for one chunk of rows at a time.
    temperature: > 0; the log-prob is that of softmax(logits / temperature). float64 for a float64 policy.
    routing: per row (p + t - 1, L, K) expert ids that are forced (routing replay); capture: is filled with what the
    routers did. Both are for mixtures of experts only; see ``policy/moe/``.

    Raises DataError for an empty prompt or a sequence longer than the policy's context, RunError for routes that do
    not fit, ModelError for routes of a model without experts.
    """
    if not temperature > 0:
        raise ValueError(f"the temperature of a log-prob must be positive, not {temperature}")
    packed = pack(sequences, policy.device, share_prompts)
    policy.check_length(packed.plan.longest)
    routes = start_pass(policy, sequences, packed, routing, capture)
    hidden = hidden_states(policy.base, packed.input_ids[None], packed.position_ids[None], packed.plan, routes)[0]
    if capture is not None and routes is not None:
        capture.fill(routes, sequences, packed)
    targets = sequences.token_ids.to(policy.device)[packed.row, packed.column]
    logprobs, entropy = selected_logprobs(
        policy.head, hidden.index_select(0, packed.predictor), targets, temperature, with_entropy
    )
    shape = (len(sequences), sequences.token_ids.shape[1])
    place = (packed.row, packed.column)
    return TokenLogprobs(
        logprobs.new_zeros(shape).index_put(place, logprobs),
        None if entropy is None else entropy.new_zeros(shape).index_put(place, entropy),
        len(packed.input_ids),
    )
