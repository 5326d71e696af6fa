"""What every objective is, and the checks that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gspo.errors import NumericalError
from gspo.objectives.masking import first_true, select
from gspo.types import ObjectiveOutput, Unit


@runtime_checkable
class Objective(Protocol):
    """log-probs and advantages in, one sum to minimise out. All objectives are exchangeable."""

    @property
    def name(self) -> str:
        """The name in a recipe."""
        ...

    @property
    def unit(self) -> Unit:
        """What ``loss_sum`` sums over."""
        ...

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """The loss of these rows, as a sum.

        Args:
            logprobs: (N, T) log-probs of the policy being trained, with gradient. Any float dtype.
            old_logprobs: (N, T) log-probs of the policy that anchors the ratio; no gradient flows into it.
            advantages: (N,) one per response, or (N, T) one per token.
            response_mask: (N, T) bool, the tokens that enter the loss. What lies elsewhere is not read.

        Returns:
            ``loss_sum`` () over the ``count`` units of this call. Rows without a True slot are no unit.

        Raises:
            NumericalError: a log-prob or advantage inside the mask is not finite.
            ValueError, TypeError: shapes or dtypes do not fit.
        """
        ...


@dataclass(frozen=True, eq=False)
class Terms:
    """Checked inputs: float32 or float64, exactly 0 outside the mask."""

    logprobs: Tensor  # (N, T), carries the gradient
    old_logprobs: Tensor  # (N, T), detached
    advantages: Tensor  # (N, T), detached
    mask: Tensor  # (N, T) bool
    lengths: Tensor  # (N,) int64, tokens that enter

    @property
    def num_sequences(self) -> int:
        """Rows with at least one token that enters."""
        return int((self.lengths > 0).sum())

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def token_log_ratio(self) -> Tensor:
        """(N, T) log pi - log old, detached, 0 outside the mask."""
        return self.logprobs.detach() - self.old_logprobs

    def per_sequence(self, values: Tensor) -> Tensor:
        """(N,) mean of (N, T) values over each row's tokens; 0 for a row without any."""
        return select(values, self.mask).sum(dim=-1) / self.lengths.clamp(min=1)

    def count(self, unit: Unit) -> int:
        return self.num_sequences if unit == "sequence" else self.num_tokens


def check_terms(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Terms:
    """Checks shapes, selects by the mask, upcasts, then looks for non-finite values; see ``Objective.__call__``."""
    _check_shapes(logprobs, old_logprobs, advantages, response_mask)
    # Upcast before any subtraction: near 1 bfloat16 values are 7.8e-3 apart, twenty clip bands.
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, old_logprobs.dtype), torch.float32)
    wide = advantages if advantages.dim() == 2 else advantages[:, None].expand(logprobs.shape)
    terms = Terms(
        logprobs=select(logprobs, response_mask).to(dtype),
        old_logprobs=select(old_logprobs.detach(), response_mask).to(dtype),
        advantages=select(wide.detach(), response_mask).to(dtype),
        mask=response_mask,
        lengths=response_mask.sum(dim=-1),
    )
    require_finite("logprobs", terms.logprobs)
    require_finite("old_logprobs", terms.old_logprobs)
    require_finite("advantages", terms.advantages)
    return terms


def require_finite(name: str, selected: Tensor) -> None:
    """Refuses a non-finite value in an (N, T) tensor that is 0 outside the mask.

    Raises:
        NumericalError: names the tensor, the row and token of the first one, and how many rows have one.
    """
    bad = ~torch.isfinite(selected.detach())
    if not bad.any():
        return
    row, token = first_true(bad)
    num_rows = int(bad.any(dim=-1).sum())
    raise NumericalError(
        f"{name} is {selected[row, token].item()} at row {row}, token {token}, inside the response mask "
        f"({num_rows} of {len(bad)} rows have such a value); leave the row out by its mask, or find what made it"
    )


def require_one_advantage_per_row(terms: Terms) -> None:
    """Refuses advantages that differ between the tokens of a response.

    Raises:
        ValueError: names the row and its range.
    """
    highest = terms.advantages.masked_fill(~terms.mask, -torch.inf).amax(dim=-1)
    lowest = terms.advantages.masked_fill(~terms.mask, torch.inf).amin(dim=-1)
    differs = (terms.lengths > 0) & (highest != lowest)
    if differs.any():
        row = int(torch.nonzero(differs)[0])
        raise ValueError(
            f"the advantages of row {row} differ between its tokens ({lowest[row].item():g} to "
            f"{highest[row].item():g}); the objective has one per response: pass (N,) advantages or use GSPOToken"
        )


def _check_shapes(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> None:
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs has shape {tuple(logprobs.shape)}; it must be (N, T), one row per response")
    for name, tensor in (("old_logprobs", old_logprobs), ("response_mask", response_mask)):
        if tensor.shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}; they must agree"
            )
    if advantages.shape not in (logprobs.shape, logprobs.shape[:1]):
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}; with logprobs {tuple(logprobs.shape)} it must be "
            f"{tuple(logprobs.shape[:1])} (one per response) or {tuple(logprobs.shape)} (one per token)"
        )
    if response_mask.dtype != torch.bool:
        raise TypeError(f"response_mask has dtype {response_mask.dtype}; it must be bool (use mask.bool())")
    for name, tensor in (("logprobs", logprobs), ("old_logprobs", old_logprobs)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be a float dtype")
