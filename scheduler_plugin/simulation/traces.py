"""What trajectories do, without what they say: generated tokens, tool states, payloads and tool seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.resources.types import RequestRecord, ToolState


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens ``generated``, then a tool call of ``seconds`` that returns ``payload`` tokens and ``state``; the last turn
    has no tool (``state`` None)."""

    generated: int
    state: ToolState | None = None
    payload: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory: ``name`` is ``p<prompt>e<epoch>m<member>``; ``prompt_tokens`` before the first turn; ``final``:
    its last context in tokens."""

    name: str
    prompt_tokens: int
    turns: tuple[Turn, ...]
    domain: str = "default"
    final: int = field(init=False)

    def __post_init__(self) -> None:
        grown = sum(turn.generated + turn.payload for turn in self.turns)
        object.__setattr__(self, "final", self.prompt_tokens + grown)

    @property
    def group(self) -> str:
        """What the members of one group share."""
        return self.name.rpartition("m")[0]

    def record(self) -> RequestRecord:
        """Its record, as telemetry would have it with the KV kept between turns."""
        turns = ((turn.generated, turn.payload, turn.seconds) for turn in self.turns)
        return RequestRecord.from_turns(self.name, self.prompt_tokens, turns, self.domain)


def prompt_of(name: str) -> str:
    """The prompt of a trajectory, the same in every epoch."""
    return name.partition("e")[0]
