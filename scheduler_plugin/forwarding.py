"""What leaves the scheduler: results to the driver, releases of what was delivered, reminders to forget.

Invariant: a key is no longer wanted from the tick on in which its result was sent. If it stayed wanted, the loss of a
worker would compute again what was used already, tools with their side effects included.

Releasing moves tasks, and Dask's transitions must not be entered from a hook that runs inside them; so releases are
collected and done together as soon as the event loop turns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from libra.resources import wire
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.retag import stimulus


class Outbox:
    """One a scheduler."""

    def __init__(self, scheduler: Any, alarms: Alarms) -> None:
        self._scheduler, self._alarms = scheduler, alarms
        self._released: defaultdict[str, list[str]] = defaultdict(list)
        self._armed = False
        self.by_topic: set[str] = set()
        """Clients that read a topic (public API of Dask) instead of the stream."""

    def send(self, client: str, message: wire.Message) -> None:
        """Send a message to a driver."""
        if client in self.by_topic:
            self._scheduler.log_event(wire.topic(client), message)
        else:
            self._scheduler.client_send(client, message)

    def finished(self, task: Any) -> None:
        """A task of ours is in memory: if its body left a result, send it to whoever wants it, and release it."""
        metadata = task.metadata
        if not metadata or wire.METADATA not in metadata:
            return
        task.metadata = None
        message = {"op": wire.RESULT, "key": task.key, "value": metadata[wire.METADATA]}
        for client in task.who_wants or ():
            self.send(client.client_key, message)
            self._released[client.client_key].append(task.key)
        self._alarms.counts["results"] += 1
        self._arm()

    def give_back(self, task: Any, reason: str) -> None:
        """A residence has left its worker unfinished: tell whoever wants it, and release it."""
        message = {"op": wire.EVENT, "event": "residence", "key": task.key, "reason": reason}
        for client in task.who_wants or ():
            self.send(client.client_key, message)
            self._released[client.client_key].append(task.key)
        self._arm()

    def forget(self, address: str, trajectories: Iterable[str]) -> None:
        """What the worker at ``address`` holds for these trajectories is no longer needed. Sent at once: it must come
        before a task that brings one of them back."""
        if address in self._scheduler.workers:
            self._scheduler.worker_send(address, {"op": wire.FORGET, "trajectories": list(trajectories)})

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._armed = False
        scheduler = self._scheduler
        released, self._released = self._released, defaultdict(list)
        for client, keys in released.items():
            if client in scheduler.clients:
                scheduler.client_releases_keys(keys=keys, client=client, stimulus_id=stimulus("delivered"))
