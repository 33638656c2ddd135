"""What a rollout simulation keeps and gives back: costs of moving KV, ends, counters, and trajectories in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.scheduler_plugin.simulation.engine import Engine
from libra.scheduler_plugin.simulation.engine import Sequence as Job
from libra.scheduler_plugin.simulation.traces import Trace


@dataclass(frozen=True, slots=True)
class Moves:
    """What KV costs between and after turns. ``kv_bytes``: of one token; ``host``, ``network``: bytes/s through host
    memory and between nodes. ``offload``: KV of waiting trajectories is kept in host memory; without, an engine whose
    KV is above ``pressure`` has dropped it. ``shared``: an engine prefills the prompt of a group's members once."""

    kv_bytes: float
    host: float
    network: float
    offload: bool = True
    pressure: float = 0.85
    shared: bool = True

    def seconds(self, tokens: float, same_node: bool) -> float:
        """To bring ``tokens`` of KV to another instance."""
        size = tokens * self.kv_bytes
        return size / self.host + (0.0 if same_node else size / self.network)


@dataclass(frozen=True, slots=True)
class Ended:
    """A trajectory's end. ``version``: the oldest among its sampled tokens; ``began``, ``time``: virtual seconds."""

    trace: Trace
    how: Literal["finished", "failed", "cancelled"]
    version: int
    began: float
    time: float
    queued: float
    retries: int

    @property
    def engine_seconds(self) -> float:
        """What it was on engines, queued or running: its life less tools and hand-overs (of its last try)."""
        away = self.trace.lead + self.trace.trail + sum(turn.seconds for turn in self.trace.turns)
        return self.time - self.began - away


@dataclass(slots=True)
class Totals:
    """Counters since the start. Tokens: ``context`` of finished trajectories, ``generated`` by segments that ended,
    ``moved`` at changes of instance, ``reprefilled`` because KV was gone. ``restarts``: of trajectories whose
    environment had failed. ``decisions`` at tool returns, ``right`` those bound to the bucket of the final context."""

    events: int = 0
    finished: int = 0
    failed: int = 0
    restarts: int = 0
    cancelled: int = 0
    context: float = 0.0
    generated: float = 0.0
    moved: float = 0.0
    reprefilled: float = 0.0
    moves: int = 0
    decisions: int = 0
    right: int = 0


@dataclass(slots=True)
class Life:
    """A trajectory in flight. ``version``: the oldest that a sampled token has, or can yet have while nothing was
    ``sampled``. ``at``: the engine with its KV, or that had it. ``tried``: version of the segment that runs.
    ``epoch``: events of earlier ones are void."""

    trace: Trace
    job: Job
    version: int
    began: float
    turn: int = 0
    context: float = 0.0
    at: Engine | None = None
    retries: int = 0
    epoch: int = 0
    running: bool = False
    sampled: bool = False
    tried: int = 0

    def sample(self) -> None:
        """Tokens were sampled by the segment that ran."""
        self.version = min(self.version, self.tried) if self.sampled else self.tried
        self.sampled = True
