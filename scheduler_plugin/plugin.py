"""The scheduler plugin: Dask's hooks on one side; routing, roles and guests on the other.

Every hook and handler is guarded: a failure is counted, logged as an error and told to the driver (`alarms`); it never
reaches Dask, which would log a hook's exception at INFO level and close the stream of a handler that raises.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from distributed import SchedulerPlugin, WorkerPlugin
from distributed.protocol.pickle import dumps
from tornado.ioloop import PeriodicCallback

from libra.resources import wire
from libra.resources.bootstrap import Bootstrap
from libra.resources.dask_settings import forget_prefixes
from libra.resources.errors import DeadlineError
from libra.resources.types import KVRoom, Migration
from libra.scheduler_plugin import guests, roles, spans
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.binding import disown, split_key
from libra.scheduler_plugin.claims import Claim
from libra.scheduler_plugin.forwarding import Outbox
from libra.scheduler_plugin.pool import Pool
from libra.scheduler_plugin.requests import Requests
from libra.scheduler_plugin.retag import stimulus
from libra.scheduler_plugin.roles import Duty

_TICK_MILLISECONDS = 50
_LISTENING_SECONDS = 0.2
"""A driver learns its token from the reply to its claim and listens right after; events wait that long for it."""
_ALLOWED_FAILURES = 10
"""Losses of a worker that a task survives while a run holds the cluster: an engine that takes its worker down does so
to every task on it, and Dask's default of 3 would blame them all."""

P = ParamSpec("P")


def _guarded(method: Callable[P, None]) -> Callable[P, None]:
    """Ring the alarm instead of raising."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            plugin: Any = args[0]
            plugin.alarms.ring(method.__name__, error)

    return guarded


class LibraScheduler(SchedulerPlugin):
    """One a scheduler; registered by `libra.scheduler_plugin.preload`. ``worker_plugin``: the worker side (None: the
    real one)."""

    name = "libra"
    idempotent = True

    def __init__(self, worker_plugin: WorkerPlugin | None = None) -> None:
        self._worker_plugin = worker_plugin or Bootstrap()
        self.alarms = Alarms(lambda where, error: self.tell("alarm", where=where, error=error))
        self.claim: Claim | None = None
        self.stats: dict[str, Any] = {}
        """The engines' stats from the workers' heartbeats, by worker name."""
        self.scheduler: Any = None
        self._allowed_failures = 0
        self.pool: Pool
        self.outbox: Outbox

    async def start(self, scheduler: Any) -> None:
        """Install handlers, the extension and the worker side. Dask may call this twice."""
        if self.scheduler is not None:
            return
        self.scheduler = scheduler
        self.pool = Pool(scheduler, self.tell)
        self.outbox = Outbox(scheduler, self.alarms)
        scheduler.handlers.update(Requests(self).handlers())
        scheduler.stream_handlers.update(
            {
                wire.OPEN: self.on_open,
                wire.END: self.on_end,
                wire.ROLE_STATE: self.on_role_state,
                wire.WEIGHTS_LOADED: self.on_weights_loaded,
                wire.PROGRESS: self.on_progress,
                wire.SEGMENT: self.on_segment,
                wire.ASK: self.on_ask,
                wire.MOVED: self.on_moved,
            }
        )
        scheduler.extensions[wire.EXTENSION] = self
        scheduler.extensions[spans.EXTENSION] = spans.GuestSpans(scheduler)
        callback = PeriodicCallback(self.tick, _TICK_MILLISECONDS)
        scheduler.periodic_callbacks["libra"] = callback
        plugin = dumps(self._worker_plugin)
        await scheduler.register_worker_plugin(comm=None, plugin=plugin, name="libra", idempotent=True)
        self.pool.refresh()
        if not callback.is_running():
            callback.start()

    # Hooks.

    @_guarded
    def update_graph(self, scheduler: Any, *, tasks: list[Any], **_: Any) -> None:
        """A graph has arrived; none of its tasks has moved yet."""
        claim = self.claim
        for key in tasks:
            task = scheduler.tasks[key]
            if task.state != "released":
                continue
            parts = split_key(key)
            if parts is not None:
                if claim is not None and claim.binder is not None and parts[2] == claim.spec.run:
                    claim.binder.arrive(task, parts)
                else:
                    disown(task)
            elif claim is not None:
                guests.restrict(task)

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """A task has moved; its dependents have not yet. On the hot path: leave at once where nothing is to do."""
        if start == "processing" and self.claim is not None:
            self._left_worker(key, finish)

    @_guarded
    def _left_worker(self, key: Any, finish: str) -> None:
        claim = self.claim
        assert claim is not None
        assert claim.binder is not None
        task = self.scheduler.tasks[key]
        parts = claim.ours(key)
        if parts is None:
            guests.restrict(task)
        elif finish == "memory":
            if parts[0] == "tool":
                claim.binder.tool_returned(task, parts)
            else:
                self.outbox.finished(task)
                if parts[0] == "rollout" and not claim.spec.inline:
                    claim.binder.arrived(parts[3])  # a residence ends where it is left, not where it goes on
        elif finish == "released":
            claim.binder.came_back(task, parts)

    @_guarded
    def add_worker(self, scheduler: Any, worker: str) -> None:
        """A worker has joined and has no tasks yet."""
        self.pool.add_worker(worker)

    @_guarded
    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str, **_: Any) -> None:
        """A worker has gone and its tasks have been released."""
        self.pool.remove_worker(worker)
        live = {str(ws.name) for ws in scheduler.workers.values()}
        self.stats = {name: data for name, data in self.stats.items() if name in live}

    @_guarded
    def remove_client(self, scheduler: Any, client: str) -> None:
        """A client has gone and what it wanted has been released: a driver's claim ends with it."""
        self.outbox.by_topic.discard(client)
        if self.claim is not None and self.claim.client == client:
            self.end_claim(self.claim)

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        """Whom an adaptive cluster may retire: nobody with a role."""
        return [worker for worker in workers if not self.pool.has_role(worker.address)]

    @_guarded
    def heartbeat(self, worker: Any, data: Any) -> None:
        """The extension's side of a worker's heartbeat."""
        self.stats[str(worker.name)] = data

    async def before_close(self) -> None:
        """The scheduler closes: end the roles while the workers still listen."""
        if self.claim is not None:
            self.end_claim(self.claim)
            # Streams flush within their batching interval; then the workers are told to close.
            await asyncio.sleep(0.02)

    # Messages.

    @_guarded
    def on_open(self, token: str, opened: dict[str, tuple[int, str]], client: str = "") -> None:
        """`wire.OPEN`."""
        if (claim := self.holds(token)) is not None and claim.binder is not None:
            claim.binder.opened(opened)

    @_guarded
    def on_end(self, token: str, ended: list[tuple[str, int | None]], client: str = "") -> None:
        """`wire.END`."""
        if (claim := self.holds(token)) is not None and claim.binder is not None:
            claim.binder.ended(ended)

    @_guarded
    def on_role_state(
        self,
        role: str,
        epoch: int,
        state: str,
        version: int | None = None,
        slots: int | None = None,
        error: str | None = None,
        kv_room: dict[str, int] | None = None,
        worker: str = "",
    ) -> None:
        """`wire.ROLE_STATE`."""
        room = None if kv_room is None else KVRoom(**kv_room)
        self.pool.reported(worker, roles.Reported(epoch, state, version, slots or 0, error, room))

    @_guarded
    def on_weights_loaded(
        self, epoch: int, version: int, digest: str = "", error: str | None = None, worker: str = ""
    ) -> None:
        """`wire.WEIGHTS_LOADED`."""
        self.pool.loaded(worker, roles.Loaded(epoch, version, error))

    @_guarded
    def on_progress(self, fields: dict[str, Any], worker: str = "") -> None:
        """`wire.PROGRESS`."""
        self.tell("progress", fields=fields)

    @_guarded
    def on_segment(self, segments: list[Any], worker: str = "") -> None:
        """`wire.SEGMENT`."""
        if self.claim is not None and self.claim.residences is not None:
            self.claim.residences.finished(segments)

    @_guarded
    def on_moved(self, moves: list[Any], worker: str = "") -> None:
        """`wire.MOVED`."""
        claim = self.claim
        for key, migration in moves if claim is not None else ():
            assert claim is not None
            if (parts := claim.ours(key)) is not None and claim.binder is not None:
                claim.binder.moved(parts[3], Migration(**migration))

    @_guarded
    def on_ask(self, asks: list[Any], worker: str = "") -> None:
        """`wire.ASK`."""
        if self.claim is not None and self.claim.residences is not None:
            self.claim.residences.asked(worker, asks)

    # What the parts of the plugin share.

    def holds(self, token: str | None) -> Claim | None:
        """The claim that ``token`` belongs to, if it holds the cluster."""
        claim = self.claim
        if claim is None or claim.ending or token is None or not secrets.compare_digest(token, claim.token):
            self.alarms.count("refused")
            return None
        self._tell_held(claim)
        return claim

    def tell(self, event: str, **fields: Any) -> None:
        """Send an event to the driver, if there is one."""
        claim = self.claim
        if claim is None:
            return
        message = {"op": wire.EVENT, "event": event, **fields}
        if claim.held is not None:
            claim.held.append(message)
        else:
            self.outbox.send(claim.client, message)

    def _tell_held(self, claim: Claim) -> None:
        """The driver listens: events that were held back go out, in order."""
        held, claim.held = claim.held, None
        for message in held or ():
            self.outbox.send(claim.client, message)

    def begin_claim(self, claim: Claim, duties: Mapping[str, Duty]) -> None:
        """A run takes the cluster."""
        self.claim = claim
        self.alarms.counts.clear()
        self._allowed_failures = self.scheduler.allowed_failures
        self.scheduler.allowed_failures = max(self._allowed_failures, _ALLOWED_FAILURES)
        self.pool.begin(claim, duties)
        guests.restrict_all(self.scheduler, claim.ours, self.pool.off_limits)

    def end_claim(self, claim: Claim) -> None:
        """Cancel the run's tasks and stop its roles; `tick` sees it through."""
        if claim.ending:
            return
        claim.end()
        if claim.client in self.scheduler.clients:
            wanted = [t.key for t in self.scheduler.clients[claim.client].wants_what if claim.ours(t.key)]
            self.scheduler.client_releases_keys(keys=wanted, client=claim.client, stimulus_id=stimulus("end"))
        self.pool.end()

    def tick(self) -> None:
        """Everything that has a deadline, or that would grow."""
        forget_prefixes()
        self._tick_pool()
        self._tick_claim()

    @_guarded
    def _tick_pool(self) -> None:
        self.pool.tick()

    @_guarded
    def _tick_claim(self) -> None:
        claim = self.claim
        if claim is None:
            return
        if claim.held is not None and time.monotonic() - claim.began > _LISTENING_SECONDS:
            self._tell_held(claim)
        assert claim.keeper is not None
        if not claim.ending:
            self._give_up_unbound(claim)
            claim.keeper.tick()
            if claim.replanning is not None:
                claim.replanning.tick()
        elif claim.keeper.end() and self.pool.at_rest:
            self.pool.finish()
            self.scheduler.allowed_failures = self._allowed_failures
            self.claim = None
            claim.ended.set()

    def _give_up_unbound(self, claim: Claim) -> None:
        assert claim.binder is not None
        seconds = claim.spec.bind_seconds
        expired = list(claim.binder.expired(seconds))
        for key, reason in expired:
            waits = DeadlineError(f"a decision where {key} runs", "the bucket policy", seconds, f"Reason: {reason}")
            self.tell("unbound", key=key, reason=str(waits), time=time.time())
        if expired and claim.client in self.scheduler.clients:
            keys = [key for key, _ in expired]
            self.scheduler.client_releases_keys(keys=keys, client=claim.client, stimulus_id=stimulus("unbound"))
