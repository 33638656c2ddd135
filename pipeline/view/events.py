"""What happens in a run, as the run loop tells it to the view.

Invariants: events are frozen and hold plain values; ``time`` is Unix seconds of the driver's clock; an event states a
fact, never what to show. State events (`InFlight`, `WaitStarted` …) hold until the next one of their kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from libra.resources.types import Stream

Resource = Literal["rollout", "tool", "reward", "train"]
Cause = Literal[
    "start", "cold start", "admission", "prompts", "batch", "due group", "rollout", "tool", "reward", "train",
    "publish", "weights", "evaluation", "checkpoint", "buffer", "recovery", "end",
]  # fmt: skip
"""What an idle resource waits for, as one word of the idle breakdown."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run begins (or resumes) at trained version ``version``. ``steps``: steps in all."""

    time: float
    name: str
    run_dir: str
    steps: int
    version: int = 0
    dashboard: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Something long advances before the first step: ``what`` (``cold start``) and its plain measures."""

    time: float
    what: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """A worker's role is ``starting``, ``ready``, ``failed``, ``lost`` or ``stopped``; ``error`` is its own text."""

    time: float
    worker: str
    role: str
    state: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """How much runs now on each resource: counts that hold until the next event.

    Keys are a `Resource`, or ``rollout/<instance>`` to account engines one by one (the idle share is then their mean).
    A resource is busy while its count is above 0; a unit that is not named keeps its count. Send it when a count
    changes; once a driver window is enough.
    """

    time: float
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Worked:
    """Told afterwards: a unit (as in `InFlight`) was busy from ``started`` to ``ended``, Unix seconds.

    What was counted as its idle time in between becomes busy time. For work whose beginning the loop does not see
    (a segment on an engine, a tool call): no `InFlight` is needed for that unit then.
    """

    time: float
    unit: str
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Moved:
    """A trajectory has moved to another instance, and its KV came by ``way`` (`Migration`): ``tokens`` and ``bytes`` of
    it in ``seconds``."""

    time: float
    way: str
    tokens: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class KVRefused:
    """KV was not loaded, so that it was computed again, or not staged: how often more, by reason
    (`libra.tasks.engines.base.Generated`)."""

    time: float
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Load:
    """How much runs now, for people to look at; not accounted. Keys as in `InFlight`."""

    time: float
    running: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the bucket policy shows of itself (`BucketPolicy.metrics`)."""

    time: float
    measures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WaitStarted:
    """``who`` waits; while it is idle its idle time goes to ``cause``.

    ``id`` names the wait; a later wait with the same id replaces it. ``detail`` and ``unblocked_by`` are for people;
    ``deadline`` is the seconds it may last.
    """

    time: float
    id: str
    who: Resource
    cause: Cause
    detail: str = ""
    unblocked_by: str = ""
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """The wait ``id`` is over; unknown ids are ignored."""

    time: float
    id: str


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """A trajectory has a terminal state.

    ``length``: final context in tokens; ``sampled``: loss tokens; ``seconds``: wall time; ``reward`` is None exactly
    when ``failure`` (``infra`` or ``task``) is set; ``reason`` is the failure's text.
    """

    time: float
    id: str
    stream: Stream
    length: int
    sampled: int
    turns: int
    end: str
    reward: float | None
    seconds: float
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    failure: Literal["infra", "task"] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """A group of the training stream is complete. ``skipped``: every reward equal, nothing to learn; ``unusable``: too
    few rewards; ``expired``: due in a batch and dropped at its deadline. ``played``: what the members of a group
    that is not stored did (rows of `libra.pipeline.simulate.played`)."""

    time: float
    group: int
    members: int
    usable: int
    outcome: Literal["usable", "skipped", "unusable", "expired"]
    played: tuple[list[Any], ...] = ()


@dataclass(frozen=True, slots=True)
class StepTrained:
    """One optimizer step. ``version`` is the trained one (before the update): step number ``version + 1`` is done.

    ``staleness``, ``lengths`` and ``rewards`` have one entry a training sequence. ``measures`` are the trainer's own
    (``loss``, ``grad_norm``, ``entropy``, ``clip_share``, ``logprob_gap_mean``, ``logprob_gap_max``, ``loss_tokens``,
    ``seconds``). ``requests``: what serving the batch took (`libra.resources.types.request.totals`). ``replayed``:
    trained again from the journal after a resume.
    """

    time: float
    version: int
    groups: int
    staleness: tuple[int, ...]
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    sampled: int
    measures: Mapping[str, float]
    requests: Mapping[str, Any] = field(default_factory=dict)
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """Version ``version`` is written and every engine has it, ``seconds`` after publishing began."""

    time: float
    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EvalFinished:
    """A held-out evaluation of ``version``: mean reward over the ``tasks`` that have one (None if none has);
    ``failures`` had none. ``when``: before the first step, during, or after the last one."""

    time: float
    version: int
    when: Literal["before", "during", "after"]
    reward: float | None
    tasks: int
    failures: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Something failed that is not a trajectory's end: a segment to be retried (``infra``), a lost worker (``worker``),
    an alarm of the plugin (``alarm``). ``what`` names it, ``reason`` is the failing part's own text."""

    time: float
    kind: Literal["infra", "task", "worker", "alarm"]
    what: str
    reason: str
    retried: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A line for people: a checkpoint ignored, a batch replayed, a run folder moved."""

    time: float
    text: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over: ``finished``, ``interrupted`` (Ctrl-C) or ``failed`` with its error's text."""

    time: float
    outcome: Literal["finished", "interrupted", "failed"]
    error: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further plain values for ``summary.json`` (for example CPU seconds by process)."""


Event = (
    RunStarted | Progress | RoleChanged | InFlight | Worked | Moved | KVRefused | Load | PolicyState | WaitStarted
    | WaitEnded
    | TrajectoryEnded | GroupFinished | StepTrained | Published | EvalFinished | Failed | Note | RunEnded
)  # fmt: skip
