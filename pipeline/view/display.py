"""The two ways to show a run: a live panel on a terminal, plain lines elsewhere.

Invariants: both only read the monitor; whatever models and tools wrote is shown as text, never as markup or control
characters; a display draws at most a few times a second, however many events come.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from libra.pipeline.view import events as happened
from libra.pipeline.view.idle import BUSY, shares
from libra.pipeline.view.lines import (
    count,
    duration,
    event_line,
    failures_text,
    mean_reward,
    number,
    percent,
    progress_line,
    step_line,
)
from libra.pipeline.view.monitor import RunMonitor
from libra.pipeline.view.text import one_line, visible

_REFRESH_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


class Display(Protocol):
    """Shows a run as its events come."""

    def event(self, event: happened.Event, record: dict[str, Any] | None, monitor: RunMonitor) -> None:
        """``monitor`` has taken ``event`` in; ``record`` is its metrics record, if it made one."""

    def tick(self, monitor: RunMonitor) -> None:
        """Time has passed."""

    def close(self, monitor: RunMonitor) -> None:
        """The last event has come."""


def display_for(console: Console) -> Display:
    """A live panel if the console is a terminal, else plain lines."""
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay(console)


class PlainDisplay:
    """One line a step, and one for each thing worth telling; progress at most every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = float("-inf")

    def event(self, event: happened.Event, record: dict[str, Any] | None, monitor: RunMonitor) -> None:
        """Print the event's line, if it has one."""
        if isinstance(event, happened.StepTrained) and record is not None:
            self._print(step_line(record, monitor))
        elif isinstance(event, happened.Progress):
            if event.time - self._progress >= _PROGRESS_SECONDS:
                self._progress = event.time
                self._print(progress_line(event))
        elif line := event_line(event, monitor):
            self._print(line)

    def tick(self, monitor: RunMonitor) -> None:
        """Lines need no refreshing."""

    def close(self, monitor: RunMonitor) -> None:
        """Nothing is held."""

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True, highlight=False)


class LiveDisplay:
    """A panel that is redrawn in place, with notable lines above it."""

    def __init__(self, console: Console) -> None:
        self._rewards: deque[float] = deque(maxlen=_SPARK_WIDTH)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True)
        self._drawn = float("-inf")

    def event(self, event: happened.Event, record: dict[str, Any] | None, monitor: RunMonitor) -> None:
        """Redraw now and then; print the event's line above the panel, if it has one."""
        self._start()
        if record is not None and record["kind"] == "step" and record["reward"] is not None:
            self._rewards.append(record["reward"])
        elif line := event_line(event, monitor):
            self._live.console.print(Text(line), highlight=False)
        self.tick(monitor)

    def tick(self, monitor: RunMonitor) -> None:
        """Redraw if half a second has passed."""
        self._start()
        if monitor.now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = monitor.now
            self._live.update(panel(monitor, tuple(self._rewards)), refresh=True)

    def close(self, monitor: RunMonitor) -> None:
        """Leave the last state standing."""
        if self._live.is_started:
            self._live.update(panel(monitor, tuple(self._rewards)), refresh=True)
            self._live.stop()

    def _start(self) -> None:
        """Begin to draw with the first sign of life, so that a display that is never used leaves the terminal alone."""
        if not self._live.is_started:
            self._live.start()


def panel(monitor: RunMonitor, rewards: tuple[float, ...] = ()) -> RenderableType:
    """The whole display of a run at this instant."""
    left = monitor.seconds_left
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(monitor, rewards):
        table.add_row(label, text)
    times = duration(monitor.wall_seconds) + (f", about {duration(left)} left" if left else "")
    title = Text(f"{visible(monitor.name)}  step {monitor.version}/{monitor.steps}  {times}")
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=max(monitor.steps, 1), completed=monitor.version))
    return Panel(Group(bar, table), title=title, title_align="left", border_style="cyan", padding=(0, 1))


def _rows(monitor: RunMonitor, rewards: tuple[float, ...]) -> list[tuple[str, Text]]:
    rows: list[tuple[str, Text]] = []
    if monitor.version == 0 and monitor.progress is not None:
        rows.append(("cold start", Text(progress_line(monitor.progress))))
    reward = Text(f"{number(monitor.reward)}  mean {number(monitor.reward_ema)}  ")
    reward.append(spark(rewards), style="green")
    rows.append(("reward", reward))
    rows.append(("held-out", Text(" → ".join(mean_reward(point["reward"]) for point in monitor.heldout[-6:]) or "-")))
    p50, p99, longest = monitor.length_quantiles()
    rows.append(("length", Text(f"p50 {count(p50)}  p99 {count(p99)}  max {count(longest)} tokens")))
    running = ", ".join(f"{monitor.running(name)} {name}" for name in ("rollout", "tool", "reward", "train"))
    rows.append(("running", Text(f"{running}; {count(monitor.tokens_per_second)} tok/s sampled")))
    skipped = f", {monitor.groups['skipped']} groups without spread" if monitor.groups["skipped"] else ""
    rows.append(("staleness", Text(f"≤ {monitor.staleness_max}{skipped}")))
    rows.extend(_idle_rows(monitor))
    if monitor.outcome == "unfinished":
        rows.extend(("waiting", Text(_wait_text(wait, monitor.now))) for wait in monitor.idle.waits[-3:])
    if measures := _measures(monitor):
        rows.append(("learning", Text(measures)))
    if failures := failures_text(monitor):
        rows.append(("failures", Text(failures, style="red")))
    broken = [role for role in monitor.roles.values() if role.state not in ("ready", "stopped")]
    rows.extend((f"{role.role} worker", Text(one_line(f"{role.worker}: {role.state}"))) for role in broken[:4])
    if monitor.dashboard and monitor.outcome == "unfinished":
        rows.append(("dashboard", Text().append(visible(monitor.dashboard), style="blue underline")))
    return rows


def _idle_rows(monitor: RunMonitor) -> list[tuple[str, Text]]:
    rows = []
    measured = shares(monitor.idle.seconds())
    for resource in ("rollout", "tool", "train"):
        causes = dict(measured.get(resource, {}))
        busy = causes.pop(BUSY, 0.0)
        if busy or causes:
            waits = ", ".join(f"{cause} {percent(share)}" for cause, share in list(causes.items())[:4])
            text = Text(f"busy {percent(busy)}" + (f"; waits for {waits}" if waits else ""))
            rows.append((f"{resource} time", text))
    return rows


def _wait_text(wait: happened.WaitStarted, now: float) -> str:
    limit = f" of {duration(wait.deadline)}" if wait.deadline else ""
    by = f"; unblocked by {wait.unblocked_by}" if wait.unblocked_by else ""
    return one_line(f"{wait.who}: {wait.detail or wait.cause} ({duration(max(now - wait.time, 0))}{limit}){by}")


_MEASURES = {
    "loss": "loss",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "clip_share": "clipped",
    "logprob_gap_mean": "|Δlogp|",
    "logprob_gap_max": "max",
}


def _measures(monitor: RunMonitor) -> str:
    known = ((label, monitor.measures.get(name)) for name, label in _MEASURES.items())
    return "  ".join(f"{label} {number(float(value))}" for label, value in known if value is not None)


def spark(values: tuple[float, ...]) -> str:
    """Values as a row of bars between their least and greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
