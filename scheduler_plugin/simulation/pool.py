"""Workers' roles in virtual time: a scheduler's role state machine, answered by workers that only take time.

    orders ─> roles.advance ─> effects ─> (seconds later) answers ─> roles.advance ─> …

A worker is a device; an instance's is its first one. What differs from a scheduler's pool is who answers, not what is
decided: phases, the order of orders, when a drained worker stops and what a state offers are the same code. Invariant:
a device is held by one child at a time, so that an instance starts when all of its devices are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from libra.resources.types import Placement
from libra.scheduler_plugin import role_events, roles
from libra.scheduler_plugin.assignment import duties_of
from libra.scheduler_plugin.listing import in_order, is_there, list_worker
from libra.scheduler_plugin.roles import Duty, Limits, Phase, RoleState
from libra.scheduler_plugin.simulation.rollout import RolloutSimulation

TICK_SECONDS = 0.5
"""Between looks at workers that drain."""


@dataclass(frozen=True, slots=True)
class RoleSeconds:
    """What workers take: ``activate`` an engine, ``join`` training, ``stop`` either."""

    activate: float = 10.8
    join: float = 8.0
    stop: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker has to say to the state machine, at the time of its alarm."""

    worker: str
    event: role_events.Event


@dataclass(frozen=True, slots=True)
class Tick:
    """Look at workers that drain and at deadlines."""


class VirtualPool:
    """The workers of one simulated run. ``loading``: seconds that an engine of a TP degree takes to load weights.
    ``busy``: whether a worker takes part in the update that runs."""

    def __init__(
        self,
        rollout: RolloutSimulation,
        devices: Sequence[str],
        seconds: RoleSeconds,
        loading: Callable[[int], float],
        busy: Callable[[str], bool],
    ) -> None:
        self._sim, self._all, self._seconds = rollout, tuple(devices), seconds
        self._loading, self._busy = loading, busy
        patience = 180.0 + seconds.activate + seconds.join
        self._limits = Limits(start=patience, load=60.0 + loading(1), stop=15.0 + seconds.stop)
        self.states: dict[str, RoleState] = {}
        self.version = 0
        self._units: dict[str, tuple[str, ...]] = {}
        self._held: dict[str, tuple[str, ...]] = {}
        self._blocked: dict[str, role_events.Start] = {}
        self._changing: tuple[float, dict[str, Duty | None]] | None = None
        self._instant = self._ticking = False

    # Orders.

    def begin(self, placements: Iterable[Placement]) -> None:
        """The run's first roles, there at once."""
        self._instant = True
        for name in self._all:
            self.states[name] = RoleState()
            self._feed(name, role_events.Connected())
        self._order(placements, at_once=False)
        self._instant = False
        self._changing = None

    def change(self, placements: Iterable[Placement], at_once: bool = False) -> None:
        """Other roles from now on. ``at_once``: what runs is not drained, and nothing takes any time."""
        self._instant = at_once
        self._order(placements, at_once)
        self._instant = False
        self.tick()

    def published(self, version: int) -> None:
        """The run has new current weights."""
        self.version = version
        for name in self._all:
            self._feed(name, role_events.Published())

    # Questions.

    @property
    def installed(self) -> int | None:
        """The version that every instance which takes requests has loaded; None while there is none."""
        ready = [state for state in self.states.values() if state.offers and _rolls_out(state)]
        return min((state.version for state in ready if state.version is not None), default=None)

    def trains(self, devices: Iterable[str]) -> bool:
        """Whether every one of ``devices`` is ready to train."""
        found = (self.states[device] for device in devices)
        return all(state.phase is Phase.READY and state.duty == Duty("train") for state in found)

    def settled(self) -> float | None:
        """Seconds that the last change took, told once, when every role is there."""
        if self._changing is None:
            return None
        began, duties = self._changing
        if not all(is_there(self.states.get(name), duty) for name, duty in duties.items()):
            return None
        self._changing = None
        return self._sim.now - began

    # Time passes.

    def handle(self, what: Answer | Tick) -> None:
        """An alarm of this pool rang."""
        if isinstance(what, Answer):
            self._feed(what.worker, what.event)
        else:
            self._ticking = False
            self.tick()

    def tick(self) -> None:
        """Deadlines, and workers that have drained."""
        for name, state in list(self.states.items()):
            if state.phase is Phase.DRAINING and not self._busy(name):
                self._feed(name, role_events.Drained())
            elif state.deadline is not None or state.failures:
                self._feed(name, role_events.Tick())
        moving = (Phase.STARTING, Phase.DRAINING, Phase.STOPPING, Phase.FAILED)
        if not self._ticking and any(state.phase in moving for state in self.states.values()):
            self._ticking = True
            self._sim.alarm(self._sim.now + TICK_SECONDS, Tick())

    # How.

    def _order(self, placements: Iterable[Placement], at_once: bool) -> None:
        placed = list(placements)
        duties = duties_of(placed, self._all)
        self._units = {each.devices[0]: each.devices for each in placed if each.role == "rollout"}
        for name, held in list(self._held.items()):
            if duties[name] == self._wanted(name) and self._unit(name) != held:
                self._want(name, None, at_once=True)  # the same role with other devices starts again
        orders = in_order(duties, self._wanted)
        self._changing = (self._sim.now, dict(orders))
        for name, duty in orders:
            self._want(name, duty, at_once)

    def _want(self, name: str, duty: Duty | None, at_once: bool) -> None:
        self._feed(name, role_events.Want(duty))
        if at_once and self.states[name].phase is Phase.DRAINING:
            self._feed(name, role_events.Drained())

    def _feed(self, name: str, event: role_events.Event) -> None:
        before = self.states[name]
        after, effects = roles.advance(before, event, self._sim.now, self._limits, self.version)
        if after is before:
            return
        self.states[name] = after
        if (before.phase, before.offers) != (after.phase, after.offers):
            list_worker(self._sim, _address(name), name, after, after.slots)
        if isinstance(event, role_events.Reported) and event.state == "stopped":
            self._held.pop(name, None)
        for effect in effects:
            self._carry_out(name, after, effect)
        self._start_what_can()

    def _carry_out(self, name: str, state: RoleState, effect: role_events.Effect) -> None:
        match effect:
            case role_events.Start():
                self._blocked[name] = effect
            case role_events.Stop(epoch):
                began = self._blocked.pop(name, None) is None
                self._later(self._seconds.stop if began else 0.0, name, role_events.Reported(epoch, "stopped"))
            case role_events.Load(epoch):
                tp = state.duty.tp if state.duty is not None and state.duty.tp else 1
                seconds, version = self._loading(tp), self.version
                self._sim.load(_address(name), seconds, version)
                self._later(seconds, name, role_events.Loaded(epoch, version))
            case _:  # requests of what drains, or is evicted, are placed again as the table changes
                pass

    def _start_what_can(self) -> None:
        for name, start in list(self._blocked.items()):
            taken = {device for other, held in self._held.items() if other != name for device in held}
            if taken.isdisjoint(self._unit(name)) and self._blocked.pop(name, None) is not None:
                self._held[name] = self._unit(name)
                rolls_out = start.duty.role == "rollout"
                seconds = self._seconds.activate if rolls_out else self._seconds.join
                version = self.version if rolls_out else None
                self._later(seconds, name, role_events.Reported(start.epoch, "ready", version))

    def _later(self, seconds: float, name: str, event: role_events.Event) -> None:
        if seconds <= 0 or self._instant:
            self._feed(name, event)
        else:
            self._sim.alarm(self._sim.now + seconds, Answer(name, event))

    def _unit(self, name: str) -> tuple[str, ...]:
        return self._units.get(name, (name,))

    def _wanted(self, name: str) -> Duty | None:
        return self.states[name].wanted


def _rolls_out(state: RoleState) -> bool:
    return state.duty is not None and state.duty.role == "rollout"


def _address(device: str) -> str:
    return f"tcp://{device}"
