"""Corrections at run time: how far predictions are off, followed with bounded steps, forgotten when things change.

The log of measured/predicted is averaged exponentially. A CUSUM test (Page 1954) on its deviations finds a lasting
change; then the average restarts from the recent values instead of creeping towards them. Invariants: pure; the factor
stays within ``1/bound`` and ``bound``; one wild measurement moves it by at most ``step``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp, log
from statistics import median


@dataclass(slots=True)
class Correction:
    """A factor on predictions. ``weight``: of a new measurement. ``step``: largest change of the log factor by one.
    ``bound``: largest factor. ``drift``, ``threshold``: CUSUM slack and alarm level, in units of log ratio."""

    weight: float = 0.1
    step: float = 0.1
    bound: float = 4.0
    drift: float = 0.05
    threshold: float = 0.5
    resets: int = 0
    _log: float = 0.0
    _seen: int = 0
    _up: float = 0.0
    _down: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=5))

    @property
    def factor(self) -> float:
        """measured ≈ factor · predicted."""
        return exp(self._log)

    def observe(self, predicted: float, measured: float) -> bool:
        """Take in one measurement (seconds, both above zero); returns whether a change point was found."""
        limit = log(self.bound)
        ratio = min(limit, max(-limit, log(measured / predicted)))
        self._recent.append(ratio)
        self._seen += 1
        deviation = ratio - self._log
        # Winsorised, so that a single outlier cannot raise the alarm.
        bounded = min(0.25, max(-0.25, deviation))
        self._up = max(0.0, self._up + bounded - self.drift)
        self._down = max(0.0, self._down - bounded - self.drift)
        if max(self._up, self._down) > self.threshold:
            self._log = median(list(self._recent)[-3:])
            self._up = self._down = 0.0
            self.resets += 1
            return True
        weight = max(self.weight, 1 / self._seen)
        self._log += min(self.step, max(-self.step, weight * deviation))
        return False
