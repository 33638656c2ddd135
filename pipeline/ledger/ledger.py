"""The run's books: the trajectories of every group, batches, and what became of them.

When groups enter and which make a batch is `libra.scheduler_plugin.admission.Admission`, with its invariants (pacing,
staleness, schedulability, one state a group); they hold after every event, at step 1 and at step 1,000, and after a
resume because the books are a fold over the journal. Invariant here: a member is trained at most once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libra.pipeline.ledger.draft import Draft
from libra.pipeline.ledger.events import (
    Admitted,
    Closed,
    Ended,
    Evaluated,
    Event,
    Installed,
    Restarted,
    Segmented,
    Stored,
    Trained,
)
from libra.resources.codec import bytes_array, segment_from_wire, tool_return_from_wire
from libra.resources.types import Failure, Trajectory, TrajectoryId
from libra.scheduler_plugin.admission import Admission, AdmissionRules

BYTES_PER_TOKEN = 13
"""int32 id, float32 logprob, int32 version, int8 mask."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the books need to know of the config: B, members of a group, α, steps of the run, the fewest members with a
    reward that make a group usable, whether one failed member discards its group, and tool calls at most."""

    batch_groups: int
    group_size: int
    alpha: int
    steps: int
    min_usable: int
    require_full: bool
    max_turns: int

    @property
    def admission(self) -> AdmissionRules:
        """Those by which groups enter and leave."""
        return AdmissionRules(self.batch_groups, self.alpha, self.steps, self.min_usable, self.require_full)


@dataclass(slots=True)
class Group:
    """The members of one prompt in one epoch: drafts until they end, then trajectories (with a reward or a failure)."""

    ordinal: int
    epoch: int
    prompt: int
    drafts: dict[int, Draft]
    ended: dict[int, Trajectory] = field(default_factory=dict)
    oldest_ended: int | None = None
    """Oldest version among the sampled tokens of ended members with a reward."""

    @property
    def complete(self) -> bool:
        """Every member has a terminal state."""
        return not self.drafts

    @property
    def usable(self) -> list[Trajectory]:
        """Members with a reward, by member."""
        return [t for _, t in sorted(self.ended.items()) if t.reward is not None]

    @property
    def oldest(self) -> int | None:
        """Oldest version that a sampled token of this group has or may yet have."""
        known = [draft.oldest for draft in self.drafts.values()]
        if self.oldest_ended is not None:
            known.append(self.oldest_ended)
        return min(known, default=None)

    def end(self, trajectory: Trajectory) -> None:
        """A member reached its terminal state."""
        self.drafts.pop(trajectory.id.member, None)
        self.ended[trajectory.id.member] = trajectory
        if trajectory.reward is not None and (oldest := trajectory.oldest_version) is not None:
            self.oldest_ended = oldest if self.oldest_ended is None else min(self.oldest_ended, oldest)


@dataclass(frozen=True, slots=True)
class Batch:
    """A closed batch: its trained version and its trajectories sorted by id."""

    version: int
    trajectories: tuple[Trajectory, ...]

    @property
    def staleness(self) -> list[int]:
        """Per trajectory with sampled tokens: trained version − oldest version."""
        return [self.version - v for t in self.trajectories if (v := t.oldest_version) is not None]


class Ledger(Admission[Group]):
    """The books of one run; `apply` is the only way to change them."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules.admission)
        self.rules = rules
        self.batches: dict[int, Batch] = {}
        self.closed: dict[int, str | None] = {}
        self.evaluations: list[Evaluated] = []
        self.counts: Counter[str] = Counter()

    # -- questions

    @property
    def bytes_held(self) -> int:
        """Bytes of token data of unfinished, ready and unstored trajectories."""
        tokens = sum(d.length for g in self.groups.values() for d in g.drafts.values())
        tokens += sum(t.length for g in self.groups.values() for t in g.ended.values())
        tokens += sum(t.length for b in self.batches.values() for t in b.trajectories)
        return tokens * BYTES_PER_TOKEN

    def drafts(self) -> list[Draft]:
        """Every unfinished trajectory."""
        return [draft for group in self.groups.values() for draft in group.drafts.values()]

    def draft(self, trajectory: TrajectoryId) -> Draft:
        """An unfinished trajectory; ``KeyError`` when it has ended."""
        return self.groups[trajectory.group].drafts[trajectory.member]

    # -- changes

    def apply(self, event: Event) -> None:
        """Change the books by one event; ``ValueError`` if it cannot happen in this state."""
        match event:
            case Admitted():
                self._admit(event)
            case Segmented():
                tool = None if event.tool is None else tool_return_from_wire(event.tool)
                segment = segment_from_wire(event.segment)
                self._open_draft(event.trajectory).grow(tool, segment, event.action)
                self.counts["segments"] += 1
                self.counts["tokens"] += len(segment.tokens)
            case Restarted():
                self._open_draft(event.trajectory).restart(event.installed)
                self.counts["restarted"] += 1
            case Ended():
                self._end(event)
            case Closed():
                self._close(event)
            case Stored():
                self.batches.pop(event.version, None)
                self.closed[event.version] = event.path
            case Trained():
                self.trained(event.version)
            case Installed():
                self.install(event.version)
            case Evaluated():
                self.evaluations.append(event)

    def forget_batches(self, before: int) -> None:
        """Drop what is known of batches that a checkpoint covers."""
        self.closed = {v: path for v, path in self.closed.items() if v >= before}

    def _admit(self, event: Admitted) -> None:
        tokens = bytes_array(event.tokens, np.int32)
        drafts = {
            member: Draft(
                id=TrajectoryId("train", event.group, member),
                prompt=event.prompt,
                epoch=event.epoch,
                task=event.task,
                prompt_tokens=tokens,
                oldest=event.installed,
                max_turns=self.rules.max_turns,
                started=event.time,
            )
            for member in range(self.rules.group_size)
        }
        self.admit(Group(event.group, event.epoch, event.prompt, drafts))

    def _open_draft(self, trajectory: str) -> Draft:
        ident = TrajectoryId.parse(trajectory)
        group = self.groups.get(ident.group)
        if group is None or ident.member not in group.drafts:
            raise ValueError(f"trajectory {trajectory} is not open")
        return group.drafts[ident.member]

    def _end(self, event: Ended) -> None:
        draft = self._open_draft(event.trajectory)
        group = self.groups[draft.id.group]
        failure = None if event.failure is None else Failure(event.failure[0], event.failure[1])  # type: ignore[arg-type]
        group.end(draft.finish(event.reward, failure, event.artifact, event.time))
        self.counts["trajectories"] += 1
        if failure is not None:
            self.counts[f"failed:{failure.kind}"] += 1
        if group.complete:
            self._classify(group)

    def _classify(self, group: Group) -> None:
        usable = group.usable
        spread = len({t.reward for t in usable}) > 1
        verdict = self.complete(group.ordinal, len(usable), len(group.ended), spread)
        if verdict != "ready":
            self.counts[verdict] += 1

    def _close(self, event: Closed) -> None:
        if event.version != self.version or event.version in self.closed:
            raise ValueError(f"batch {event.version} closed at version {self.version}, closed: {sorted(self.closed)}")
        groups = self.take(event.groups)
        trajectories = sorted((t for g in groups for t in g.usable), key=lambda t: t.id)
        self.batches[event.version] = Batch(event.version, tuple(trajectories))
        self.closed[event.version] = None

    def counters(self) -> dict[str, Any]:
        """Totals since the start of the run, plain values."""
        return {"admitted": self.admitted, "returned": self.returned, **self.counts}
