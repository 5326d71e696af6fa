"""Stop strings: found by decoding the end of a response, never by decoding all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StopStrings:
    """Looks for strings that end a response."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # A token stands for at least one byte, so a string that ends in the newest token began at most this far back;
        # a few tokens more give the decoder its context.
        self._tail = max((len(string.encode()) for string in strings), default=0) + 4

    def found(self, token_ids: Tensor, lengths: Tensor) -> Tensor | None:
        """(n,) bool: the text of tokens (n, T) up to lengths (n,) has a stop string. None: there are no strings."""
        if not self._strings:
            return None
        tails = [row[max(0, end - self._tail) : end] for row, end in zip(token_ids, lengths.tolist(), strict=True)]
        texts = self._tokenizer.batch_decode([tail.tolist() for tail in tails], skip_special_tokens=False)
        hits = [any(string in text for string in self._strings) for text in texts]
        return torch.tensor(hits, dtype=torch.bool, device=token_ids.device)
