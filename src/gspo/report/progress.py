"""How far an evaluation is, and how long it will still take: a bar where somebody watches, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gspo.report.headline import duration_text

#: Lines printed over a phase when the output is no terminal, at most, and seconds between two of them, at least.
LINES = 20
PAUSE_S = 2.0


class EvaluationProgress:
    """Counts responses, phase by phase. Use as a context manager.

    Args:
        name: shown in front.
        console: where to print; default is standard error, so that standard output is the result alone.
        live: overrides whether a bar is drawn; default is whether the console is a terminal.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        name: str,
        console: Console | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._console = console or Console(stderr=True)
        self._is_live = self._console.is_terminal if live is None else live
        self._clock = clock
        self._phase = ""
        self._total = self._kept = self._done = self._lines = 0
        self._start = self._spoke = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> EvaluationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, phase: str, total: int, kept: int) -> None:
        """A phase begins, "sampling" or "judging": ``kept`` of ``total`` responses are done from an earlier attempt."""
        self.__exit__()
        self._phase, self._total, self._kept, self._done = phase, total, kept, kept
        self._lines = LINES * kept // max(total, 1)
        self._start = self._spoke = self._clock()
        if kept:
            self._say(f"{self._name}, {phase}: {kept} of {total} responses were done before")
        if self._is_live and kept < total:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("responses, left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(f"{self._name}, {phase}", total=total, completed=kept)
            self._bar.start()

    def advance(self, count: int = 1) -> None:
        """So many responses more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        lines, now = LINES * self._done // max(self._total, 1), self._clock()
        if lines > self._lines and (now - self._spoke >= PAUSE_S or self._done >= self._total):
            self._lines, self._spoke = lines, now
            left = self.seconds_left()
            rest = f", left {duration_text(left)}" if left else ""
            self._say(f"{self._name}, {self._phase}: {self._done} of {self._total} responses{rest}")

    def seconds_left(self) -> float | None:
        """Of this phase, at its pace so far; None before anything was done in this attempt."""
        done = self._done - self._kept
        return (self._clock() - self._start) * (self._total - self._done) / done if done > 0 else None

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)
