"""Where a run speaks: one sink for its events, in front of the file and the screen.

When a run begins and ends is said in ``runs.py``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from gspo.events import EventWriter
from gspo.report.terminal import TerminalReporter


@dataclass(frozen=True, eq=False)
class Log:
    """Where a run speaks: every event goes to the file and to the screen."""

    events: EventWriter
    screen: TerminalReporter
    start: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def emit(self, kind: str, **fields: Any) -> None:
        self.screen.on_event(self.events.write(kind, **fields))
