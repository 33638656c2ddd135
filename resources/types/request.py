"""What one request (a trajectory, from the engines' side) took: the record that cost models and reports read.

Invariant: ``prompt + generated + tool`` is the final context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from libra.resources.types.kv import Migration
from libra.resources.types.trajectory import Served, ToolReturn, Trajectory


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """``prompt``, ``generated``, ``tool``: tokens; ``turns``: segments. ``kvint``: Σ context·tokens, the context at
    every generated token summed up (tokens²), which is what decoding reads of the KV. ``prefilled``: tokens whose KV
    was computed, not reused. Seconds: of the tools, in queues, and decoding by TP degree (``residence``).
    ``prefill_pairs``: Σ over prefills of n·(c + n/2), n the tokens computed after c reused ones, which is what prefill
    attention computes. ``domain``: the task domain (search, math, …), by which classes of requests are told apart.
    """

    trajectory: str
    prompt: int
    generated: int
    tool: int
    turns: int
    kvint: int
    prefilled: int
    tool_seconds: float
    queue_seconds: float
    residence: Mapping[int, float] = field(default_factory=dict)
    migrations: tuple[Migration, ...] = ()
    prefill_pairs: float = 0.0
    domain: str = "default"

    @property
    def context(self) -> int:
        """Final context in tokens."""
        return self.prompt + self.generated + self.tool

    @classmethod
    def of(
        cls,
        trajectory: str,
        prompt: int,
        segments: Sequence[Served],
        tools: Sequence[ToolReturn],
        domain: str = "default",
    ) -> Self:
        """From what serving its segments took, and its tool returns."""
        residence: dict[int, float] = {}
        for segment in segments:
            seconds = segment.ended - segment.started - segment.queued
            residence[segment.tp] = residence.get(segment.tp, 0.0) + seconds
        return cls(
            trajectory=trajectory,
            prompt=prompt,
            generated=sum(segment.tokens for segment in segments),
            tool=sum(len(tool.payload) for tool in tools),
            turns=len(segments),
            kvint=sum(decode_kvint(segment.context, segment.tokens) for segment in segments),
            prefilled=sum(segment.context - segment.cached for segment in segments),
            tool_seconds=sum(tool.seconds for tool in tools),
            queue_seconds=sum(segment.queued for segment in segments),
            residence=residence,
            migrations=tuple(segment.migration for segment in segments if segment.migration is not None),
            prefill_pairs=sum(prefill_pairs(segment.cached, segment.context - segment.cached) for segment in segments),
            domain=domain,
        )

    @classmethod
    def of_trajectory(cls, trajectory: Trajectory, kind: str) -> Self:
        """Of a finished trajectory of the environment ``kind``."""
        domain = domain_of(trajectory.task, kind)
        return cls.of(str(trajectory.id), trajectory.prompt_tokens, trajectory.segments, trajectory.tools, domain)

    def to_plain(self) -> dict[str, Any]:
        """Plain values (JSON types); `from_plain` reads them back."""
        plain = asdict(self)
        plain["residence"] = [[tp, seconds] for tp, seconds in self.residence.items()]
        plain["migrations"] = [asdict(migration) for migration in self.migrations]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `to_plain`."""
        residence = {int(tp): float(seconds) for tp, seconds in plain["residence"]}
        migrations = tuple(Migration(**migration) for migration in plain["migrations"])
        return cls(**{**plain, "residence": residence, "migrations": migrations})

    @classmethod
    def from_turns(
        cls, trajectory: str, prompt: int, turns: Iterable[tuple[int, int, float]], domain: str = "default"
    ) -> Self:
        """From ``turns`` of (generated tokens, tool tokens that follow, tool seconds), the KV kept between turns."""
        context = prompt
        generated = tool = count = kvint = 0
        seconds, pairs = 0.0, prefill_pairs(0, prompt)
        for sampled, returned, waited in turns:
            kvint += decode_kvint(context, sampled)
            context += sampled
            pairs += prefill_pairs(context, returned)
            context += returned
            generated, tool, seconds, count = generated + sampled, tool + returned, seconds + waited, count + 1
        return cls(
            trajectory=trajectory,
            prompt=prompt,
            generated=generated,
            tool=tool,
            turns=count,
            kvint=kvint,
            prefilled=prompt + tool,
            tool_seconds=seconds,
            queue_seconds=0.0,
            prefill_pairs=pairs,
            domain=domain,
        )


def domain_of(task: Mapping[str, Any], kind: str) -> str:
    """The domain of a task: what its spec says under ``domain``, else the ``kind`` of its environment."""
    return str(task.get("domain", kind))


def totals(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Sums over ``records`` as plain values: seconds of ``queue``, ``tool`` and ``migration``, of ``residence`` by TP
    degree (as text), ``kvint`` in tokens², ``prefilled`` tokens, and ``migrations`` with their ``migration_bytes``."""
    residence: dict[str, float] = {}
    for record in records:
        for tp, seconds in sorted(record.residence.items()):
            residence[str(tp)] = residence.get(str(tp), 0.0) + seconds
    moves = [migration for record in records for migration in record.migrations]
    return {
        "queue_seconds": sum(record.queue_seconds for record in records),
        "tool_seconds": sum(record.tool_seconds for record in records),
        "residence": residence,
        "kvint": sum(record.kvint for record in records),
        "prefilled": sum(record.prefilled for record in records),
        "migrations": len(moves),
        "migration_bytes": sum(migration.bytes for migration in moves),
        "migration_seconds": sum(migration.seconds for migration in moves),
    }


def decode_kvint(context: int, generated: int) -> int:
    """Σ of the context at each of ``generated`` tokens that follow ``context``: g·c + g(g-1)/2."""
    return generated * context + generated * (generated - 1) // 2


def prefill_pairs(context: int, tokens: int) -> float:
    """Token pairs that attention computes when ``tokens`` are prefilled after ``context`` reused ones: n·(c + n/2)."""
    return tokens * (context + tokens / 2)
