"""Names of trajectories, unique within a run.

Invariant: ``TrajectoryId.parse(str(t)) == t``; the text holds no ``-`` so that it can stand inside a task key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self

Stream = Literal["train", "heldout"]

_PREFIX: dict[Stream, str] = {"train": "g", "heldout": "h"}
_STREAM: dict[str, Stream] = {prefix: stream for stream, prefix in _PREFIX.items()}
_TEXT = re.compile(r"([gh])(\d+)m(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """``group`` is the admission ordinal of the group (train) or the evaluation round (heldout), ``member`` the
    member of the group (train) or the task of the held-out set (heldout)."""

    stream: Stream
    group: int
    member: int

    def __str__(self) -> str:
        return f"{_PREFIX[self.stream]}{self.group}m{self.member}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of ``str``; ``ValueError`` on anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no trajectory id; one reads like 'g12m3' (train) or 'h0m41' (held-out)")
        return cls(_STREAM[match[1]], int(match[2]), int(match[3]))
