"""The life of a worker's role, as a pure state machine: no clock, no I/O, no Dask.

    absent ──▶ idle ──▶ starting ──▶ ready ──▶ draining ──▶ stopping ──▶ idle, or starting the next role
                 ▲          │          │                       ▲  │
                 │          └─ failed ◀┴──── deadline ─────────┘  └──▶ failed ──(back-off)──▶ starting

Invariants:
* a worker has at most one child at work: a start follows the end (reported, or given up on) of what ran before;
* `offer` names a tag only in ``ready``; a rollout worker is ready only with the current weights, or without any while
  there are none, and then it offers nothing;
* every phase that waits (starting, loading, draining, stopping, a failure with restarts left) has a deadline, and the
  first tick past it leaves that wait. The one exception is a rollout role while there are no weights at all: it waits
  for the driver, which has a deadline of its own, and the worker limits the start of the engine;
* an answer of an earlier start (another epoch) changes nothing; epochs only grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from libra.resources.errors import DeadlineError
from libra.resources.tags import REWARD, TOOL, TRAIN, Role, rollout_tag
from libra.resources.types import KVRoom
from libra.scheduler_plugin.role_events import (
    Connected,
    Disconnected,
    Drain,
    Drained,
    Effect,
    Event,
    Evict,
    Load,
    Loaded,
    Lost,
    Published,
    Reported,
    RunEnds,
    Start,
    Stop,
    Tick,
    Want,
)


class Phase(StrEnum):
    """Where a worker stands."""

    ABSENT = "absent"
    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Duty:
    """A role and, for rollout, its TP degree."""

    role: Role
    tp: int | None = None

    @property
    def tag(self) -> str:
        """The resource that tasks of this duty ask for."""
        if self.role == "rollout":
            return rollout_tag(self.tp or 1)
        return {"tool": TOOL, "reward": REWARD, "train": TRAIN}[self.role]

    def __str__(self) -> str:
        return self.role if self.tp is None else f"{self.role} (tp {self.tp})"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each wait may take, in seconds, and how often a role is restarted.

    ``restarts``: failures in a row after which a role is given up; one that stayed ready for ``stable`` starts anew.
    ``backoff``: wait before the first restart, doubled each time up to ``backoff_most``.
    """

    start: float = 120.0
    load: float = 60.0
    drain: float = 60.0
    stop: float = 15.0
    restarts: int = 5
    backoff: float = 0.5
    backoff_most: float = 30.0
    stable: float = 60.0


@dataclass(frozen=True, slots=True)
class RoleState:
    """One worker. ``wanted``: what it shall do; ``duty``: what its child does, or did before it failed; ``up``: the
    child has reported; ``asked``: the weights that it was last told to load, ``version``: those that it has;
    ``deadline``: when the present wait ends; ``failures``: in a row; ``since``: when it became ready."""

    phase: Phase = Phase.ABSENT
    wanted: Duty | None = None
    duty: Duty | None = None
    epoch: int = 0
    up: bool = False
    asked: int | None = None
    version: int | None = None
    slots: int = 0
    kv_room: KVRoom | None = None
    deadline: float | None = None
    failures: int = 0
    error: str | None = None
    since: float = 0.0

    @property
    def given_up(self) -> bool:
        """Whether it failed too often to be started again by itself."""
        return self.phase is Phase.FAILED and self.deadline is None

    @property
    def offers(self) -> bool:
        """Whether it takes tasks of its duty."""
        duty = self.duty
        return self.phase is Phase.READY and duty is not None and (duty.role != "rollout" or self.version is not None)


Step = tuple[RoleState, tuple[Effect, ...]]


def advance(state: RoleState, event: Event, now: float, limits: Limits, current: int | None) -> Step:
    """The state after ``event`` at time ``now`` (seconds of any clock), and what to do. ``current``: the version of the
    current weights, None before the first."""
    match event:
        case Connected():
            return _connected(state, now, limits, current)
        case Disconnected():
            return _disconnected(state)
        case Want(duty):
            return _want(state, duty, now, limits, current)
        case RunEnds():
            return _run_ends(state, now, limits)
        case Reported():
            return _reported(state, event, now, limits, current)
        case Loaded():
            return _loaded(state, event, now, limits, current)
        case Published() if state.phase in (Phase.STARTING, Phase.READY):
            return _published(state, now, limits, current)
        case Drained() if state.phase is Phase.DRAINING:
            return _stop(state, now, limits)
        case Tick():
            return _tick(state, now, limits, current)
    return state, ()


def _connected(state: RoleState, now: float, limits: Limits, current: int | None) -> Step:
    if state.phase is not Phase.ABSENT:
        return state, ()
    return _next(state, now, limits, current)


def _disconnected(state: RoleState) -> Step:
    gone = replace(state, phase=Phase.ABSENT, duty=None, up=False, version=None, deadline=None)
    if state.phase in (Phase.IDLE, Phase.ABSENT) or state.duty is None:
        return gone, ()
    failures = state.failures + (state.phase in (Phase.STARTING, Phase.READY))
    lost = (Lost(state.duty),) if state.phase in (Phase.READY, Phase.DRAINING) else ()
    return replace(gone, failures=failures, error="the worker has left the cluster"), lost


def _want(state: RoleState, duty: Duty | None, now: float, limits: Limits, current: int | None) -> Step:
    asked = replace(state, wanted=duty)
    if duty != state.wanted or state.given_up:
        asked = replace(asked, failures=0, error=None)
    same = duty == state.duty
    match state.phase:
        case Phase.IDLE | Phase.FAILED if duty is None or duty != state.wanted or state.given_up or not state.duty:
            return _next(asked, now, limits, current)
        case Phase.STARTING if not same:
            return _stop(asked, now, limits)
        case Phase.READY if not same:
            return replace(asked, phase=Phase.DRAINING, deadline=now + limits.drain), _draining(state, True)
        case Phase.DRAINING if same:
            back, loads = _published(_ready(asked, now), now, limits, current)  # published while it drained
            return back, (*_draining(state, False), *loads)
    return asked, ()


def _run_ends(state: RoleState, now: float, limits: Limits) -> Step:
    """A worker without a role is told too: it may keep what one has left (staged KV)."""
    asked = replace(state, wanted=None, failures=0, error=None)
    if state.phase is Phase.ABSENT:
        return asked, ()
    stopping, effects = _stop(asked, now, limits, run_ends=True)
    evicting = _evicting(asked) if state.phase in (Phase.READY, Phase.DRAINING) else ()
    return stopping, (*evicting, *effects)


def _reported(state: RoleState, report: Reported, now: float, limits: Limits, current: int | None) -> Step:
    if report.epoch != state.epoch or state.phase in (Phase.ABSENT, Phase.IDLE, Phase.FAILED):
        return state, ()
    if state.duty is None:  # it had no role as the run ended
        return _next(state, now, limits, current) if report.state == "stopped" else (state, ())
    reason = report.error or f"the {state.duty} role reported {report.state!r} and gave no reason"
    match state.phase, report.state:
        case Phase.STARTING, "ready":
            up = replace(state, up=True, version=report.version, slots=report.slots, kv_room=report.kv_room)
            if state.duty.role == "rollout" and current is not None and report.version != current:
                return _load(up, now + limits.load, current)
            return _ready(up, now), ()
        case Phase.STARTING, "failed" | "lost" | "stopped":
            return _failed(state, reason, now, limits), ()
        case Phase.READY, "failed" | "lost" | "stopped":
            return _failed(state, reason, now, limits), (Lost(state.duty), *_evicting(state))
        case Phase.DRAINING, "failed" | "lost" | "stopped":
            after, effects = _next(replace(state, error=report.error), now, limits, current)
            return after, (Lost(state.duty), *_evicting(state), *effects)
        case Phase.STOPPING, "failed" | "lost" | "stopped":
            return _next(state, now, limits, current)
    return state, ()


def _published(state: RoleState, now: float, limits: Limits, current: int | None) -> Step:
    """New weights. A child that is still starting with earlier ones is told when it has reported, so that loads stay in
    order; one that was started without any waits for them before it reports."""
    if state.duty is None or state.duty.role != "rollout" or current in (None, state.version):
        return state, ()
    if state.up:
        return _load(state, now + limits.load, current)
    if state.asked is None or state.deadline is None:
        return _load(state, now + limits.start + limits.load, current)
    return state, ()


def _load(state: RoleState, deadline: float, current: int | None) -> Step:
    return replace(state, deadline=deadline, asked=current), (Load(state.epoch),)


def _loaded(state: RoleState, loaded: Loaded, now: float, limits: Limits, current: int | None) -> Step:
    if loaded.epoch != state.epoch or state.phase not in (Phase.STARTING, Phase.READY, Phase.DRAINING):
        return state, ()
    if loaded.error is not None:
        if state.phase is Phase.DRAINING:
            return state, ()
        return _take_out(state, f"version {loaded.version} of the weights did not load: {loaded.error}", now, limits)
    state = replace(state, version=loaded.version)
    if state.phase is Phase.DRAINING or loaded.version != current or not state.up:
        return state, ()  # a newer load, or the report, is under way and has its own deadline
    if state.phase is Phase.STARTING:
        return _ready(state, now), ()
    return replace(state, deadline=None), ()


def _tick(state: RoleState, now: float, limits: Limits, current: int | None) -> Step:
    if state.phase is Phase.READY and state.failures and now - state.since >= limits.stable:
        state = replace(state, failures=0)
    if state.deadline is None or now < state.deadline or state.phase in (Phase.ABSENT, Phase.IDLE):
        return state, ()
    match state.phase:
        case Phase.FAILED:
            return _next(replace(state, duty=None), now, limits, current)
        case Phase.STARTING if not state.up:
            waits = DeadlineError(f"the {state.duty} role to be ready", "its worker's child process", limits.start)
            return _take_out(state, str(waits), now, limits)
        case Phase.STARTING | Phase.READY:
            waits = DeadlineError("the current weights to be loaded", "the worker's engine", limits.load)
            return _take_out(state, str(waits), now, limits)
        case Phase.DRAINING:
            waits = DeadlineError(f"running {state.duty} tasks to end", "their worker", limits.drain)
            stopped, effects = _stop(replace(state, error=str(waits)), now, limits)
            return stopped, (*_evicting(state), *effects)
    waits = DeadlineError(f"{_named(state.duty)} to stop", "its worker's child process", limits.stop)
    return _next(replace(state, error=str(waits)), now, limits, current)


def _next(state: RoleState, now: float, limits: Limits, current: int | None) -> Step:
    """Nothing runs on the worker: what now? A role that has just failed waits out its back-off first."""
    idle = replace(state, phase=Phase.IDLE, duty=None, up=False, version=None, deadline=None)
    if state.wanted is None:
        return replace(idle, failures=0), ()
    if state.failures and state.phase in (Phase.STOPPING, Phase.ABSENT):
        return _backing_off(replace(state, duty=state.duty or state.wanted), now, limits), ()
    deadline: float | None = now + limits.start
    if state.wanted.role == "rollout":
        deadline = None if current is None else now + limits.start + limits.load
    started = replace(
        idle, phase=Phase.STARTING, duty=state.wanted, epoch=state.epoch + 1, deadline=deadline, asked=current, slots=0
    )
    return started, (Start(started.epoch, state.wanted),)


def _ready(state: RoleState, now: float) -> RoleState:
    return replace(state, phase=Phase.READY, deadline=None, error=None, since=now)


def _stop(state: RoleState, now: float, limits: Limits, run_ends: bool = False) -> Step:
    return replace(state, phase=Phase.STOPPING, deadline=now + limits.stop), (Stop(state.epoch, run_ends),)


def _take_out(state: RoleState, reason: str, now: float, limits: Limits) -> Step:
    """A child that is alive but of no use: its tasks go elsewhere, it is ended and started again."""
    stopping, effects = _stop(replace(state, failures=state.failures + 1, error=reason), now, limits)
    return stopping, (*_evicting(state), *effects)


def _failed(state: RoleState, reason: str, now: float, limits: Limits) -> RoleState:
    return _backing_off(replace(state, failures=state.failures + 1, error=reason), now, limits)


def _backing_off(state: RoleState, now: float, limits: Limits) -> RoleState:
    deadline: float | None = None
    if state.failures <= limits.restarts:
        deadline = now + min(limits.backoff * 2 ** (state.failures - 1), limits.backoff_most)
    return replace(state, phase=Phase.FAILED, up=False, version=None, deadline=deadline)


def _draining(state: RoleState, drains: bool) -> tuple[Drain, ...]:
    """Requests to an engine can be cut short and go on elsewhere; other tasks are left to end."""
    return (Drain(state.epoch, drains),) if state.duty is not None and state.duty.role == "rollout" else ()


def _named(duty: Duty | None) -> str:
    return "what a role has left" if duty is None else f"the {duty} role"


def _evicting(state: RoleState) -> Iterable[Evict]:
    """Training tasks are left to their bodies: a restarted trainer holds no weights, so they must fail, not rerun."""
    return () if state.duty is None or state.duty.role == "train" else (Evict(state.duty),)
