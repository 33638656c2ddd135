"""The run's books: pacing, groups, batches, staleness.

Invariants (each holds after every event, at step 1 and at step 1,000, and after a resume because the books are a fold
over the journal):

* pacing: groups admitted less groups returned ≤ (installed + α + 1)·B, and ≤ steps·B;
* consumption: the staleness of a closed batch — the trained version less the oldest version among its sampled tokens —
  is ≤ α, because a group whose oldest version is v − α must be complete and in batch v before v closes;
* schedulability: for every u ≥ v at most (u − v + 1)·B live groups are due in batch u or before, v the next batch.
  Pacing gives it at admission; closing keeps it by taking, before any other group, as many of those due by u as the
  later batches could not take. Without it young groups that end first would take the places of old ones, and more than
  B groups would fall due at once;
* a group is in exactly one state: open, ready, in one closed batch, or returned (skipped: no spread of rewards;
  discarded: too few members with a reward). A returned group gives its credit back, so another takes its place;
* a member is trained at most once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class Wait:
    """Why no batch can be closed: groups that are due but not complete, or too few ready groups."""

    cause: Literal["due", "groups"]
    groups: tuple[int, ...]


class Ledger:
    """The books of one run; `apply` is the only way to change them."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.version = 0
        self.installed = -1
        self.admitted = 0
        self.returned = 0
        self.returned_in_a_row = 0
        self.groups: dict[int, Group] = {}
        self.ready: list[int] = []
        self.batches: dict[int, Batch] = {}
        self.closed: dict[int, str | None] = {}
        self.evaluations: list[Evaluated] = []
        self.counts: Counter[str] = Counter()

    # -- questions

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        ceiling = min(self.installed + self.rules.alpha + 1, self.rules.steps)
        return ceiling * self.rules.batch_groups - (self.admitted - self.returned)

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

    def next_batch(self) -> list[int] | Wait:
        """The groups of the next batch, in order, or what it waits for.

        Groups that must be in it come first (by ordinal), then the first complete ones (by completion).
        """
        chosen: list[int] = []
        for needed, among in self._obligations():
            complete = [o for o in self._by_completion(among) if o not in chosen]
            short = needed - sum(o in chosen for o in among)
            if short > len(complete):
                return Wait("due", tuple(o for o in among if not self.groups[o].complete))
            chosen += sorted(complete[: max(short, 0)])
        chosen += [ordinal for ordinal in self.ready if ordinal not in chosen]
        if len(chosen) < self.rules.batch_groups:
            return Wait("groups", tuple(o for o, g in self.groups.items() if not g.complete))
        return chosen[: self.rules.batch_groups]

    def _obligations(self) -> list[tuple[int, list[int]]]:
        """(How many, of which groups) must be in the next batch, by ascending due version.

        With N(u) live groups due in batch u or before, the batches v+1 … u can take (u − v)·B of them, so batch v must
        take N(u) − (u − v)·B at least.
        """
        due = sorted((o + self.rules.alpha, g.ordinal) for g in self.groups.values() if (o := g.oldest) is not None)
        found = []
        for last in sorted({version for version, _ in due}):
            among = [ordinal for version, ordinal in due if version <= last]
            later_batches = max(last - self.version, 0)
            needed = len(among) - later_batches * self.rules.batch_groups
            if needed > 0:
                found.append((needed, among))
        return found

    def _by_completion(self, among: list[int]) -> list[int]:
        return [ordinal for ordinal in self.ready if ordinal in among]

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
                if event.version != self.version:
                    raise ValueError(f"trained version {event.version}, but the books are at {self.version}")
                self.version += 1
            case Installed():
                self.installed = max(self.installed, event.version)
            case Evaluated():
                self.evaluations.append(event)

    def forget_batches(self, before: int) -> None:
        """Drop what is known of batches that a checkpoint covers."""
        self.closed = {v: path for v, path in self.closed.items() if v >= before}

    def _admit(self, event: Admitted) -> None:
        if event.group != self.admitted:
            raise ValueError(f"group {event.group} admitted out of order; the next one is {self.admitted}")
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
        self.groups[event.group] = Group(event.group, event.epoch, event.prompt, drafts)
        self.admitted += 1

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
        rewards = {t.reward for t in usable}
        partial = len(usable) < len(group.ended)
        if len(usable) < self.rules.min_usable or (partial and self.rules.require_full):
            self._return(group, "discarded")
        elif len(rewards) < 2:
            self._return(group, "skipped")
        else:
            self.returned_in_a_row = 0
            self.ready.append(group.ordinal)

    def _return(self, group: Group, why: str) -> None:
        del self.groups[group.ordinal]
        self.returned += 1
        self.returned_in_a_row += 1
        self.counts[why] += 1

    def _close(self, event: Closed) -> None:
        if event.version != self.version or event.version in self.closed:
            raise ValueError(f"batch {event.version} closed at version {self.version}, closed: {sorted(self.closed)}")
        if missing := [o for o in event.groups if o not in self.ready]:
            raise ValueError(f"batch {event.version} names groups {missing} that are not ready")
        groups = [self.groups.pop(ordinal) for ordinal in event.groups]
        self.ready = [ordinal for ordinal in self.ready if ordinal not in event.groups]
        trajectories = sorted((t for g in groups for t in g.usable), key=lambda t: t.id)
        self.batches[event.version] = Batch(event.version, tuple(trajectories))
        self.closed[event.version] = None

    def counters(self) -> dict[str, Any]:
        """Totals since the start of the run, plain values."""
        return {"admitted": self.admitted, "returned": self.returned, **self.counts}
