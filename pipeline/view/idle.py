"""Where the time of each resource goes: busy, or idle and waiting for what.

A resource consists of *units*: itself, or its instances once `InFlight` names them (``rollout/a``). Invariants: for
every resource, busy seconds and the idle seconds of all causes add up to its unit-seconds; every unit is either busy or
idle at any instant; splitting an interval in two changes nothing; work told afterwards turns idle time into busy time
and changes no total.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from libra.pipeline.view.events import InFlight, WaitEnded, WaitStarted, Worked

BUSY = "busy"
OTHER = "other"
RESOURCES = ("rollout", "tool", "reward", "train")
_NATURAL_CAUSE = {"tool": "rollout", "reward": "rollout"}
"""What a resource waits for when no wait says so: tools and rewards wait for the policy to act."""
_STRETCHES = 4096
"""Idle stretches of a unit that are remembered, to be turned into busy time by `IdleAccount.worked`."""

_NOTHING = 1e-9

Seconds = dict[str, dict[str, float]]
"""Unit-seconds by resource and by ``busy`` or cause."""


@dataclass(slots=True)
class _Stretch:
    """Idle time of a unit, counted under one cause."""

    begin: float
    end: float
    cause: str


class IdleAccount:
    """Time-weighted states of the resources, advanced by events."""

    def __init__(self, start: float, earlier: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """``start`` is Unix seconds; ``earlier`` are seconds counted before (a resumed run)."""
        self._now = start
        self._counts: dict[str, int] = dict.fromkeys(RESOURCES, 0)
        self._idle: defaultdict[str, deque[_Stretch]] = defaultdict(lambda: deque(maxlen=_STRETCHES))
        self._waits: dict[str, WaitStarted] = {}
        self.phase: Literal["start", "end"] | None = None
        """While set, what a resource waits for when no wait says so."""
        self._seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for resource, causes in (earlier or {}).items():
            self._seconds[resource].update(causes)

    def advance(self, time: float) -> None:
        """Count the time until ``time`` under the present states; a time in the past counts nothing."""
        before, self._now = self._now, max(self._now, time)
        if self._now == before:
            return
        for unit, count in self._counts.items():
            resource = unit.partition("/")[0]
            cause = BUSY if count else self.cause(resource)
            self._seconds[resource][cause] += self._now - before
            if not count:
                self._remember(unit, before, self._now, cause)

    def worked(self, event: Worked) -> None:
        """What was counted as the unit's idle time between ``started`` and ``ended`` was busy time; what lies after
        the present counts nothing, and so does what is too long ago to be remembered."""
        self.advance(event.time)
        if not self._know(event.unit):
            return
        seconds = self._seconds[event.unit.partition("/")[0]]
        stretches = self._idle[event.unit]
        kept: list[_Stretch] = []
        while stretches and stretches[-1].end > event.started:
            stretch = stretches.pop()
            begin, end = max(stretch.begin, event.started), min(stretch.end, event.ended)
            if end <= begin:
                kept.append(stretch)
                continue
            seconds[stretch.cause] -= end - begin
            seconds[BUSY] += end - begin
            if stretch.end > end:
                kept.append(_Stretch(end, stretch.end, stretch.cause))
            if stretch.begin < begin:
                kept.append(_Stretch(stretch.begin, begin, stretch.cause))
        stretches.extend(reversed(kept))

    def in_flight(self, event: InFlight) -> None:
        """New counts hold from ``event.time``; a unit that is not named keeps its count."""
        self.advance(event.time)
        for unit, count in event.counts.items():
            if self._know(unit):
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
        return wait.cause if wait else self.phase or _NATURAL_CAUSE.get(resource, OTHER)

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

    def _know(self, unit: str) -> bool:
        """Whether the unit is accounted: from when it is first named on; the first instance takes its resource's place,
        which is not accounted as a whole from then on."""
        if unit in self._counts:
            return True
        resource, slash, _ = unit.partition("/")
        if slash and resource in self._counts:
            del self._counts[resource]
            self._idle[unit] = self._idle.pop(resource, deque(maxlen=_STRETCHES))
        if slash or not any(known.startswith(f"{resource}/") for known in self._counts):
            self._counts[unit] = 0
        return unit in self._counts

    def _remember(self, unit: str, begin: float, end: float, cause: str) -> None:
        stretches = self._idle[unit]
        if stretches and stretches[-1].end == begin and stretches[-1].cause == cause:
            stretches[-1].end = end
        else:
            stretches.append(_Stretch(begin, end, cause))


def difference(later: Seconds, earlier: Seconds) -> Seconds:
    """What was counted between two readings. Causes without time are left out, and so are those that lost time to work
    told afterwards."""
    return {
        resource: {
            cause: grown
            for cause, seconds in causes.items()
            if (grown := seconds - earlier.get(resource, {}).get(cause, 0.0)) > _NOTHING
        }
        for resource, causes in later.items()
    }


def shares(seconds: Seconds) -> Seconds:
    """Each resource's seconds as shares of its total, busy first, then the causes by size."""
    result = {}
    for resource, causes in seconds.items():
        ordered = sorted(causes.items(), key=lambda item: (item[0] != BUSY, -item[1]))
        ordered = [(cause, value) for cause, value in ordered if value > _NOTHING]
        total = sum(value for _, value in ordered)
        result[resource] = {cause: value / total for cause, value in ordered} if total else {}
    return result
