"""The worker side of the scheduler plugin: takes roles on and off, keeps the worker's tags, cancels released bodies.

Invariants: a worker has one role at most, and brings up one at a time; an answer carries the epoch of the message it
answers, so that the plugin can tell a stale one; a stream handler never raises (Dask would close the worker); the event
loop is never blocked by a role; the role's processes end with the worker, and so does the KV arena, which outlives
roles and ends with the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.worker_state_machine import CancelComputeEvent, UnpauseEvent

from libra.resources import tags, wire
from libra.resources.dask_settings import forget_prefixes
from libra.resources.errors import LibraError
from libra.resources.types import WeightVersion
from libra.resources.types.run import RunSpec
from libra.tasks.arena import WorkerArena
from libra.tasks.child.host import error_text
from libra.tasks.kv_fetch import KVServer
from libra.tasks.line import Line
from libra.tasks.reward import RewardRole
from libra.tasks.roles import Role, Setting
from libra.tasks.rollout import RolloutRole
from libra.tasks.running import Bodies
from libra.tasks.tool import ToolRole
from libra.tasks.train import TrainRole

logger = logging.getLogger("distributed.libra.worker")

ROLES: dict[tags.Role, type[Role]] = {
    "rollout": RolloutRole,
    "tool": ToolRole,
    "reward": RewardRole,
    "train": TrainRole,
}
_NOT_STARTED = ("waiting", "ready", "constrained")
_EXECUTING = ("executing", "long-running")


class LibraWorker(WorkerPlugin):
    """Lives on every worker; also its extension `wire.EXTENSION`, for heartbeats and for the bodies of tasks."""

    name = "libra"
    idempotent = True

    def setup(self, worker: Worker) -> None:
        """Called by Dask."""
        self.worker = worker
        self.bodies = Bodies()
        self.line = Line(worker.batched_send)
        self.arena = WorkerArena(str(worker.name))
        self.role: Role | None = None
        self.state = "none"
        """``none``, ``starting``, ``waiting`` (for weights), ``ready``, ``failed``, ``lost`` or ``stopped``."""
        self._changing = asyncio.Lock()
        self._bringing_up: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        worker.stream_handlers |= {
            wire.RETAG: self.on_retag,
            wire.RECALL: self.on_recall,
            wire.START_ROLE: self.on_start_role,
            wire.STOP_ROLE: self.on_stop_role,
            wire.LOAD_WEIGHTS: self.on_load_weights,
            wire.DRAIN: self.on_drain,
            wire.FORGET: self.on_forget,
            wire.ANSWER: self.on_answer,
        }
        worker.handlers.update(KVServer(self.arena.of).handlers())
        worker.extensions[wire.EXTENSION] = self

    async def teardown(self, worker: Worker) -> None:
        """Called by Dask as the worker closes."""
        self._spawn(self._end(self._replace(None), run_ends=True))
        # What is under way ends too: a start is cancelled, a load fails with its engine, an ending is awaited.
        await asyncio.wait(list(self._work))

    def transition(self, key: str, start: str, finish: str, **kwargs: Any) -> None:
        """Called by Dask for every task's change of state: a released body is cancelled."""
        if finish == "released" and start in _EXECUTING:
            self.bodies.cancel(key)

    def heartbeat(self) -> dict[str, Any]:
        """What the worker's heartbeat carries to the scheduler's twin extension."""
        forget_prefixes()
        role = self.role
        return {
            "role": None if role is None else role.name,
            "epoch": None if role is None else role.epoch,
            "version": None if role is None else role.version,
            "state": self.state,
            "bodies": len(self.bodies),
            "stats": {**({} if role is None else role.stats()), **self.arena.stats()},
        }

    # -- tags: the race-free protocol --------------------------------------------------------------

    def on_retag(self, resources: dict[str, float], stimulus_id: str) -> None:
        """Offer these quantities from now on; what is in use stays in use. Tasks that fit now begin."""
        state = self.worker.state
        for tag, quantity in resources.items():
            change = quantity - state.total_resources.get(tag, 0)
            state.available_resources[tag] = state.available_resources.get(tag, 0) + change
            state.total_resources[tag] = quantity
        if self.worker.status == Status.running:
            # Dask looks at constrained tasks again only on an event; a paused worker does as it goes on.
            self.worker.handle_stimulus(UnpauseEvent(stimulus_id=stimulus_id))

    def on_recall(self, key: str, stimulus_id: str) -> None:
        """Give the task back to the scheduler unless it has begun."""
        task = self.worker.state.tasks.get(key)
        if task is not None and task.state == "executing":
            self.bodies.call_back(key)
        if task is None or task.state not in _NOT_STARTED:
            return
        self.worker.handle_stimulus(CancelComputeEvent(key=key, stimulus_id=stimulus_id))
        self.worker.batched_send({"op": "reschedule", "key": key, "stimulus_id": stimulus_id})

    # -- roles -------------------------------------------------------------------------------------

    def on_start_role(
        self, role: tags.Role, epoch: int, spec: dict[str, Any], tp: int | None, weights: dict[str, Any] | None
    ) -> None:
        """Take on a role, in place of the one before; answered by `wire.ROLE_STATE`."""
        try:
            version = None if weights is None else WeightVersion(**weights)
            new = ROLES[role](
                Setting(
                    RunSpec.from_wire(spec),
                    epoch,
                    tp,
                    str(self.worker.name),
                    tags.node_of(self.worker.state.total_resources, get_address_host(self.worker.address)),
                    self.arena,
                    self.worker.rpc,
                    on_lost=lambda error: self._on_lost(epoch, error),
                    on_progress=lambda fields: self._send(wire.PROGRESS, fields=fields),
                )
            )
        except (LibraError, KeyError, TypeError, ValueError) as error:
            self._report(role, epoch, "failed", error=f"the role cannot be made: {error_text(error)}")
            return
        self._spawn(self._start(new, self._replace(new), version))

    def on_stop_role(self, epoch: int, run_ends: bool) -> None:
        """Give the role up, and if the run ends, what is kept for it; answered by `wire.ROLE_STATE` ``stopped``."""
        self._spawn(self._stop(self._replace(None), epoch, run_ends))

    def on_load_weights(self, epoch: int, weights: dict[str, Any]) -> None:
        """Load published weights; answered by `wire.WEIGHTS_LOADED`. Ignored if the role is of another epoch."""
        role = self.role
        if isinstance(role, RolloutRole) and role.epoch == epoch:
            self._spawn(self._load(role, WeightVersion(**weights)))

    def on_drain(self, epoch: int, drains: bool) -> None:
        """Cut the requests of a rollout role short, or take requests again. Ignored if the role is of another epoch."""
        role = self.role
        if isinstance(role, RolloutRole) and role.epoch == epoch:
            role.drain(drains)

    def on_forget(self, trajectories: list[str]) -> None:
        """These trajectories have ended, or are elsewhere. What is staged of them may be of an earlier role."""
        self.arena.forget(trajectories)
        if self.role is not None and self.state in ("waiting", "ready"):
            self.role.forget(trajectories)

    def on_answer(self, answers: list[Any]) -> None:
        """The policy has decided for residences on this worker."""
        self.line.answered(answers)

    def _replace(self, new: Role | None) -> Role | None:
        """Make ``new`` the role and return the one before, which must still be stopped."""
        previous, self.role = self.role, new
        self.state = "none" if new is None else "starting"
        if self._bringing_up is not None:
            self._bringing_up.cancel()
        return previous

    async def _start(self, role: Role, previous: Role | None, weights: WeightVersion | None) -> None:
        error = await self._end(previous)
        if error is not None:
            self._fail(role, error)
            return
        async with self._changing:
            if self.role is not role:
                return  # superseded while the previous one ended
            await self.arena.end(but=role.spec.run)
            self._bringing_up = asyncio.create_task(self._bring_up(role, weights))
            await asyncio.wait([self._bringing_up])
            self._bringing_up = None

    async def _bring_up(self, role: Role, weights: WeightVersion | None) -> None:
        try:
            await role.start()
            if weights is not None and isinstance(role, RolloutRole):
                await role.load(weights)
        except Exception as error:
            # Whatever a role's parts (an environment, a child) cannot do is the role's failure, with their words.
            logger.warning("the role %r did not start", role.name, exc_info=True)
            try:
                await role.stop()
            finally:
                self._fail(role, error_text(error))
        else:
            self.state = "waiting"
            self._report_if_ready(role)

    async def _stop(self, role: Role | None, epoch: int, run_ends: bool) -> None:
        error = await self._end(role, run_ends)
        if self.role is None:
            self.state = "stopped"
        self._report(None if role is None else role.name, epoch, "stopped", error=error)

    async def _end(self, role: Role | None, run_ends: bool = False) -> str | None:
        """Stop a role that has been replaced, and with the run its arena; what kept the role from ending, if anything
        did."""
        async with self._changing:
            try:
                if role is not None:
                    await role.stop()
            except LibraError as error:
                return str(error)
            finally:
                if run_ends:
                    await self.arena.end()
                else:
                    self._spawn(self.arena.settle())
        return None

    async def _load(self, role: RolloutRole, weights: WeightVersion) -> None:
        error = None
        try:
            await role.load(weights)
        except LibraError as failure:
            error = str(failure)
        except Exception as failure:
            # Nobody else would say so, and the plugin would wait for its whole deadline.
            logger.warning("version %d of the weights did not load", weights.version, exc_info=True)
            error = error_text(failure)
        loaded = {"version": weights.version, "digest": weights.digest}
        self._send(wire.WEIGHTS_LOADED, epoch=role.epoch, **loaded, error=error)
        self._report_if_ready(role)

    def _report_if_ready(self, role: Role) -> None:
        if self.role is role and self.state == "waiting" and role.ready:
            self.state = "ready"
            self._report(role.name, role.epoch, "ready", role=role)

    def _fail(self, role: Role, error: str) -> None:
        if self.role is role:
            self.state = "failed"
            self._report(role.name, role.epoch, "failed", error=error)

    def _on_lost(self, epoch: int, error: str) -> None:
        self._spawn(self.arena.settle())
        role = self.role
        if role is None or role.epoch != epoch:
            return
        if self.state == "ready":
            self.state = "lost"
            self._report(role.name, epoch, "lost", error=error)
        elif self.state == "waiting":
            self._fail(role, error)

    def _report(
        self, name: str | None, epoch: int, state: str, *, role: Role | None = None, error: str | None = None
    ) -> None:
        self._send(
            wire.ROLE_STATE,
            role=name,
            epoch=epoch,
            state=state,
            version=None if role is None else role.version,
            slots=0 if role is None else role.slots(self.worker.state.nthreads),
            kv_room=None if role is None or role.kv_room is None else asdict(role.kv_room),
            error=error,
        )

    def _send(self, op: str, **fields: Any) -> None:
        self.worker.batched_send({"op": op, **fields})

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
