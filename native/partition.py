"""The exact rollout partition and greedy mixing (C++), as typed calls.

Invariants: `solve` returns the optimum itself, not an approximation, as long as costs do not rise when an interval
shrinks (they do not: see ``interval_costs.hpp``); the same inputs give the same bits on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.native import _planner

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Piece:
    """An instance: its level (index into the TP degrees), and the requests ``first`` to ``last`` − 1 it serves."""

    level: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Solution:
    """``seconds`` is the makespan, infinite (and no pieces) when no packing holds the longest request."""

    seconds: float
    pieces: tuple[Piece, ...]
    probes: int


@dataclass(frozen=True, slots=True)
class Probe:
    """``gpus``: fewest that serve everything in time, or the budget + 1. ``seconds``: what that packing really takes.
    ``next``: no packing changes for any limit below it."""

    gpus: int
    seconds: float
    next: float


class PartitionSolver:
    """Costs of N requests, sorted ascending by context, on L levels of ascending TP degree.

    ``context``, ``kv``, ``generated``: (N,) tokens, token-steps, tokens. ``work``, ``path``, ``alone``: (L, N) seconds.
    ``levels``: (L, 6): GPUs, seconds a step, 1/KV tokens, KV tokens, 1/slots, seconds a token above the capacity.
    ``wave``, ``path_share``: see `libra.resources.cost_model.rollout`. Raises `ValueError` when shapes disagree.
    """

    def __init__(
        self,
        context: Floats,
        kv: Floats,
        generated: Floats,
        work: Floats,
        path: Floats,
        alone: Floats,
        levels: Floats,
        wave: float,
        path_share: float,
    ) -> None:
        self._native = _planner.Partition(context, kv, generated, work, path, alone, levels, wave, path_share)

    def cost(self, piece: Piece) -> float:
        """Seconds of one instance; infinite when its KV cannot hold the longest request."""
        return self._native.cost(piece.level, piece.first, piece.last)

    def probe(self, seconds: float, budget: int) -> Probe:
        """What ``budget`` GPUs can do within ``seconds``."""
        return Probe(*self._native.probe(seconds, budget))

    def solve(self, budget: int) -> Solution:
        """The minimal makespan with ``budget`` GPUs, and a packing that has it."""
        seconds, pieces, probes = self._native.solve(budget)
        return Solution(seconds, tuple(Piece(*piece) for piece in pieces), probes)

    def mix(self, counts: tuple[int, ...]) -> tuple[float, NDArray[np.int32]]:
        """Longest work first, each to the instance that then ends first; ``counts``: instances a level. The makespan
        (infinite if a request fits none) and the instance of each request, numbered level by level."""
        seconds, where = self._native.mix(list(counts), True)
        return seconds, np.asarray(where, np.int32)

    def mix_seconds(self, counts: tuple[int, ...]) -> float:
        """The makespan of `mix` alone."""
        return self._native.mix(list(counts), False)[0]

    def __len__(self) -> int:
        return len(self._native)
