"""Which restrictions each of our tasks carries: set as a graph arrives, and late, as a tool returns.

Dask calls these hooks before it places anything: `arrive` after a graph's tasks exist and before the first of them
moves, `tool_returned` after a tool's task is in memory and before its dependents move, `came_back` after a task has
left its worker and before it is placed anew. Invariants:

* a continuation carries `UNBOUND`, which no worker offers, until a decision was made for it; a failed decision leaves
  it there until `expired` gives it up, so it can never run in a wrong place;
* a residence that has handed over a segment carries `UNBOUND` once it is off its worker: it is given back, not run
  again;
* a bound rollout is pinned to the instance that the policy chose, a tool call to the worker with its session, and both
  are decided anew when that worker is gone;
* restrictions change only while a task is not on a worker (Dask books resources by them).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from operator import attrgetter
from time import monotonic
from typing import Any

from libra.resources import wire
from libra.resources.keys import KINDS
from libra.resources.tags import REWARD, TOOL, TRAIN, UNBOUND, node_of
from libra.resources.types import Migration, ToolState
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.forwarding import Outbox
from libra.scheduler_plugin.policy import Placement
from libra.scheduler_plugin.policy.moves import MoveOutcome, Way
from libra.scheduler_plugin.retag import stimulus
from libra.scheduler_plugin.routing import RoutingTable

logger = logging.getLogger("distributed.libra.binding")

Parts = list[str]
"""A task key's text, split: kind, step, run, subject, index, attempt (`libra.resources.keys.TaskKey`)."""

_UNBOUND = {UNBOUND: 1}
_TOOL = {TOOL: 1}
_REWARD = {REWARD: 1}
_TRAIN = {TRAIN: 1}
_WAYS: dict[str, Way] = {"load": "load", "fetch": "fetch", "prefill": "prefill"}
_BY_KIND = {"reward": _REWARD, "step": _REWARD}


def split_key(key: Any) -> Parts | None:
    """The parts of a key that looks like one of this system; None for any other."""
    if type(key) is not str:
        return None
    parts = key.split("-")
    return parts if len(parts) == 6 and parts[0] in KINDS else None


def disown(task: Any) -> None:
    """A task that looks like ours but whose run does not hold the cluster (any more): it runs nowhere."""
    task.resource_restrictions = _UNBOUND


class Binder:
    """The hooks of one run."""

    def __init__(self, scheduler: Any, table: RoutingTable, outbox: Outbox, alarms: Alarms) -> None:
        self._scheduler, self._outbox, self._alarms = scheduler, outbox, alarms
        self.table = table
        self.version: int | None = None
        """Current weight version, for annotations."""
        self._reasons: dict[str, str] = {}
        self._tags: dict[str, dict[str, int]] = {}

    def opened(self, opened: Mapping[str, tuple[int, str]]) -> None:
        """Contexts and prompts of rollouts whose graph comes next."""
        for key, (context, prompt) in opened.items():
            parts = key.split("-")
            self.table.open(parts[3], prompt, context, returns=int(parts[4]))

    def arrive(self, task: Any, parts: Parts) -> None:
        """A task of ours is new."""
        kind = parts[0]
        if kind == "rollout":
            if task.dependencies:
                task.resource_restrictions = _UNBOUND
            else:
                self._bind(task, parts)
        elif kind == "tool":
            task.resource_restrictions = _TOOL
            self._pin_tool(task, parts)
            self._annotate(task, parts, TOOL)
        else:
            task.resource_restrictions = _BY_KIND.get(kind, _TRAIN)

    def tool_returned(self, task: Any, parts: Parts) -> None:
        """A tool's task is in memory: bind the rollout that continues from it (a reward may depend on it too)."""
        metadata, task.metadata = task.metadata, None
        continuations = [other for other in task.dependents if other.key.startswith("rollout-")]
        if not continuations:
            return
        try:
            returned = metadata[wire.METADATA]
            state = ToolState(*returned["state"])
            self.table.returned(parts[3], int(parts[4]), state, returned["context"])
        except (KeyError, TypeError, ValueError) as error:
            self._alarms.ring("tool return", error)
            reason = f"{task.key} ended without a tool state: {type(error).__name__}: {error}"
            for continuation in continuations:
                self._leave_unbound(continuation, reason)
            return
        for continuation in continuations:
            if continuation.state == "waiting":
                self._bind(continuation, continuation.key.split("-"))

    def came_back(self, task: Any, parts: Parts) -> None:
        """A task has left its worker without a result (lost, called back, retried, taken away)."""
        if not task.who_wants and not task.waiters:
            return  # nobody wants it any more
        for address in task.worker_restrictions or ():
            if address not in self._scheduler.workers:
                self.table.withdraw(address)
        self._alarms.count(f"again:{parts[0]}")
        if task.metadata and wire.SEGMENT in task.metadata:
            task.metadata, task.worker_restrictions = None, None
            task.resource_restrictions = _UNBOUND
            self._outbox.give_back(task, f"the worker of {task.key} is gone, or its role was taken from it")
        elif parts[0] == "rollout":
            self._bind(task, parts)
        elif parts[0] == "tool":
            self._pin_tool(task, parts)

    def rebind_waiting(self, ours: Any) -> None:
        """Instances or tool workers have changed: decide again for bound tasks that no worker could take. ``ours(key)``
        gives the parts of a key of this run, else None."""
        again = [
            task
            for task in self._scheduler.unrunnable
            if (parts := ours(task.key)) and task.resource_restrictions is not _UNBOUND and self._decide(task, parts)
        ]
        # Dask takes recommendations from the end, so the most urgent goes last.
        again.sort(key=attrgetter("priority"), reverse=True)
        if again:
            self._scheduler.transitions({task.key: "processing" for task in again}, stimulus("rebind"))

    def expired(self, bind_seconds: float) -> Iterable[tuple[str, str]]:
        """Keys that have been runnable but unbound for ``bind_seconds``, each with the reason."""
        if not self._scheduler.unrunnable:
            self._reasons.clear()  # those of keys that were cancelled meanwhile
        horizon = monotonic() - bind_seconds
        for task, since in self._scheduler.unrunnable.items():
            if since > horizon:
                break  # in the order in which they became runnable
            if task.resource_restrictions is _UNBOUND:
                yield task.key, self._reasons.pop(task.key, "no decision was made: see the alarms")

    def ended(self, ended: Iterable[tuple[str, int | None]]) -> None:
        """Trajectories have ended, at these final contexts: tell who holds something of theirs."""
        for address, held in self.table.end(ended).items():
            self._outbox.forget(address, held)

    def _decide(self, task: Any, parts: Parts) -> bool:
        if parts[0] == "rollout":
            self._bind(task, parts)
        elif parts[0] == "tool":
            self._pin_tool(task, parts)
        else:
            return False
        return True

    def place(self, trajectory: str) -> Placement | str:
        """Decide where the trajectory's next segment runs, and tell the instance that it leaves to forget it (where KV
        is staged: once it has arrived); or why there is no decision."""
        try:
            placement, left = self.table.place(trajectory)
        except Exception as error:  # noqa: BLE001 - a policy is anyone's code; the alarm tells, and nothing runs
            self._alarms.ring("policy", error)
            return f"the bucket policy failed: {type(error).__name__}: {error}"
        if left is not None:
            self._outbox.forget(left, (trajectory,))
        return placement

    def arrived(self, trajectory: str) -> None:
        """A segment of the trajectory has ended: what lies of its KV where it was before is of no use any more."""
        if self.table.staging:
            for address in self.table.arrived(trajectory):
                self._outbox.forget(address, (trajectory,))

    def moved(self, trajectory: str, migration: Migration) -> None:
        """How the KV of a trajectory that moved has come: count it, log it beside both estimates, let the policy learn
        from it."""
        counts = self._alarms.counts
        counts[f"kv:{migration.way}"] += 1
        counts["kv:tokens"] += migration.tokens
        logger.info("%s moved: %s", trajectory, migration)
        target = next((each for each in self.table.instances.values() if each.name == migration.target), None)
        if target is not None and (way := _WAYS.get(migration.way)) is not None:
            self.table.policy.moved(MoveOutcome(way, migration.tokens, target.tp, migration.seconds))

    def _bind(self, task: Any, parts: Parts) -> None:
        placement = self.place(parts[3])
        if isinstance(placement, str):
            self._leave_unbound(task, placement)
            return
        tag = placement.tag
        restrictions = self._tags.get(tag)
        if restrictions is None:
            restrictions = self._tags[tag] = {tag: 1}
        task.resource_restrictions = restrictions
        task.worker_restrictions = None if placement.address is None else {placement.address}
        self._annotate(task, parts, tag)
        self._alarms.counts["bound"] += 1

    def _leave_unbound(self, task: Any, reason: str) -> None:
        task.resource_restrictions = _UNBOUND
        task.worker_restrictions = None
        self._reasons[task.key] = reason
        self._alarms.count("unbound")

    def _pin_tool(self, task: Any, parts: Parts) -> None:
        address = self.table.session(parts[3])
        task.worker_restrictions = None if address is None else {address}

    def _annotate(self, task: Any, parts: Parts, tag: str) -> None:
        told = {"trajectory": parts[3], "turn": int(parts[4]), "version": self.version, "bucket": tag}
        if self.table.staging and (kv := self._sources(parts[3])) is not None:
            told["kv"] = kv
        task.annotations = {**(task.annotations or {}), wire.ANNOTATION: told}

    def _sources(self, trajectory: str) -> dict[str, Any] | None:
        """Where staged KV of the trajectory may lie, for the worker of its next segment; None if nowhere else."""
        instances, move = self.table.sources(trajectory)
        workers = self._scheduler.workers
        there = [(each.name, workers[each.address]) for each in instances if each.address in workers]
        sources = [[name, node_of(worker.resources, worker.host), worker.address] for name, worker in there]
        if not sources:
            return None
        fetching, prefilling = (None, None) if move is None else (move.fetch, move.prefill)
        return {"sources": sources, "fetching": fetching, "prefilling": prefilling}
