"""What trajectories do, without what they say: generated tokens, tool states, payloads and tool seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from libra.resources.types import RequestRecord, ToolState, Trajectory
from libra.resources.types.request import domain_of


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens ``generated``, then a tool call of ``seconds`` that returns ``payload`` tokens and ``state``; the last
    turn has no tool (``state`` None)."""

    generated: int
    state: ToolState | None = None
    payload: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory: ``name`` is ``p<prompt>e<epoch>m<member>``; ``prompt_tokens`` before the first turn; ``final``:
    its last context in tokens. ``lead``, ``trail``: seconds before its first segment is asked for, and after its last
    one until it has ended (its reward). ``told``: what telemetry has recorded of it, if it was recorded."""

    name: str
    prompt_tokens: int
    turns: tuple[Turn, ...]
    domain: str = "default"
    lead: float = 0.0
    trail: float = 0.0
    told: RequestRecord | None = field(default=None, compare=False)
    final: int = field(init=False)

    def __post_init__(self) -> None:
        grown = sum(turn.generated + turn.payload for turn in self.turns)
        object.__setattr__(self, "final", self.prompt_tokens + grown)

    @property
    def group(self) -> str:
        """What the members of one group share."""
        return self.name.rpartition("m")[0]

    @property
    def prompt(self) -> str:
        """Its prompt's key, the same in every epoch."""
        return self.name.partition("e")[0]

    def record(self) -> RequestRecord:
        """Its record, as telemetry has it; as it would have it with the KV kept between turns, of a trace that was not
        recorded."""
        if self.told is not None:
            return replace(self.told, trajectory=self.name)
        turns = ((turn.generated, turn.payload, turn.seconds) for turn in self.turns)
        return RequestRecord.from_turns(self.name, self.prompt_tokens, turns, self.domain)


def trace_of(trajectory: Trajectory, kind: str = "default") -> Trace:
    """What a recorded trajectory of the environment ``kind`` did, for replay. Runs of sampled tokens are turns; a tool
    return follows each but the last (a turn that was cut in two by a drain has no return in between and counts as
    one)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.mask, [0]])))
    sampled = [int(end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    turns = []
    for index, generated in enumerate(sampled):
        tool = trajectory.tools[index] if index < min(len(trajectory.tools), len(sampled) - 1) else None
        turns.append(Turn(generated, tool.state, len(tool.payload), tool.seconds) if tool else Turn(generated))
    name = f"p{trajectory.prompt}e{trajectory.epoch}m{trajectory.id.member}"
    told = RequestRecord.of_trajectory(trajectory, kind) if trajectory.segments else None
    domain = domain_of(trajectory.task, kind)
    return Trace(name, trajectory.prompt_tokens, tuple(turns), domain, told=told)
