"""What happens to a worker, and what shall be done about it: what `roles.advance` takes and gives.

Pure data. Invariant: an event or effect of a role's child carries the epoch in which that was started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra.resources.types import KVRoom

if TYPE_CHECKING:
    from libra.scheduler_plugin.roles import Duty

# What happens to a worker.


@dataclass(frozen=True, slots=True)
class Connected:
    """The worker has joined the cluster."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The worker has left; nothing that ran there runs any more."""


@dataclass(frozen=True, slots=True)
class Want:
    """It shall do ``duty``."""

    duty: Duty | None


@dataclass(frozen=True, slots=True)
class RunEnds:
    """It shall do nothing any more, without waiting for running tasks, and keep nothing for the run."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The worker reports of the role started as ``epoch``: ``ready``, ``failed``, ``lost`` or ``stopped``."""

    epoch: int
    state: str
    version: int | None = None
    slots: int = 0
    error: str | None = None
    kv_room: KVRoom | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine has loaded ``version``, or failed to (``error``)."""

    epoch: int
    version: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """There are new current weights."""


@dataclass(frozen=True, slots=True)
class Drained:
    """No task of the duty is left on the worker."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Connected | Disconnected | Want | RunEnds | Reported | Loaded | Published | Drained | Tick

# What shall be done about it.


@dataclass(frozen=True, slots=True)
class Start:
    """Tell the worker to start ``duty`` as ``epoch``, with the current weights."""

    epoch: int
    duty: Duty


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell the worker to end what it started as ``epoch`` and, where ``run_ends``, to free all that it keeps for the
    run."""

    epoch: int
    run_ends: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Tell the engine to load the current weights."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell a rollout role to cut its requests short, or (``drains`` false) to take requests again."""

    epoch: int
    drains: bool


@dataclass(frozen=True, slots=True)
class Evict:
    """Take the tasks of ``duty`` away from the worker, running ones too."""

    duty: Duty


@dataclass(frozen=True, slots=True)
class Lost:
    """A role that was ready is gone."""

    duty: Duty


Effect = Start | Stop | Load | Drain | Evict | Lost
