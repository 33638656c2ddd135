"""The view of one run: events in; display, ``metrics.jsonl`` and ``summary.json`` out.

Invariant: nothing here raises into the run loop. A part that fails (a full disk, a closed terminal) is reported once
and left out from then on, and the rest goes on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from libra.pipeline.view.display import Display, display_for
from libra.pipeline.view.events import Event, RunStarted
from libra.pipeline.view.files import MetricsFile, read_metrics, write_summary
from libra.pipeline.view.monitor import Heldout, RunMonitor
from libra.pipeline.view.text import explained, one_line

logger = logging.getLogger(__name__)
T = TypeVar("T")


class View:
    """Call `emit` for every event, `tick` now and then, `close` at the end. One thread."""

    def __init__(
        self, run_dir: Path, display: Display | None = None, resume: bool = False, name: str = "", steps: int = 0
    ) -> None:
        """``run_dir`` exists. ``display``: where to show the run (None: nowhere). ``resume``: go on counting from the
        folder's metrics; the summary that is there stays as it is unless the run begins (`RunStarted`). ``name`` and
        ``steps`` are those of the run until it has said them itself."""
        self._run_dir = run_dir
        self._display = display
        self._broken: set[str] = set()
        self._closed = False
        self.monitor = RunMonitor(time.time())
        self.monitor.name, self.monitor.steps = name or run_dir.name, steps
        self._summarise = not resume
        if resume:
            self._guarded("metrics", self._restore)
        self._metrics = self._guarded("metrics", lambda: MetricsFile(run_dir))

    def emit(self, event: Event) -> None:
        """Take an event in and show it."""
        if isinstance(event, RunStarted):
            self._summarise = True
        record = self._guarded("monitor", lambda: self.monitor.apply(event))
        metrics, display = self._metrics, self._display
        if record is not None and metrics is not None:
            self._guarded("metrics", lambda: metrics.append(record))
        if display is not None:
            self._guarded("display", lambda: display.event(event, record, self.monitor))

    def tick(self) -> None:
        """Let the display show that time passes; call it about twice a second."""
        display = self._display
        self.monitor.advance(time.time())
        if display is not None:
            self._guarded("display", lambda: display.tick(self.monitor))

    def close(self) -> None:
        """Write the summary and close the display; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        metrics, display = self._metrics, self._display
        if self._summarise:
            self._guarded("summary", lambda: write_summary(self._run_dir, self.monitor.summary()))
        if metrics is not None:
            self._guarded("metrics", metrics.close)
        if display is not None:
            self._guarded("display", lambda: display.close(self.monitor))

    def _restore(self) -> None:
        metrics = read_metrics(self._run_dir)
        points = [Heldout(**{key: point[key] for key in Heldout.__annotations__}) for point in metrics.evaluations]  # type: ignore[typeddict-item]
        counted = [record for record in (*metrics.steps[-1:], *metrics.evaluations) if "totals" in record]
        newest = max(counted, key=lambda record: float(record["time"]), default=None)
        self.monitor.restore(
            step=metrics.steps[-1]["step"] if metrics.steps else 0,
            totals=None if newest is None else newest["totals"],
            evaluations=points,
        )

    def _guarded(self, part: str, action: Callable[[], T]) -> T | None:
        """The action's result; None once the part has failed. Watching a run must never end it, hence the catch-all."""
        if part in self._broken:
            return None
        try:
            return action()
        except BrokenPipeError:
            self._broken.add(part)
            logger.warning("nobody reads the %s of run %s any more; the run goes on", part, self._run_dir)
            return None
        except Exception as error:
            self._broken.add(part)
            why = one_line(explained(error))
            logger.error("the %s of run %s failed (%s); the run goes on without it", part, self._run_dir, why)
            logger.debug("the %s of run %s failed so:", part, self._run_dir, exc_info=True)
            return None


class _StandardOutput(Console):
    """Standard output, whose reader may go away without ending the run."""

    def on_broken_pipe(self) -> None:
        """Called by rich, which would end the process."""
        raise BrokenPipeError("standard output is closed")


def terminal() -> Display:
    """The display for this process: live on a terminal, plain lines elsewhere; on standard output, where characters
    that its encoding does not have become question marks."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return display_for(_StandardOutput(file=sys.stdout))
