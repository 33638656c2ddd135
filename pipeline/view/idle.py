"""Where the time of each resource goes: busy, or idle and waiting for what.

A resource consists of *units*: itself, or its instances once `InFlight` names them (``rollout/a``). Invariants: for
every resource, busy seconds and the idle seconds of all causes add up to its unit-seconds; every unit is either busy or
idle at any instant; splitting an interval in two changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from libra.pipeline.view.events import InFlight, WaitEnded, WaitStarted

BUSY = "busy"
OTHER = "other"
RESOURCES = ("rollout", "tool", "reward", "train")
_NATURAL_CAUSE = {"tool": "rollout", "reward": "rollout"}
"""What a resource waits for when no wait says so: tools and rewards wait for the policy to act."""

Seconds = dict[str, dict[str, float]]
"""Unit-seconds by resource and by ``busy`` or cause."""


class IdleAccount:
    """Time-weighted states of the resources, advanced by events."""

    def __init__(self, start: float, earlier: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """``start`` is Unix seconds; ``earlier`` are seconds counted before (a resumed run)."""
        self._now = start
        self._counts: dict[str, int] = dict.fromkeys(RESOURCES, 0)
        self._waits: dict[str, WaitStarted] = {}
        self._seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for resource, causes in (earlier or {}).items():
            self._seconds[resource].update(causes)

    def advance(self, time: float) -> None:
        """Count the time until ``time`` under the present states; a time in the past counts nothing."""
        elapsed = time - self._now
        if elapsed <= 0:
            return
        self._now = time
        for unit, count in self._counts.items():
            resource = unit.partition("/")[0]
            self._seconds[resource][BUSY if count else self.cause(resource)] += elapsed

    def in_flight(self, event: InFlight) -> None:
        """New counts hold from ``event.time``; a unit that is not named keeps its count."""
        self.advance(event.time)
        for unit, count in event.counts.items():
            resource, slash, _ = unit.partition("/")
            if slash:
                self._counts.pop(resource, None)
            self._counts[unit] = count

    def wait_started(self, event: WaitStarted) -> None:
        """The latest wait of a resource that has not ended names the cause of its idle time."""
        self.advance(event.time)
        self._waits.pop(event.id, None)
        self._waits[event.id] = event

    def wait_ended(self, event: WaitEnded) -> None:
        """The wait before it, if it still lasts, names the cause again."""
        self.advance(event.time)
        self._waits.pop(event.id, None)

    def cause(self, resource: str) -> str:
        """What ``resource`` waits for now, were it idle."""
        wait = next((wait for wait in reversed(self._waits.values()) if wait.who == resource), None)
        return wait.cause if wait else _NATURAL_CAUSE.get(resource, OTHER)

    def busy(self, resource: str) -> bool:
        """Whether any unit of the resource is busy now."""
        return any(count > 0 for unit, count in self._counts.items() if unit.partition("/")[0] == resource)

    def count(self, resource: str) -> int:
        """What runs on the resource now, over its units."""
        return sum(count for unit, count in self._counts.items() if unit.partition("/")[0] == resource)

    @property
    def waits(self) -> tuple[WaitStarted, ...]:
        """The waits that last, oldest first."""
        return tuple(self._waits.values())

    def seconds(self) -> Seconds:
        """Unit-seconds so far."""
        return {resource: dict(causes) for resource, causes in self._seconds.items()}


def difference(later: Seconds, earlier: Seconds) -> Seconds:
    """What was counted between two readings; causes without time are left out."""
    return {
        resource: {
            cause: seconds - earlier.get(resource, {}).get(cause, 0.0)
            for cause, seconds in causes.items()
            if seconds > earlier.get(resource, {}).get(cause, 0.0)
        }
        for resource, causes in later.items()
    }


def shares(seconds: Seconds) -> Seconds:
    """Each resource's seconds as shares of its total, busy first, then the causes by size."""
    result = {}
    for resource, causes in seconds.items():
        total = sum(causes.values())
        ordered = sorted(causes.items(), key=lambda item: (item[0] != BUSY, -item[1]))
        result[resource] = {cause: value / total for cause, value in ordered} if total else {}
    return result
