"""Drives the role state machine of every worker: carries out what it asks, publishes what it offers.

Invariants: what a worker offers is a function of its state (`_tags`), brought about after every step and before any
other effect of that step; the routing table lists exactly the workers that offer. Workers are known by name, which a
restarted worker keeps while its address changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from libra.resources import wire
from libra.resources.errors import ClusterError
from libra.resources.tags import GUEST, node_of
from libra.resources.types import InstanceFacts
from libra.scheduler_plugin import role_events, roles
from libra.scheduler_plugin.assignment import Candidate, candidate, fill
from libra.scheduler_plugin.claims import Claim
from libra.scheduler_plugin.listing import list_worker
from libra.scheduler_plugin.retag import GUEST_QUANTITY, offered, retag, take_away, wake
from libra.scheduler_plugin.roles import Duty, Phase, RoleState

_NO_GUESTS = ("rollout", "train")


class Pool:
    """The workers of one scheduler. ``tell(event, **fields)`` sends an event to the driver."""

    def __init__(self, scheduler: Any, tell: Callable[..., None]) -> None:
        self._scheduler, self._tell = scheduler, tell
        self._claim: Claim | None = None
        self._names: dict[str, str] = {}
        self._epoch = 0
        self.states: dict[str, RoleState] = {}

    # A run comes and goes.

    def candidates(self) -> list[Candidate]:
        """The connected workers as candidates for roles."""
        return [candidate(str(ws.name), ws.nthreads, ws.resources) for ws in self._scheduler.workers.values()]

    def begin(self, claim: Claim, duties: Mapping[str, Duty]) -> None:
        """Start the roles of a run."""
        self._claim = claim
        for name, duty in duties.items():
            self._feed(name, role_events.Want(duty))

    def end(self) -> None:
        """Stop every role, without waiting for tasks, and have what workers keep for the run freed."""
        for name in list(self.states):
            self._feed(name, role_events.RunEnds())
            if self.states[name].phase is Phase.ABSENT:
                del self.states[name]

    def finish(self) -> None:
        """The run is over."""
        self._claim = None

    @property
    def at_rest(self) -> bool:
        """Whether no worker has a role or is about to."""
        return all(state.phase in (Phase.IDLE, Phase.ABSENT) for state in self.states.values())

    @property
    def unfinished(self) -> list[str]:
        """What has not stopped yet, for messages."""
        return [
            f"{n} ({s.duty or 'no role'}: {s.phase})"
            for n, s in self.states.items()
            if s.phase not in ("idle", "absent")
        ]

    # Workers come and go.

    def add_worker(self, address: str) -> None:
        """A worker has joined: it goes on with its role, fills a vacant one, or waits."""
        worker = self._scheduler.workers[address]
        name = self._names[address] = str(worker.name)
        if name not in self.states:
            self.states[name] = RoleState(epoch=self._epoch)
        self._feed(name, role_events.Connected())
        self._fill_vacancies()

    def remove_worker(self, address: str) -> None:
        """A worker has left: its role waits for it to come back, unless a spare worker can take over."""
        name = self._names.pop(address, None)
        if name is None or name in self._names.values():
            return
        if self._claim is not None:
            self._claim.table.withdraw(address)
        self._feed(name, role_events.Disconnected())
        if self.states[name].wanted is None:
            del self.states[name]
        self._fill_vacancies()
        if self._claim is not None:
            self._claim.rebind_waiting()

    def off_limits(self, address: str) -> bool:
        """Whether a worker has, or is to have, a role that takes no guests."""
        state = self.states.get(self._names.get(address, ""))
        return state is not None and not _takes_guests(state)

    def has_role(self, address: str) -> bool:
        """Whether a worker has, or is to have, a role."""
        state = self.states.get(self._names.get(address, ""))
        return state is not None and (state.duty or state.wanted) is not None

    # Orders and reports.

    def assign(self, worker: str, duty: Duty | None) -> None:
        """Give a worker (name or address) another role, or none. `ClusterError` if it cannot take it."""
        name = self._names.get(worker, worker)
        if name not in self.states:
            raise ClusterError(f"there is no worker {worker!r}; the cluster has {', '.join(sorted(self.states))}")
        able = next((c for c in self.candidates() if c.name == name), None)
        if duty is not None and able is not None and not able.may(duty.role):
            raise ClusterError(f"worker {name} may take {', '.join(able.capable)} only, not {duty.role}")
        self._feed(name, role_events.Want(duty))

    def reported(self, address: str, report: role_events.Reported) -> None:
        """A worker's `ROLE_STATE`."""
        if (name := self._names.get(address)) is not None:
            version = None if report.version is None or report.version < 0 else report.version
            self._feed(name, replace(report, version=version))

    def loaded(self, address: str, loaded: role_events.Loaded) -> None:
        """A worker's `WEIGHTS_LOADED`."""
        name = self._names.get(address)
        if name is not None and loaded.epoch == self.states[name].epoch:
            self._tell("weights", worker=name, version=loaded.version, error=loaded.error)
            self._feed(name, loaded)

    def published(self) -> None:
        """The run has new current weights."""
        for name in list(self.states):
            self._feed(name, role_events.Published())

    def tick(self) -> None:
        """Deadlines, and workers that have drained."""
        for name, state in list(self.states.items()):
            if state.phase is Phase.DRAINING and self._drained(name, state):
                self._feed(name, role_events.Drained())
            elif state.deadline is not None or state.failures:
                self._feed(name, role_events.Tick())

    def refresh(self) -> None:
        """Publish what every worker offers, for workers that joined before the plugin did."""
        for address in list(self._scheduler.workers):
            if address not in self._names:
                self.add_worker(address)

    # How.

    def _feed(self, name: str, event: role_events.Event) -> None:
        before = self.states[name]
        claim = self._claim
        limits = claim.limits if claim is not None else roles.Limits()
        version = claim.version if claim is not None else None
        after, effects = roles.advance(before, event, time.monotonic(), limits, version)
        if after is before:
            return
        self.states[name] = after
        self._epoch = max(self._epoch, after.epoch)
        worker = self._worker(name)
        if worker is not None:
            self._publish(worker, after)
        for effect in effects:
            self._carry_out(name, worker, effect)
        shown = (before.phase, before.duty, before.error, _loads(before))
        if shown != (after.phase, after.duty, after.error, _loads(after)):
            self._announce(name, before, after)

    def _carry_out(self, name: str, worker: Any, effect: role_events.Effect) -> None:
        if isinstance(effect, role_events.Lost):
            self._tell("lost", worker=name, role=effect.duty.role)
        if worker is None:
            return
        match effect:
            case role_events.Start(epoch, duty):
                assert self._claim is not None, "a role starts within a run only"
                self._send(
                    worker,
                    wire.START_ROLE,
                    role=duty.role,
                    epoch=epoch,
                    spec=self._claim.message,
                    tp=duty.tp or 1,
                    weights=self._claim.weights,
                )
            case role_events.Stop(epoch, run_ends):
                self._send(worker, wire.STOP_ROLE, epoch=epoch, run_ends=run_ends)
            case role_events.Load(epoch):
                assert self._claim is not None, "weights are loaded within a run only"
                self._send(worker, wire.LOAD_WEIGHTS, epoch=epoch, weights=self._claim.weights)
            case role_events.Drain(epoch, drains):
                self._send(worker, wire.DRAIN, epoch=epoch, drains=drains)
            case role_events.Evict(duty):
                take_away(self._scheduler, worker, duty.tag)

    def _publish(self, worker: Any, state: RoleState) -> None:
        """Make the worker offer what its state says: routing table, then Dask's books, then the tasks that wait."""
        tags = self._tags(worker, state)
        if tags == offered(worker) and worker.resources.get(GUEST) is not None:
            return
        claim = self._claim
        if claim is not None:
            slots = state.slots or (_slots(worker, state.duty) if state.duty is not None else 0)
            facts = InstanceFacts(node_of(worker.resources, worker.host), state.kv_room)
            list_worker(claim.table, worker.address, str(worker.name), state, slots, facts)
        retag(self._scheduler, worker, tags)
        if claim is not None:
            claim.rebind_waiting()
        wake(self._scheduler, worker)

    def _tags(self, worker: Any, state: RoleState) -> dict[str, float]:
        tags: dict[str, float] = {}
        if state.offers and state.duty is not None:
            tags[state.duty.tag] = float(_slots(worker, state.duty))
        if _takes_guests(state):
            tags[GUEST] = float(GUEST_QUANTITY)
        return tags

    def _announce(self, name: str, before: RoleState, after: RoleState) -> None:
        duty = after.duty or before.duty or after.wanted
        if duty is not None:
            self._tell(
                "role",
                worker=name,
                role=duty.role,
                state=str(after.phase),
                version=after.version,
                loads=_loads(after),
                error=after.error,
                given_up=after.given_up,
            )

    def _fill_vacancies(self) -> None:
        away = {n: s.wanted for n, s in self.states.items() if s.phase is Phase.ABSENT and s.wanted is not None}
        if not away or self._claim is None:
            return
        spare = [
            worker
            for worker in self.candidates()
            if (state := self.states.get(worker.name)) and state.phase is Phase.IDLE and state.wanted is None
        ]
        for name, duty in fill(list(away.values()), spare).items():
            left = next(n for n, d in away.items() if d == duty)
            del away[left], self.states[left]
            self._feed(name, role_events.Want(duty))

    def _drained(self, name: str, state: RoleState) -> bool:
        worker = self._worker(name)
        if worker is None or state.duty is None:
            return True
        tag = state.duty.tag
        return not any(tag in (task.resource_restrictions or ()) for task in worker.processing)

    def _worker(self, name: str) -> Any:
        """The connected worker (``WorkerState``) of that name, or None."""
        address = next((address for address, known in self._names.items() if known == name), None)
        return None if address is None else self._scheduler.workers.get(address)

    def _send(self, worker: Any, op: str, **fields: Any) -> None:
        self._scheduler.worker_send(worker.address, {"op": op, **fields})


def _loads(state: RoleState) -> int | None:
    """The version that a starting engine will look for."""
    return state.asked if state.phase is Phase.STARTING else None


def _takes_guests(state: RoleState) -> bool:
    return all(duty is None or duty.role not in _NO_GUESTS for duty in (state.wanted, state.duty))


def _slots(worker: Any, duty: Duty) -> int:
    return candidate(str(worker.name), worker.nthreads, worker.resources).slots(duty.role)
