"""Which workers have lost their role, why, and how long it took until they were back.

Invariants: an outage begins with the first loss that is told of a worker that was ready before, and ends as that worker
is ready again (whatever its role is then); a role that never came up is no outage; its reason is the first that the
role itself has given, else that its worker is gone. The first `KEPT` are kept, all are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from libra.pipeline.view import events as happened

KEPT = 100


@dataclass(frozen=True, slots=True)
class Outage:
    """A ``worker`` lost its ``role`` ``at`` seconds after the run's start for ``reason`` (in the failing part's own
    words); it was ready again after ``seconds`` (None: not yet, or never)."""

    worker: str
    role: str
    at: float
    reason: str
    seconds: float | None = None


class Restarts:
    """Of one run. ``outages``: in the order in which they began; ``count``: of all, those not kept included."""

    def __init__(self) -> None:
        self.outages: list[Outage] = []
        self.count = 0
        self._ready: dict[str, str] = {}
        self._open: dict[str, int | None] = {}
        self._unexplained: set[str] = set()

    def role_changed(self, event: happened.RoleChanged, at: float) -> None:
        """A worker's role has changed, ``at`` seconds after the run's start."""
        if event.state == "ready":
            self._unexplained.discard(event.worker)
            index = self._open.pop(event.worker, None)
            if index is not None:
                outage = self.outages[index]
                self.outages[index] = replace(outage, seconds=at - outage.at)
            self._ready[event.worker] = event.role
        elif event.state in ("failed", "lost"):
            self._lost(event.worker, at)
            self._explain(event.worker, event.error or "")
        elif event.state == "stopped":
            self._ready.pop(event.worker, None)  # as it was told to

    def worker_gone(self, worker: str, reason: str, at: float) -> None:
        """A worker is gone, or of no use any more. Others than workers are ignored."""
        if self._lost(worker, at) and (index := self._open[worker]) is not None:
            self.outages[index] = replace(self.outages[index], reason=reason)

    def restore(self, count: int, outages: Iterable[Mapping[str, Any]]) -> None:
        """Before anything else is told: go on counting where an earlier process of the run has ended."""
        self.count, self.outages = count, [Outage(**outage) for outage in outages]

    def plain(self) -> list[dict[str, Any]]:
        """The kept outages as plain values."""
        return [asdict(outage) for outage in self.outages]

    def _lost(self, worker: str, at: float) -> bool:
        """Begin an outage, unless the worker was not ready."""
        role = self._ready.pop(worker, None)
        if role is None:
            return False
        self.count += 1
        kept = len(self.outages) < KEPT
        self._open[worker] = len(self.outages) if kept else None
        self._unexplained.add(worker)
        if kept:
            self.outages.append(Outage(worker, role, at, ""))
        return True

    def _explain(self, worker: str, reason: str) -> None:
        index = self._open.get(worker)
        if reason and worker in self._unexplained:
            self._unexplained.discard(worker)
            if index is not None:
                self.outages[index] = replace(self.outages[index], reason=reason)
