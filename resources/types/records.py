"""What one finished request cost, as telemetry records it and cost models read it.

Invariants: a record is of one trajectory that ended; ``context`` = ``prompt`` + ``generated`` + ``tool_tokens``; the
integrals count token-steps, so they are sums over turns and do not depend on where or how fast the request ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Residence:
    """Consecutive segments on one instance: its TP degree, and wall seconds."""

    tp: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Migration:
    """One move of the KV cache between instances."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One trajectory's cost.

    ``domain``: the task domain (search, math, …), by which classes of requests are told apart. ``prompt``,
    ``generated``, ``tool_tokens``: tokens. ``turns``: policy messages. ``tool_seconds``: wall time in tools.
    ``kvint``: Σ over sampled tokens of the context before it (token-steps of resident KV that decoding reads).
    ``prefill_tokens``: tokens prefilled at least once (prompt and tool returns). ``prefill_pairs``: Σ over prefills of
    n·(c + n/2), n the tokens prefilled at context c (token pairs that prefill attention computes).
    ``queue_seconds``: waited for a slot. ``ended``: Unix seconds, or virtual time.
    """

    trajectory: str
    domain: str
    prompt: int
    generated: int
    tool_tokens: int
    turns: int
    tool_seconds: float
    kvint: float
    prefill_tokens: int
    prefill_pairs: float
    queue_seconds: float = 0.0
    residences: tuple[Residence, ...] = ()
    migrations: tuple[Migration, ...] = ()
    ended: float = 0.0

    @property
    def context(self) -> int:
        """Final context in tokens."""
        return self.prompt + self.generated + self.tool_tokens

    @classmethod
    def from_turns(
        cls,
        trajectory: str,
        prompt: int,
        turns: Iterable[tuple[int, int, float]],
        domain: str = "default",
        ended: float = 0.0,
    ) -> Self:
        """From ``turns`` of (generated tokens, tool tokens that follow, tool seconds), the KV kept between turns."""
        context = prompt
        generated = tool_tokens = count = 0
        seconds = kvint = 0.0
        pairs = prompt * (prompt / 2)
        for sampled, returned, waited in turns:
            kvint += sampled * context + sampled * sampled / 2
            context += sampled
            pairs += returned * (context + returned / 2)
            context += returned
            generated += sampled
            tool_tokens += returned
            seconds += waited
            count += 1
        return cls(
            trajectory, domain, prompt, generated, tool_tokens, count, seconds, kvint, prompt + tool_tokens, pairs,
            ended=ended,
        )  # fmt: skip
