"""What a driver or a worker asks of the plugin by RPC (`libra.resources.wire`).

Invariants: a request with a wrong token changes nothing and is answered with an ``error``; so is anything else that
cannot be done, with what would do.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import distributed

from libra.resources import wire
from libra.resources.errors import LibraError
from libra.resources.tags import ROLES, hardware_of
from libra.resources.types import RequestRecord
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.assignment import assign
from libra.scheduler_plugin.binding import Binder
from libra.scheduler_plugin.claims import Claim
from libra.scheduler_plugin.learned import Keeper, load
from libra.scheduler_plugin.replanning import Replanning, online_of
from libra.scheduler_plugin.residences import Residences
from libra.scheduler_plugin.retag import offered
from libra.scheduler_plugin.roles import Duty

if TYPE_CHECKING:
    from libra.scheduler_plugin.plugin import LibraScheduler

Reply = dict[str, Any]

_REFUSED = {
    "error": "this run does not hold the cluster (its claim has ended, or the token is another run's): claim it again"
}


class Requests:
    """The RPC handlers of one plugin."""

    def __init__(self, plugin: LibraScheduler) -> None:
        self._plugin = plugin

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {
            wire.CLAIM: self.claim,
            wire.RELEASE: self.release,
            wire.STATUS: self.status,
            wire.SET_ROLE: self.set_role,
            wire.SET_WEIGHTS: self.set_weights,
            wire.POST_BATCH: self.post_batch,
            wire.AWAIT_BATCH: self.await_batch,
            wire.REPORT_STEP: self.report_step,
            wire.rpc(wire.OPEN): self.open,
            wire.rpc(wire.END): self.end,
        }

    async def claim(self, spec: dict[str, Any], client: str, answers: str = "stream") -> Reply:
        """→ ``token``, ``roles`` (by worker) and ``notes`` for the user; or ``error``. ``answers``: ``stream``, or
        ``topic`` for a client that uses Dask's public API only."""
        plugin = self._plugin
        try:
            claim = Claim(RunSpec.from_wire(spec), client)
            notes = await asyncio.to_thread(load, claim.table.policy, claim.spec)
        except LibraError as error:
            return {"error": str(error)}
        except TypeError as error:
            return {"error": f"the driver and the scheduler differ ({error}): install the same dask-libra in both"}
        while plugin.claim is not None:
            holder = plugin.claim
            if not holder.ending:
                return {
                    "error": f"the cluster is held by {holder.holder}; wait until that run has ended, stop it, "
                    "or use another cluster"
                }
            await holder.ended.wait()
        if client not in plugin.scheduler.clients:
            return {"error": f"client {client!r} is not connected to this scheduler: connect first, then claim"}
        try:
            assignment = assign(plugin.pool.candidates(), claim.spec.roles, claim.spec.buckets)
            nodes = {str(ws.name): ws.host for ws in plugin.scheduler.workers.values()}
            labels = {str(ws.name): hardware_of(ws.resources) for ws in plugin.scheduler.workers.values()}
            kinds = {name: kind for name, kind in labels.items() if kind is not None}
            online = online_of(claim.spec, plugin.pool.candidates(), nodes, assignment.duties, kinds)
        except LibraError as error:
            return {"error": str(error)}
        claim.keeper = Keeper(claim.table.policy, claim.spec, plugin.alarms)
        claim.binder = Binder(plugin.scheduler, claim.table, plugin.outbox, plugin.alarms)
        claim.residences = Residences(plugin.scheduler, claim.binder, plugin.outbox, plugin.alarms, client)
        if answers == "topic":
            plugin.outbox.by_topic.add(client)
        else:
            plugin.outbox.by_topic.discard(client)  # it may have claimed before, with the topic
        if online is not None:
            claim.replanning = Replanning(online, plugin.pool, claim.table, plugin.alarms, plugin.tell)
        plugin.begin_claim(claim, assignment.duties)
        duties = {name: {"role": duty.role, "tp": duty.tp} for name, duty in assignment.duties.items()}
        return {"token": claim.token, "roles": duties, "notes": [*notes, *assignment.notes]}

    async def release(self, token: str) -> Reply:
        """→ ``{}`` once the roles have stopped; ``unfinished`` names those that did not in time."""
        claim = self._plugin.holds(token)
        if claim is None:
            return _REFUSED
        self._plugin.end_claim(claim)
        try:
            await asyncio.wait_for(claim.ended.wait(), claim.spec.stop_seconds)
        except TimeoutError:
            return {"unfinished": self._plugin.pool.unfinished}
        return {}

    async def status(self, token: str | None = None) -> Reply:
        """Without a token: that the plugin is here, versions, and who holds the cluster. With it: everything."""
        plugin = self._plugin
        claim = plugin.claim
        public = {
            "versions": {
                "dask-libra": version("dask-libra"),
                "distributed": distributed.__version__,
                "python": platform.python_version(),
            },
            "workers": len(plugin.scheduler.workers),
            "held_by": None if claim is None else claim.holder,
        }
        if token is None:
            return public
        if claim is None or plugin.holds(token) is None:
            return _REFUSED
        return {**public, **self._everything(claim)}

    async def open(self, token: str, opened: dict[str, tuple[int, str]]) -> Reply:
        """`wire.OPEN` as a request."""
        self._plugin.on_open(token, opened)
        return {}

    async def end(self, token: str, ended: list[tuple[str, int | None]]) -> Reply:
        """`wire.END` as a request."""
        self._plugin.on_end(token, ended)
        return {}

    async def set_role(self, token: str, worker: str, role: str | None, tp: int | None = None) -> Reply:
        """Move a worker to another role, or to none."""
        claim = self._plugin.holds(token)
        if claim is None:
            return _REFUSED
        degrees = [bucket.tp for bucket in claim.table.buckets]
        if role == "rollout" and (tp or 1) not in degrees:
            return {"error": f"no bucket has TP degree {tp or 1}; buckets have {', '.join(map(str, degrees))}"}
        known = next((name for name in ROLES if name == role), None)
        if role is not None and known is None:
            return {"error": f"{role!r} is no role; take one of {', '.join(ROLES)}, or None"}
        duty = None if known is None else Duty(known, (tp or 1) if known == "rollout" else None)
        try:
            self._plugin.pool.assign(worker, duty)
        except LibraError as error:
            return {"error": str(error)}
        return {}

    async def set_weights(self, token: str, version: int, path: str, digest: str) -> Reply:
        """New current weights: every rollout worker loads them."""
        claim = self._plugin.holds(token)
        if claim is None:
            return _REFUSED
        claim.set_weights(version, path, digest)
        self._plugin.pool.published()
        return {}

    async def post_batch(self, token: str, version: int, record: dict[str, Any]) -> Reply:
        """The batch of ``version`` is known."""
        claim = self._plugin.holds(token)
        if claim is None:
            return _REFUSED
        claim.post(version, record)
        return {}

    async def report_step(
        self, token: str, step: int, seconds: float, records: list[dict[str, Any]], train_seconds: float | None = None
    ) -> Reply:
        """A step has ended."""
        claim = self._plugin.holds(token)
        if claim is None:
            return _REFUSED
        if claim.replanning is not None:
            found = [RequestRecord.from_plain(row) for row in records]
            claim.replanning.report(step, seconds, found, train_seconds)
        return {}

    async def await_batch(self, run: str, version: int) -> Reply:
        """A worker's coordinator task waits for a batch."""
        claim = self._plugin.claim
        if claim is None or claim.spec.run != run:
            return {"error": f"run {run} does not hold the cluster"}
        try:
            return await claim.batch(version)
        except LibraError as error:
            return {"error": str(error)}

    def _everything(self, claim: Claim) -> Reply:
        plugin = self._plugin
        workers = {str(ws.name): ws for ws in plugin.scheduler.workers.values()}
        table = {
            name: {
                "address": workers[name].address if name in workers else None,
                "role": None if (duty := state.duty or state.wanted) is None else duty.role,
                "tp": None if duty is None else duty.tp,
                "state": str(state.phase),
                "version": state.version,
                "error": state.error,
                "failures": state.failures,
                "given_up": state.given_up,
                "offers": offered(workers[name]) if name in workers else {},
                "stats": plugin.stats.get(name),
            }
            for name, state in plugin.pool.states.items()
        }
        instances = {
            i.name: {
                "tp": i.tp,
                "slots": i.slots,
                "sequences": i.sequences,
                "tokens": i.tokens,
                "node": i.facts.node,
                "kv_room": None if i.facts.kv is None else asdict(i.facts.kv),
            }
            for i in claim.table.instances.values()
        }
        return {
            "run": claim.spec.run,
            "roles": table,
            "instances": instances,
            "policy": claim.table.policy.metrics(),
            "weights": {"current": claim.version, "installed": {name: row["version"] for name, row in table.items()}},
            "trajectories": len(claim.table.routes),
            "counters": dict(plugin.alarms.counts),
            "tasks": len(plugin.scheduler.tasks),
            "no_worker": len(plugin.scheduler.unrunnable),
        }
