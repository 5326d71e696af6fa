"""The metrics that every objective reports under the same names, as (sum, count) over what enters the loss.

| name | unit | meaning |
|---|---|---|
| clip_fraction/sequence | sequences | at least one token of it was cut by the min |
| clip_fraction/sequence_low, _high | sequences | at least one token was cut at that bound |
| clip_fraction/token, _low, _high | tokens | cut by the min; under a sequence ratio all tokens of it or none |
| log_ratio/mean, abs_mean | sequences | log s_i and its absolute value |
| ratio/mean | sequences | s_i, bounded at e^10 |
| kl/k3_old | tokens | exp(d) - 1 - d, d = log pi - log old: estimates KL(old, pi) on samples of old |
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.objectives.base import Terms
from gspo.objectives.kl import k3
from gspo.objectives.masking import select
from gspo.objectives.ratios import bounded_exp, mean_log_ratio
from gspo.types import Metric


@torch.no_grad()
def objective_metrics(terms: Terms, low: Tensor, high: Tensor) -> dict[str, Metric]:
    """Metrics of one call.

    Args:
        terms: checked inputs.
        low, high: (N, T) bool, tokens cut at the lower and the upper bound; False outside the mask.
    """
    token_log_ratio = terms.token_log_ratio
    enters = terms.lengths > 0
    log_s = mean_log_ratio(token_log_ratio, terms.mask)
    cut = low | high
    by_sequence = {
        "clip_fraction/sequence": cut.any(dim=-1),
        "clip_fraction/sequence_low": low.any(dim=-1),
        "clip_fraction/sequence_high": high.any(dim=-1),
        "log_ratio/mean": log_s,
        "log_ratio/abs_mean": log_s.abs(),
        "ratio/mean": select(bounded_exp(log_s), enters),
    }
    by_token = {
        "clip_fraction/token": cut,
        "clip_fraction/token_low": low,
        "clip_fraction/token_high": high,
        "kl/k3_old": k3(policy=terms.old_logprobs, reference=terms.logprobs.detach()),
    }
    # One transfer from the device for all of them.
    sums = torch.stack(
        [value.sum(dtype=torch.float64) for value in (*by_sequence.values(), *by_token.values())]
    ).tolist()
    num_sequences, num_tokens = terms.num_sequences, terms.num_tokens
    counts = [num_sequences] * len(by_sequence) + [num_tokens] * len(by_token)
    names = [*by_sequence, *by_token]
    return {name: (value, count) for name, value, count in zip(names, sums, counts, strict=True)}
