"""Policies small enough to check by hand, and the plain way to compute what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.types import Sequences

DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "initializer_range": 0.15,  # large enough that a token matters to the next one
}
MOE: dict[str, Any] = DENSE | {"moe_intermediate_size": 16, "num_experts": 4}


def small_policy(kind: str = "qwen3", dtype: Any = "float32", seed: int = 0, **overrides: Any) -> CausalPolicy:
    shape = MOE if kind == "qwen3_moe" else DENSE
    policy = load_policy(tiny=kind, tiny_config=shape | overrides, dtype=dtype, device="cpu", seed=seed)
    if dtype == "float64":
        _keep_float64(policy)
    return policy


def _keep_float64(policy: CausalPolicy) -> None:
    """Transformers' norms and routers round to float32 inside; for exact comparisons they must not."""
    for module in policy.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm(module)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = _router(module)


def _norm(module: Any) -> Any:
    return lambda x: nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def _router(module: Any) -> Any:
    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
        values, indices = torch.topk(logits.softmax(-1), module.top_k, dim=-1)
        return logits, values / values.sum(-1, keepdim=True), indices

    return forward


def some_sequences() -> Sequences:
    """Six responses to three prompts, not in prompt order, with lengths 9, 1, 3, 0, 5, 4 and prompts of 7, 1, 12."""
    generator = torch.Generator().manual_seed(5)

    def ids(*shape: int) -> Tensor:
        return torch.randint(4, 100, shape, generator=generator)

    lengths = torch.tensor([9, 1, 3, 0, 5, 4])
    return Sequences((ids(7), ids(1), ids(12)), torch.tensor([0, 1, 0, 2, 2, 0]), ids(6, 9), lengths)


def plain_logprobs(policy: CausalPolicy, sequences: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs with gradient and entropies (N, T): one sequence at a time, the model's own logits, log_softmax."""
    rows, entropies = [], []
    width = sequences.token_ids.shape[1]
    for i, length in enumerate(sequences.lengths.tolist()):
        prompt = sequences.prompts[int(sequences.prompt_index[i])]
        response = sequences.token_ids[i, :length]
        logits = policy.model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
        # The token at place t of the whole is predicted at place t - 1.
        steps = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : len(prompt) - 1 + length]
        rows.append(nn.functional.pad(steps.gather(1, response[:, None])[:, 0], (0, width - length)))
        entropies.append(nn.functional.pad(-(steps.exp() * steps).sum(-1), (0, width - length)))
    return torch.stack(rows), torch.stack(entropies).detach()


def gradients(policy: CausalPolicy, loss: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


def worst_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of two gradients, relative to the largest entry of the parameter's gradient."""
    return max(float((one[n] - other[n]).abs().max() / (other[n].abs().max() + 1e-12)) for n in other)
