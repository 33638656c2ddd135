"""What a policy expects of the move of a KV cache, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["hit", "load", "fetch", "prefill"]
"""How a trajectory's KV comes to its instance: it is there, from host memory, from another node, computed again."""


@dataclass(frozen=True, slots=True)
class MoveEstimate:
    """``seconds`` by the ``way`` chosen; ``fetch`` and ``prefill``: what each would take, None where
    there is nothing to fetch, or nothing to do."""

    way: Way
    seconds: float
    tokens: int
    fetch: float | None
    prefill: float | None


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """A move that happened: ``tokens`` of KV came in ``seconds`` by ``way`` to an instance of degree ``tp``."""

    way: Way
    tokens: int
    tp: int
    seconds: float
