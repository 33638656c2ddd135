"""What one trajectory is made of, as token ids.

Invariants: token ids are int32, logprobs float32, versions int32; ``mask`` is 1 exactly where a token was sampled by
the policy; where ``mask`` is 0 the logprob is 0 and the version is -1. Text is never part of a trajectory's identity:
it is decoded for people only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from libra.resources.types.identity import TrajectoryId
from libra.resources.types.kv import Migration

Tokens = NDArray[np.int32]
Finish = Literal["stop", "length", "abort"]
"""Why a segment ended: a stop id, the limit of new tokens, or an abort (drain, cancel)."""

NOT_SAMPLED = -1
"""The version of a token that no policy sampled (prompt, tool return)."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The tokens sampled by one engine request.

    ``tokens``, ``logprobs`` and ``versions`` have shape (n,); ``context`` counts the tokens before the segment and
    ``cached`` those of them whose KV was reused. ``started`` and ``ended`` are Unix seconds; ``queued`` is the seconds
    of that time spent waiting for a slot. ``staged``: tokens whose KV went into the instance's arena at its end;
    ``migration``: how the KV came if the trajectory had moved here. ``tp``: the TP degree of ``instance``.
    """

    tokens: Tokens
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    context: int
    cached: int
    instance: str
    started: float
    ended: float
    queued: float = 0.0
    staged: int = 0
    migration: Migration | None = None
    tp: int = 1

    def served(self) -> Served:
        """What serving it took."""
        return Served(
            tokens=len(self.tokens),
            context=self.context,
            cached=self.cached,
            instance=self.instance,
            tp=self.tp,
            finish=self.finish,
            started=self.started,
            ended=self.ended,
            queued=self.queued,
            staged=self.staged,
            migration=self.migration,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What serving one segment took; the fields of its `Segment`, with the number of ``tokens`` in their place."""

    tokens: int
    context: int
    cached: int
    instance: str
    tp: int
    finish: Finish
    started: float
    ended: float
    queued: float
    staged: int
    migration: Migration | None = None


@dataclass(frozen=True, slots=True)
class ToolState:
    """What C-MLFQ sees of a tool return: the tool's type, the payload's size class and the status the tool reports."""

    type: str
    size: int
    status: str


@dataclass(frozen=True, slots=True, eq=False)
class ToolReturn:
    """What one tool call returned: ``payload`` is the token ids appended to the context (chat framing included),
    ``seconds`` the wall time of the call, ``digest`` a digest of the payload that a replayed session must reproduce."""

    turn: int
    call: dict[str, Any]
    payload: Tokens
    state: ToolState
    seconds: float
    digest: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed trajectory is data. ``kind`` infra: retried elsewhere, never trained on; task: dropped and counted."""

    kind: Literal["infra", "task"]
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished trajectory.

    ``tokens``, ``mask``, ``logprobs`` and ``versions`` have shape (n,), n the final context. ``task`` is the task's
    plain spec, ``prompt`` the prompt's number in the data set, ``end`` the environment's word for how it ended
    (``answer``, ``malformed``, ``turns``, ``tokens``). ``reward`` is None exactly when ``failure`` is set.
    ``prompt_tokens`` counts the leading tokens that are the prompt. ``segments``: what serving each of its segments
    took, in order. Times are Unix seconds.
    """

    id: TrajectoryId
    prompt: int
    epoch: int
    task: dict[str, Any]
    prompt_tokens: int
    tokens: Tokens
    mask: NDArray[np.int8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    tools: tuple[ToolReturn, ...]
    turns: int
    end: str
    reward: float | None
    failure: Failure | None = None
    started: float = 0.0
    ended: float = 0.0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    artifact: dict[str, Any] = field(default_factory=dict)
    segments: tuple[Served, ...] = ()

    @property
    def length(self) -> int:
        """Final context in tokens."""
        return len(self.tokens)

    @property
    def sampled(self) -> int:
        """Loss tokens: those with mask 1."""
        return int(self.mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version among the sampled tokens; None when nothing was sampled."""
        sampled = self.versions[self.mask == 1]
        return int(sampled.min()) if len(sampled) else None
