"""Log-probs of the distribution that was sampled, and the two ratios made of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.masking import masked_row_mean

#: exp of a log ratio is taken of at most this (e^10 = 22026), so that no ratio and no weight overflows. It is a bound
#: on the FINAL log ratio of an objective, never on a token before the mean.
MAX_LOG_RATIO = 10.0


def mean_log_ratio(token_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(N,) log s_i: mean over a row's response tokens of log pi - log old; 0 for a row without any.

    Equation (7) of arXiv 2507.18071. Nothing is clamped before the mean: tokens [60, -58] give exactly 1.
    """
    return masked_row_mean(token_log_ratio, mask)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(min(log_ratio, 10)): the ratio, finite whatever the log ratio is. From below exp needs no bound."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def attach_gradient(weight: Tensor, logprobs: Tensor) -> Tensor:
    """``sg[weight] * pi / sg[pi]``: its value is the weight, its gradient is weight * grad log pi.

    Equation (14) of arXiv 2507.18071. The factor is exp(0) = 1 exactly.
    """
    return weight.detach() * (logprobs - logprobs.detach()).exp()


def selected_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of the chosen token and entropy under ``softmax(logits / temperature)``.

    Args:
        logits: (..., V), any float dtype; computed in float32 (float64 stays).
        tokens: (...) int64.
        temperature: that of sampling.

    Returns:
        (...) log-probs and (...) entropies, in nats.

    Raises:
        ConfigError: the temperature is not a positive number.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature = {temperature:g} cannot be trained on: a greedy sample has no log-prob under its sampler; "
            "sample training data at a temperature above 0"
        )
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = torch.log_softmax(precise / temperature, dim=-1)
    chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
    return chosen, entropy
