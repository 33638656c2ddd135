"""Which groups may enter a run and which make the next batch: pacing, due groups, returned groups.

The books of a run (`libra.pipeline.ledger`) and the simulator's loop are this object; what a group holds is theirs.
Pure: no clock, no I/O. Invariants, after every change:

* pacing: groups admitted less groups returned ≤ (installed + α + 1)·B, and ≤ steps·B;
* due: a group whose oldest version is v − α must be complete and in batch v before v closes, so that the staleness of
  a batch — the trained version less the oldest version among its sampled tokens — is ≤ α;
* schedulability: for every u ≥ v at most (u − v + 1)·B live groups are due in batch u or before, v the next batch.
  Pacing gives it at admission; closing keeps it by taking, before any other group, as many of those due by u as the
  later batches could not take. Without it young groups that end first would take the places of old ones, and more than
  B groups would fall due at once;
* a group is in exactly one state: open, ready, in one closed batch, or returned (skipped: no spread of rewards;
  discarded: too few members with a reward). A returned group gives its credit back, so another takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

Verdict = Literal["ready", "discarded", "skipped"]


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """``batch_groups``: B. ``alpha``: the staleness bound. ``steps``: of the run. ``min_usable``: the fewest members
    with a reward that make a group usable. ``require_full``: one failed member discards its group."""

    batch_groups: int
    alpha: int
    steps: int
    min_usable: int = 1
    require_full: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Why no batch can be closed: groups that are due but not complete, or too few ready groups."""

    cause: Literal["due", "groups"]
    groups: tuple[int, ...]


class Standing(Protocol):
    """What admission asks of a group: its number in the order of admission, whether every member has a terminal state,
    and the oldest version that a sampled token of it has or may yet have (None: it has none and will have none)."""

    @property
    def ordinal(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    @property
    def oldest(self) -> int | None: ...


G = TypeVar("G", bound=Standing)


class Admission(Generic[G]):
    """``version``: of the next batch, that is of the weights its gradient is computed on. ``installed``: that every
    instance which takes requests has loaded; −1 before the first. ``groups``: open and ready ones by ordinal.
    ``ready``: complete ones with something to learn from, by completion."""

    def __init__(self, pacing: AdmissionRules) -> None:
        self.pacing = pacing
        self.version = 0
        self.installed = -1
        self.admitted = 0
        self.returned = 0
        self.returned_in_a_row = 0
        self.groups: dict[int, G] = {}
        self.ready: list[int] = []

    # -- questions

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        ceiling = min(self.installed + self.pacing.alpha + 1, self.pacing.steps)
        return ceiling * self.pacing.batch_groups - (self.admitted - self.returned)

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
        if len(chosen) < self.pacing.batch_groups:
            return Wait("groups", tuple(o for o, g in self.groups.items() if not g.complete))
        return chosen[: self.pacing.batch_groups]

    def _obligations(self) -> list[tuple[int, list[int]]]:
        """(How many, of which groups) must be in the next batch, by ascending due version.

        With N(u) live groups due in batch u or before, the batches v+1 … u can take (u − v)·B of them, so batch v must
        take N(u) − (u − v)·B at least.
        """
        due = sorted((o + self.pacing.alpha, g.ordinal) for g in self.groups.values() if (o := g.oldest) is not None)
        found = []
        for last in sorted({version for version, _ in due}):
            among = [ordinal for version, ordinal in due if version <= last]
            later_batches = max(last - self.version, 0)
            needed = len(among) - later_batches * self.pacing.batch_groups
            if needed > 0:
                found.append((needed, among))
        return found

    def _by_completion(self, among: list[int]) -> list[int]:
        wanted = set(among)
        return [ordinal for ordinal in self.ready if ordinal in wanted]

    # -- changes

    def admit(self, group: G) -> None:
        """A group enters the rollout. ``ValueError`` if it is not the next one."""
        if group.ordinal != self.admitted:
            raise ValueError(f"group {group.ordinal} admitted out of order; the next one is {self.admitted}")
        self.groups[group.ordinal] = group
        self.admitted += 1

    def complete(self, ordinal: int, usable: int, members: int, spread: bool) -> Verdict:
        """Every member of a group has a terminal state, ``usable`` of ``members`` with a reward; ``spread``: whether
        their rewards differ. What becomes of the group: ready, or returned as discarded or skipped."""
        short = usable < self.pacing.min_usable or (usable < members and self.pacing.require_full)
        if not short and spread:
            self.returned_in_a_row = 0
            self.ready.append(ordinal)
            return "ready"
        del self.groups[ordinal]
        self.returned += 1
        self.returned_in_a_row += 1
        return "discarded" if short else "skipped"

    def take(self, ordinals: Sequence[int]) -> list[G]:
        """Consumption: the next batch takes these groups. ``ValueError`` names those that are not ready."""
        if missing := [ordinal for ordinal in ordinals if ordinal not in self.ready]:
            raise ValueError(f"batch {self.version} names groups {missing} that are not ready")
        self.ready = [ordinal for ordinal in self.ready if ordinal not in ordinals]
        return [self.groups.pop(ordinal) for ordinal in ordinals]

    def trained(self, version: int) -> None:
        """The gradient of ``version`` was applied. ``ValueError`` if that is not the version of the next batch."""
        if version != self.version:
            raise ValueError(f"trained version {version}, but the books are at {self.version}")
        self.version += 1

    def install(self, version: int) -> None:
        """Every instance that takes requests has loaded ``version``."""
        self.installed = max(self.installed, version)
