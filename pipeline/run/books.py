"""The run's books on disk: every event is journaled, then applied.

Invariants: the ledger holds exactly the events in the journal (plus those of the checkpoint it began with); nothing
changes the ledger but `record`. An event is durable at most ``store.journal_sync`` after it was recorded; `settled`
waits until everything recorded so far is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra.pipeline.ledger.events import Closed, Ended, Event, Segmented, to_record
from libra.pipeline.ledger.ledger import Batch, Ledger
from libra.pipeline.run.waits import Changes, Emit
from libra.pipeline.simulate.played import played, trace_row
from libra.pipeline.store.journal import Journal
from libra.pipeline.view.events import GroupFinished, StepTrained, TrajectoryEnded
from libra.resources.batches import BatchReader
from libra.resources.types import Stream, Trajectory, TrajectoryId
from libra.resources.types.request import totals


def trajectory_ended(trajectory: Trajectory, stream: Stream, now: float) -> TrajectoryEnded:
    """What the view is told of a finished trajectory."""
    failure = trajectory.failure
    return TrajectoryEnded(
        time=now,
        id=str(trajectory.id),
        stream=stream,
        length=trajectory.length,
        sampled=trajectory.sampled,
        turns=trajectory.turns,
        end=trajectory.end,
        reward=trajectory.reward,
        seconds=trajectory.ended - trajectory.started,
        generate_seconds=trajectory.generate_seconds,
        tool_seconds=trajectory.tool_seconds,
        failure=None if failure is None else failure.kind,
        reason="" if failure is None else failure.reason,
    )


def step_trained(version: int, path: Path, measures: Mapping[str, Any], replayed: bool = False) -> StepTrained:
    """What the view is told of a step: the batch's facts, read back from the store, and the trainer's measures."""
    reader = BatchReader(path)
    table = reader.table()
    oldest = table["oldest_version"]
    return StepTrained(
        time=time.time(),
        version=version,
        groups=len(set(table["group"].tolist())),
        staleness=tuple((version - oldest[oldest >= 0]).tolist()),
        lengths=tuple(table["length"].tolist()),
        rewards=tuple(table["reward"].tolist()),
        sampled=int(table["sampled"].sum()),
        measures={
            name: float(value)
            for name, value in measures.items()
            if isinstance(value, (int, float)) and name != "version"
        },
        requests=totals(reader.records()),
        replayed=replayed,
    )


class Books:
    """Journal and ledger together; wakes waiters on every change that can unblock one."""

    def __init__(self, ledger: Ledger, journal: Journal, emit: Emit) -> None:
        self.ledger, self._journal, self._emit = ledger, journal, emit
        self.changes = Changes()

    def record(self, event: Event) -> None:
        """Journal ``event`` and apply it."""
        self._journal.append(to_record(event))
        if isinstance(event, Ended):
            self._end(event)
        else:
            self.ledger.apply(event)
        if not isinstance(event, Segmented):  # a segment unblocks nobody, and there are many
            self.changes.notify()

    async def settled(self) -> None:
        """Until every recorded event is on disk."""
        await self._journal.durable()

    def close_batch(self, groups: list[int]) -> Batch:
        """Consumption: close the batch of the ledger's version over ``groups``."""
        version = self.ledger.version
        self.record(Closed(version, groups))
        return self.ledger.batches[version]

    def _end(self, event: Ended) -> None:
        ledger, ident = self.ledger, TrajectoryId.parse(event.trajectory)
        group = ledger.groups[ident.group]
        before = (ledger.counts["skipped"], ledger.counts["discarded"])
        ledger.apply(event)
        now = time.time()
        self._emit(trajectory_ended(group.ended[ident.member], "train", now))
        if group.complete:
            skipped, discarded = ledger.counts["skipped"] - before[0], ledger.counts["discarded"] - before[1]
            outcome: Any = "skipped" if skipped else "unusable" if discarded else "usable"
            # Nobody stores a group that is not usable, and a replay needs it.
            unstored = group.ended if outcome != "usable" else {}
            rows = tuple(trace_row(played(trajectory)) for _, trajectory in sorted(unstored.items()))
            self._emit(GroupFinished(now, group.ordinal, len(group.ended), len(group.usable), outcome, rows))
