"""The soft punishment of long responses of DAPO (arXiv 2503.14476, equation (13)): a term of the training reward.

With L the length of a response in tokens, ``max_tokens`` the longest that is wanted and ``buffer`` the width of a ramp
before it::

    0                                        L <= max_tokens - buffer
    (max_tokens - buffer - L) / buffer       max_tokens - buffer < L <= max_tokens
    -1                                       L > max_tokens, or the engine cut the response off

Length and end are the engine's: a response that ran into ``rollout.max_new_tokens`` would have gone on, whatever its
last token is. An answer that no engine sampled is not punished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import RewardError

OPTIONS = ("max_tokens", "buffer")
#: The value of StopReason.LENGTH: gspo check reads this file, and must not load torch with gspo.types.
_CUT_OFF = "length"


@dataclass(frozen=True)
class OverlongReward:
    """From 0 down to -1; give it the weight that it shall have beside the reward of the answer."""

    max_tokens: int
    buffer: int

    def __call__(
        self, completion_ids: Sequence[Sequence[int]], stop_reasons: Sequence[str | None]
    ) -> list[float | None]:
        return [self.value(len(ids), reason) for ids, reason in zip(completion_ids, stop_reasons, strict=True)]

    def value(self, num_tokens: int, stop_reason: str | None) -> float | None:
        """The term of one response; None, not applicable, where no engine says how it ended."""
        if stop_reason is None:
            return None
        if num_tokens > self.max_tokens or stop_reason == _CUT_OFF:
            return -1.0
        return min(0, self.max_tokens - self.buffer - num_tokens) / self.buffer


def overlong_from_options(options: Mapping[str, Any]) -> OverlongReward:
    """Raises RewardError for an option that is missing, unknown or no length, naming it."""
    for name in options:
        if name not in OPTIONS:
            raise RewardError(f"the reward 'overlong' has no option {name!r}; it has {', '.join(OPTIONS)}")
    for name in OPTIONS:
        value = options.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            said = f"is {value!r}" if name in options else "is missing"
            raise RewardError(f"the option {name} of the reward 'overlong' {said}; it is a number of tokens from 1 on")
    found = OverlongReward(options["max_tokens"], options["buffer"])
    if found.buffer > found.max_tokens:
        raise RewardError(
            f"the reward 'overlong' has buffer = {found.buffer} above max_tokens = {found.max_tokens}; the ramp would "
            "begin before the first token"
        )
    return found
