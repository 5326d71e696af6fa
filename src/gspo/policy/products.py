"""Products of matrices in an update: on the processor's tile registers where it has them, else torch's.

``tiles.h`` computes float32 products as sums of bfloat16 ones, as exactly as a chain of fused multiply-adds
(docs/decisions/0122).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.policy.native import native_for

#: Multiply-adds from which splitting the factors pays for itself.
WORTH_MULTIPLYING = 1 << 20


def product(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """base + a b: a (n, k), b (k, m), base (n, m) or (m,) or None for 0; into out (n, m) where given. No autograd."""
    native = native_for(a)
    if native is not None and native.has_tiles and _fits(a, b, out, base):
        out = a.new_empty(len(a), b.shape[1]) if out is None else out
        native.multiply(a, b, base, out)
        return out
    return torch.mm(a, b, out=out) if base is None else torch.addmm(base, a, b, out=out)


def _fits(a: Tensor, b: Tensor, out: Tensor | None, base: Tensor | None) -> bool:
    """Whether these are matrices for ``multiply``: large, of one dtype and without gaps one way."""
    if len(a) * a.shape[1] * b.shape[1] < WORTH_MULTIPLYING or 1 not in a.stride() or 1 not in b.stride():
        return False
    others = [tensor for tensor in (b, out, base) if tensor is not None]
    rows = [tensor for tensor in (out, base) if tensor is not None]
    return all(tensor.dtype == a.dtype for tensor in others) and all(tensor.stride(-1) == 1 for tensor in rows)
