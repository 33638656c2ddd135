"""The fused form: residences hand over segments and ask where they go on, over their worker's stream.

Invariants: a segment counts if and only if it comes from the run of the task that Dask has on a worker now, and it is
passed on in the order in which it came; a residence that has handed over a segment is never run again with the
arguments that it was submitted with: once it has left its worker unfinished it is released, and its driver, who has the
segments, submits what follows (`libra.scheduler_plugin.binding.Binder.came_back`); every question of a run that counts
is answered at once, by the decision that binds the tasks of the pair form.
"""

from __future__ import annotations

from typing import Any

from libra.resources import wire
from libra.resources.types import ToolState
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.binding import Binder
from libra.scheduler_plugin.forwarding import Outbox


class Residences:
    """The residences of one run, whose driver is ``client``."""

    def __init__(self, scheduler: Any, binder: Binder, outbox: Outbox, alarms: Alarms, client: str) -> None:
        self._scheduler, self._binder, self._outbox, self._alarms = scheduler, binder, outbox, alarms
        self._client = client

    def finished(self, segments: list[tuple[str, int, bytes]]) -> None:
        """`wire.SEGMENT`: pass on what counts."""
        tasks, passed = self._scheduler.tasks, []
        for key, run, segment in segments:
            task = tasks.get(key)
            if task is None or task.run_id != run or task.state != "processing":
                self._alarms.count("stale:segment")
                continue
            if task.metadata is None:
                task.metadata = {wire.SEGMENT: True}
            passed.append((key, segment))
            if self._binder.table.staging:
                self._binder.arrived(key.split("-")[3])
        if passed:
            self._alarms.counts["segments"] += len(passed)
            self._outbox.send(self._client, {"op": wire.GROWN, "segments": passed})

    def asked(self, address: str, asks: list[tuple[int, str, int, int, list[Any], int]]) -> None:
        """`wire.ASK` of the worker at ``address``: answer what counts."""
        tasks, answers = self._scheduler.tasks, []
        for number, key, run, turn, state, context in asks:
            task = tasks.get(key)
            if task is None or task.run_id != run or task.state != "processing":
                self._alarms.count("stale:question")
                continue
            stays, error = self._decide(address, key.split("-")[3], turn, state, context)
            answers.append((number, stays, error))
        if answers:
            self._scheduler.worker_send(address, {"op": wire.ANSWER, "answers": answers})

    def _decide(
        self, address: str, trajectory: str, turn: int, state: list[Any], context: int
    ) -> tuple[bool, str | None]:
        """Whether the trajectory goes on at ``address``, and why there is no decision."""
        self._binder.table.returned(trajectory, turn, ToolState(*state), context)
        placement = self._binder.place(trajectory)
        if isinstance(placement, str):
            return False, placement
        stays = placement.address == address
        self._alarms.counts["stayed" if stays else "moved"] += 1
        return stays, None
