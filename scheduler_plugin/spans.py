"""Dask's spans, without the step graph.

Dask keeps a span for every burst of tasks that no user named one for, and with it the tasks' groups, as long as the
scheduler lives: a run of many small graphs would fill its memory. Invariant: a guest's tasks have their spans as ever;
tasks of the step graph have none, so what Dask remembers of them ends with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distributed.spans import SpansSchedulerExtension

from libra.scheduler_plugin.binding import split_key

EXTENSION = "spans"


class GuestSpans(SpansSchedulerExtension):
    """Takes the place of Dask's own extension, spans that are there included."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        present = scheduler.extensions.get(EXTENSION)
        if present is not None:
            self.__dict__.update(present.__dict__)

    def observe_tasks(self, tss: Iterable[Any], code: Any, span_metadata: Any) -> dict[Any, dict[str, Any]]:
        """Called by Dask with new tasks."""
        guests = [task for task in tss if split_key(task.key) is None]
        found: dict[Any, dict[str, Any]] = super().observe_tasks(guests, code, span_metadata) if guests else {}
        return found

    def heartbeat(self, ws: Any, data: Mapping[tuple[Any, ...], float]) -> None:
        """Called by Dask with a worker's measures by context and span; those of tasks without a span are left out."""
        super().heartbeat(ws, {key: value for key, value in data.items() if key[1] is not None})
