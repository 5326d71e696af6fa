"""SIGINT and SIGTERM while a run is on.

Where it is safe to end is the loop's to say: it calls :meth:`StopSignal.check` there.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from typing import Any

from gspo.train.loop import StoppedError


@dataclass(eq=False)
class StopSignal:
    """SIGINT and SIGTERM as a wish: the run ends at the next safe point. The same signal again ends it at once."""

    received: str | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises StoppedError if a signal came."""
        if self.received is not None:
            raise StoppedError(f"stopped by {self.received}")

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, self._before.pop(number))
