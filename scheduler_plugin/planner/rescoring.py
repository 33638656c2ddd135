"""Simulating plans in a child process, under a deadline.

    parent ──Job──> child: candidates, then one simulation after another ──scores, as they come──> parent

The child does everything that costs: candidates too. It sends each score as it has it, so that at the deadline, or
when it hangs in one simulation, what was found until then stands. Messages are pickled: both ends are this program, on
a private pipe. Invariants: `Rescoring.run` returns within about its seconds; no child outlives the deadline, whatever
becomes of the parent (an alarm timer of its own ends it), nor `Rescoring.cancel`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from threading import Lock, Timer
from typing import IO, Any

from libra.resources.errors import ClusterError
from libra.scheduler_plugin.planner.rescore import SECONDS, Job, Rescored

COMMAND = (sys.executable, "-m", "libra.scheduler_plugin.planner.rescoring")
"""The child."""
_GRACE_SECONDS = 1.0
"""How much later than its parent's deadline a child ends itself."""
_NICE = 5
"""The child makes way for what runs beside it."""


class Rescoring:
    """One simulation of plans at a time, for at most ``seconds``. `run` blocks and belongs in a thread; `cancel` may be
    called from any other."""

    def __init__(self, seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> None:
        self.seconds = seconds
        self._command = tuple(command)
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def run(self, job: Job) -> Rescored | None:
        """The best plan as simulated; None when no candidate was simulated in time, or after `cancel`. Raises
        `ClusterError` with the child's own words when it fails."""
        began = time.monotonic()
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._cancelled:
                    return None
                child = self._child = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
                )
            timer = Timer(max(0.0, self.seconds - (time.monotonic() - began)), child.kill)
            timer.start()
            try:
                found = _exchange(child, job, self.seconds)
            finally:
                timer.cancel()
                child.kill()
                child.wait()
                with self._lock:
                    self._child = None
            killed = self._cancelled or time.monotonic() - began >= self.seconds
            if found.error is not None and not killed:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip()[-500:] or "it said nothing"
                raise ClusterError(
                    f"the simulation of plans failed in its child process ({found.error}): {said}; it can be turned "
                    "off (libra plan --simulate 0, planner.rescore_seconds: 0)"
                )
        return None if self._cancelled else job.judged(found.plans, found.scores)

    def cancel(self) -> None:
        """End the child, now and for good: later runs return None at once."""
        with self._lock:
            self._cancelled = True
            if self._child is not None:
                self._child.kill()


class _Heard:
    """What the child has sent; ``error`` when it did not say that this was all."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.scores: list[float] = []
        self.error: str | None = None


def _exchange(child: subprocess.Popen[bytes], job: Job, seconds: float) -> _Heard:
    """Send the job, then listen until the child has ended or was killed."""
    assert child.stdin is not None
    assert child.stdout is not None
    heard = _Heard()
    try:  # around the pipes too: closing one flushes it, which fails again when the child died before it had read all
        with child.stdin as to, child.stdout as answers:
            pickle.dump((job, seconds), to)
            to.close()
            heard.plans = pickle.load(answers)  # noqa: S301 - our own child
            while (score := pickle.load(answers)) is not None:  # noqa: S301 - our own child
                heard.scores.append(score)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        heard.error = f"{type(error).__name__} after {len(heard.scores)} score(s)"
    return heard


def _serve(source: IO[bytes], to: IO[bytes]) -> None:
    """The child: candidates first, then a score each while there is time; None says that all is said."""
    began = time.monotonic()
    job, seconds = pickle.load(source)  # noqa: S301 - our own parent
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_SECONDS)
    plans = job.plans()
    _send(plans, to)
    for score in job.scores(plans):
        _send(score, to)
        if time.monotonic() - began > seconds:
            break
    _send(None, to)


def _send(value: object, to: IO[bytes]) -> None:
    pickle.dump(value, to)
    to.flush()


if __name__ == "__main__":
    os.nice(_NICE)
    _serve(sys.stdin.buffer, sys.stdout.buffer)
