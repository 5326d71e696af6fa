"""Random streams by name, not by call order.

A stream is named by what it is for, e.g. ``(run seed, "sample", step, prompt id, sample index)``, so that
what one response draws does not depend on what else was drawn before it.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2**63) that depends on every name and on nothing else.

    >>> derive_seed(0, "sample", 3, "train/7", 1) == derive_seed(0, "sample", 3, "train/7", 1)
    True
    >>> derive_seed(0, "sample", 3) == derive_seed(0, "sample", "3")
    False
    """
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
