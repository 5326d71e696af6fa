"""What a run is doing, in the terminal: a live view, or one plain line per step where nobody watches.

It is fed with the very events that go to the run directory, and with the name of the phase that begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gspo.report.headline import duration_text

#: Names of phases as people say them; others are shown as they are.
PHASES = {
    "rollout": "sampling responses",
    "reward": "scoring",
    "old_logprobs": "old log-probs",
    "update": "updating",
    "evaluation": "evaluating",
    "checkpoint": "saving",
    "sft": "supervised update",
    "audit": "checking the rewards",
}
#: Lines printed over a supervised run when the output is no terminal.
SFT_LINES = 20
#: Steps that the estimate of the time left looks back on.
RECENT = 20

Event = Mapping[str, Any]


class TerminalReporter:
    """Shows the events of one run. Use as a context manager; ``console`` decides whether it is live.

    Args:
        console: where to print; default is standard output.
        live: overrides whether the view redraws itself; default is whether the console is a terminal.
        clock: seconds, for tests.
    """

    def __init__(
        self, console: Console | None = None, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console()
        self.is_live = self.console.is_terminal if live is None else live
        self._clock = clock
        self._live: Live | None = None
        self._start: dict[str, Any] = {}
        self._latest: dict[str, Event] = {}  # by event type
        self._phase: tuple[str, int | None, float] | None = None  # name, step, when it began
        self._stage = ""  # "step" or "sft": what the progress bar counts
        self._ticks: deque[float] = deque(maxlen=RECENT + 1)  # when the last steps (or supervised updates) ended

    def __enter__(self) -> TerminalReporter:
        if self.is_live:
            self._live = Live(
                console=self.console, get_renderable=self.render, refresh_per_second=4, vertical_overflow="visible"
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._phase = None
            self._live.stop()
            self._live = None

    def on_phase(self, name: str, step: int | None = None) -> None:
        """A phase begins: rollout, reward, old_logprobs, update, evaluation, checkpoint, sft, ..."""
        self._phase = (name, step, self._clock())

    def on_event(self, event: Event) -> None:
        """Takes one event as the writer returned it."""
        kind = event["type"]
        if kind == "start":
            self._start |= event
            self._ticks.clear()
        if kind in ("step", "sft"):
            if kind != self._stage:
                self._stage = kind
                self._ticks.clear()
            self._ticks.append(self._clock())
        self._latest[kind] = event
        line = self._line(event)
        if line is not None:
            # Above the live view what scrolls is what stays worth reading; the steps are in the view itself.
            self.console.print(line, soft_wrap=True, highlight=False)

    # Lines -----------------------------------------------------------------------------------------------------------

    def _line(self, event: Event) -> Text | None:
        kind = event["type"]
        if kind == "warning":
            return Text(f"warning: {event['message']}", style="yellow")
        if kind == "audit":
            return Text("\n".join(f"audit: {finding}" for finding in event["findings"]), style="yellow") or None
        if kind == "evaluation":
            return Text(evaluation_line(event))
        if kind == "calibration":
            return Text(f"bounds calibrated: clip_low {event['clip_low']:.3g}, clip_high {event['clip_high']:.3g}")
        if kind == "checkpoint":
            return Text(f"saved {event['path']}")
        if kind == "end":
            return Text(f"{event['status']} after {duration_text(event['seconds'])}")
        if self.is_live:
            return None
        if kind == "start":
            return Text(self._title())
        if kind == "step":
            return Text(step_line(event, self._start.get("num_steps"), self.seconds_left()))
        return self._sft_line(event) if kind == "sft" else None

    def _sft_line(self, event: Event) -> Text | None:
        total = self._start.get("num_sft_updates")
        every = max(1, (total or 200) // SFT_LINES)
        if event["update"] != 1 and event["update"] % every and event["update"] != total:
            return None
        left = self.seconds_left()
        of = f"/{total}" if total else ""
        tail = f"   left {duration_text(left)}" if left is not None else ""
        return Text(f"supervised update {event['update']}{of}   loss {_number(event['metrics'].get('loss'))}{tail}")

    # The live view ---------------------------------------------------------------------------------------------------

    def render(self) -> Panel:
        """The live view as it is now."""
        parts: list[Any] = [self._progress()]
        if "step" in self._latest:
            parts.append(step_table(self._latest["step"], self._start))
        elif "sft" in self._latest:
            metrics = self._latest["sft"]["metrics"]
            parts.append(Text(f"loss {_number(metrics.get('loss'))}   gradient {_number(metrics.get('grad_norm'))}"))
        if "evaluation" in self._latest:
            parts.append(Text(evaluation_line(self._latest["evaluation"]), style="bold"))
        return Panel(Group(*parts), title=self._title(), title_align="left", border_style="dim", padding=(0, 1))

    def _title(self) -> str:
        start = self._start
        parts = [str(start.get("name", "run"))]
        if start.get("objective"):
            parts.append(str(start["objective"]))
        if start.get("clip_low") is not None and start.get("clip_high") is not None:
            parts.append(f"bounds -{start['clip_low']:.3g} / +{start['clip_high']:.3g}")
        return " · ".join(parts)

    def _progress(self) -> Table:
        done, total = self._done_and_total()
        row = Table.grid(padding=(0, 2))
        row.add_column(no_wrap=True)
        row.add_column(width=24)
        row.add_column(no_wrap=True)
        noun = "update" if self._stage == "sft" else "step"
        left = self.seconds_left()
        row.add_row(
            f"{noun} {done}" + (f" of {total}" if total else ""),
            ProgressBar(total=total or None, completed=done, width=24) if total else "",
            f"{duration_text(left)} left" if left is not None else "",
            self._phase_text(),
        )
        return row

    def _phase_text(self) -> Any:
        if self._phase is None:
            return ""
        name, step, began = self._phase
        what = PHASES.get(name, name)
        where = f" (step {step})" if step is not None and name != "sft" else ""
        return Spinner("dots", Text(f"{what}{where} {self._clock() - began:.0f} s"))

    def _done_and_total(self) -> tuple[int, int | None]:
        if self._stage == "sft":
            return int(self._latest["sft"]["update"]), self._start.get("num_sft_updates")
        step = self._latest.get("step")
        return int(step["step"]) if step else 0, self._start.get("num_steps")

    def seconds_left(self) -> float | None:
        """From the pace of the latest steps, evaluations between them included; None before two have ended."""
        done, total = self._done_and_total()
        if not total or len(self._ticks) < 2:
            return None
        pace = (self._ticks[-1] - self._ticks[0]) / (len(self._ticks) - 1)
        return max(0.0, pace * (total - done))


def evaluation_line(event: Event) -> str:
    """``evaluation at step 20   pass@1 0.613 [0.560, 0.664]   pass@4 0.871   (400 responses to 100 prompts)``"""
    metrics = event["metrics"]
    low, high = metrics.get("pass@1/low"), metrics.get("pass@1/high")
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    unit = "update" if event["name"] == "sft" else "step"
    parts = [f"evaluation at {unit} {event['step']}", f"pass@1 {_number(metrics.get('pass@1'))}{interval}"]
    names = [name for name in metrics if name.startswith("pass@") and "/" not in name and name != "pass@1"]
    parts += [f"{name} {_number(metrics[name])}" for name in names]
    if metrics.get("difference") is not None:
        parts.append(f"change {metrics['difference']:+.3f}")
    if metrics.get("unscored_fraction"):
        parts.append(f"unscored {metrics['unscored_fraction']:.1%}")
    total = event["num_prompts"] * event["num_samples"]
    parts.append(f"({total} responses to {event['num_prompts']} prompts)")
    return "   ".join(parts)


def step_line(event: Event, num_steps: int | None = None, seconds_left: float | None = None) -> str:
    """One step in one line."""
    metrics = event["metrics"]
    total = event["seconds"].get("total")
    parts = [
        f"step {event['step']}" + (f"/{num_steps}" if num_steps else ""),
        f"reward {_number(metrics.get('reward/mean'))}",
        f"clipped {_share(metrics.get('clip_fraction/sequence'))}",
        f"log s {_small(metrics.get('log_ratio/q05'))} .. {_small(metrics.get('log_ratio/q95'))}",
        f"length {_number(metrics.get('length/mean'), 1)}",
        f"truncated {_share(metrics.get('truncated_fraction'))}",
        f"no signal {_of(metrics, 'groups/constant', 'groups/total')}",
        f"drift {_share(metrics['moe/drift'])}" if "moe/drift" in metrics else "",
        f"{total:.1f} s" if total is not None else "",
        f"left {duration_text(seconds_left)}" if seconds_left is not None else "",
    ]
    return "   ".join(part for part in parts if part)


def step_table(event: Event, start: Event) -> Table:
    """The numbers of one step in two columns of name and value."""
    metrics = event["metrics"]
    low, high = (metrics.get(name, start.get(name)) for name in ("clip_low", "clip_high"))
    seconds = "  ".join(f"{name} {value:.2f}" for name, value in event["seconds"].items() if name != "total")
    rows = [
        ("reward", f"{_number(metrics.get('reward/mean'))} ± {_number(metrics.get('reward/std'))}"),
        ("length", _lengths(metrics)),
        ("clipped", _clipped(metrics, "sequence") + " of responses"),
        ("", _clipped(metrics, "token") + " of tokens"),
        ("log s 5-95 %", "  ".join(f"{_small(metrics.get(f'log_ratio/q{q:02d}'))}" for q in (5, 25, 50, 75, 95))),
        ("bounds", "none" if low is None or high is None else f"-{low:.3g} to +{high:.3g}"),
        ("truncated", _share(metrics.get("truncated_fraction"))),
        ("no signal", _of(metrics, "groups/constant", "groups/total") + " groups"),
        ("mismatch", f"{_small(metrics.get('mismatch/mean_abs'))} mean  {_small(metrics.get('mismatch/max_abs'))} max"),
        ("gradient", f"{_number(metrics.get('grad_norm'))}   entropy {_number(metrics.get('entropy'))}"),
        ("unscored", _number(metrics.get("reward/unscored"), 0)),
        ("seconds", f"{seconds}  total {_number(event['seconds'].get('total'), 2)}"),
    ]
    if "moe/drift" in metrics:
        engine = f"   from the engine {_share(metrics.get('moe/engine_drift'))}"
        load = f"busiest {_number(metrics.get('moe/load_max'), 1)} even shares"
        rows += [("drift", f"{_share(metrics['moe/drift'])} of experts{engine}"), ("load", load)]
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
    for left, right in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(*left, *right)
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _of(metrics: Event, part: str, whole: str) -> str:
    return f"{_number(metrics.get(part), 0)}/{_number(metrics.get(whole), 0)}"


def _lengths(metrics: Event) -> str:
    shortest, mean, longest = (_number(metrics.get(f"length/{name}"), 0) for name in ("min", "mean", "max"))
    return f"{mean} tokens ({shortest} to {longest})"


def _clipped(metrics: Event, unit: str) -> str:
    whole, low, high = (_share(metrics.get(f"clip_fraction/{unit}{end}")) for end in ("", "_low", "_high"))
    return f"{whole} ({low} low, {high} high)"
