"""What the workers' heartbeats say of KV that was not loaded or not staged, turned into what is new.

Pure. Invariant: what a worker has counted is told once. A worker counts by reason from the start of a run, whatever
becomes of its engines; one that starts again from less has begun another run or is another process.
"""

from __future__ import annotations

from collections.abc import Mapping


class Refusals:
    """The counts of every worker as last seen."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}

    def new(self, worker: str, counts: Mapping[str, int]) -> dict[str, int]:
        """What the worker has counted since the last call, by reason."""
        seen, self._seen[worker] = self._seen.get(worker, {}), dict(counts)
        if any(counts.get(reason, 0) < count for reason, count in seen.items()):
            seen = {}
        return {reason: more for reason, count in counts.items() if (more := count - seen.get(reason, 0))}

    def forget(self, workers: set[str]) -> None:
        """Keep only what is known of these."""
        self._seen = {worker: counts for worker, counts in self._seen.items() if worker in workers}
