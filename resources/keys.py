"""Keys of the step graph's tasks.

Invariants: ``TaskKey.parse(str(k)) == k``; Dask's key prefix (what stands before the first ``-`` part that is not a
word) is the kind, so the dashboard groups by kind; the step follows it. ``attempt`` makes a resubmission a new key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

Kind = Literal["rollout", "tool", "reward", "train", "publish", "initialise", "checkpoint", "restore", "step"]
KINDS: frozenset[str] = frozenset(get_args(Kind))


@dataclass(frozen=True, slots=True)
class TaskKey:
    """``step``: the admission step of the group (rollout, tool, reward) or the trained version (the others).
    ``subject``: the trajectory, or ``-`` free text for the others. ``index``: segment, turn or rank."""

    kind: Kind
    step: int
    run: str
    subject: str
    index: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.kind}-{self.step:06d}-{self.run}-{self.subject}-{self.index}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The key, or None for a key that is not of this system (a guest's task)."""
        parts = text.split("-")
        if len(parts) != 6 or parts[0] not in KINDS or not (parts[1] + parts[4] + parts[5]).isdigit():
            return None
        return cls(parts[0], int(parts[1]), parts[2], parts[3], int(parts[4]), int(parts[5]))  # type: ignore[arg-type]
