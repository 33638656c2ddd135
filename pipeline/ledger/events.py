"""The journaled events of a run.

Invariants: an event holds plain values, bytes and arrays only, so that ``from_record(to_record(e)) == e``; the books
are a fold over events (`libra.pipeline.ledger.ledger.Ledger.apply`), so that a resumed run has the books of the one
that was killed, up to the last durable event.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group enters the rollout: its ordinal, epoch and prompt number, the task's spec, the prompt's tokens (int32
    bytes), and the version installed on the engines at that instant."""

    group: int
    epoch: int
    prompt: int
    task: dict[str, Any]
    tokens: bytes
    installed: int
    time: float


@dataclass(frozen=True, slots=True)
class Segmented:
    """A trajectory grew by a tool return (wire form, or None) and the segment sampled after it; ``action`` is what the
    segment means."""

    trajectory: str
    tool: dict[str, Any] | None
    segment: dict[str, Any]
    action: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Restarted:
    """A trajectory starts again from its prompt: its session was lost."""

    trajectory: str
    installed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A trajectory reached its terminal state: a reward, or a failure (``[kind, reason]``)."""

    trajectory: str
    reward: float | None
    failure: list[str] | None
    artifact: dict[str, Any]
    time: float


@dataclass(frozen=True, slots=True)
class Closed:
    """Consumption: a batch is closed for the gradient of ``version`` and owns ``groups``."""

    version: int
    groups: list[int]


@dataclass(frozen=True, slots=True)
class Stored:
    """The trajectories of the closed batch of ``version`` are on disk."""

    version: int
    path: str


@dataclass(frozen=True, slots=True)
class Trained:
    """The gradient of ``version`` was applied: the trainer is at ``version + 1``."""

    version: int
    measures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Installed:
    """Every rollout instance that takes requests has loaded ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A held-out evaluation ended: mean reward over the tasks that have one; None if none has."""

    round: int
    version: int
    reward: float | None
    tasks: int
    failures: int


Event = Admitted | Segmented | Restarted | Ended | Closed | Stored | Trained | Installed | Evaluated


class _Registry:
    kinds: ClassVar[dict[str, type[Any]]] = {
        kind.__name__: kind
        for kind in (Admitted, Segmented, Restarted, Ended, Closed, Stored, Trained, Installed, Evaluated)
    }
    names: ClassVar[dict[type[Any], tuple[str, ...]]] = {
        kind: tuple(part.name for part in fields(kind)) for kind in kinds.values()
    }


def to_record(event: Event) -> dict[str, Any]:
    """A dict that the journal packs; ``event`` names the kind."""
    kind = type(event)
    record: dict[str, Any] = {"event": kind.__name__}
    for name in _Registry.names[kind]:
        record[name] = getattr(event, name)
    return record


def from_record(record: dict[str, Any]) -> Event:
    """Inverse of `to_record`; ``KeyError`` names an unknown kind."""
    values = dict(record)
    event: Event = _Registry.kinds[values.pop("event")](**values)
    return event
