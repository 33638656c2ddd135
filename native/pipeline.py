"""Pipelines of unequal micro-batches, and batches dealt to data-parallel ranks (C++), as typed calls.

Invariant: ``seconds`` is the time of the slowest rank; a pass through p stages is never shorter than any one stage's
own work.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from libra.native import _planner

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of a micro-batch on one stage: constant + linear·tokens + quadratic·Σ length²."""

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    def seconds(self, tokens: float, squares: float) -> float:
        """For a micro-batch of ``tokens`` tokens and ``squares`` = Σ length²."""
        return self.constant + self.linear * tokens + self.quadratic * squares


@dataclass(frozen=True, slots=True)
class StageCosts:
    """``stages`` alike but the last, which also computes logits; ``send`` passes activations to the next stage."""

    stages: int
    forward: PassCost
    backward: PassCost
    last_forward: PassCost
    last_backward: PassCost
    send: PassCost = PassCost()

    def coefficients(self) -> Floats:
        """As the native module takes them: shape (16,)."""
        costs = (self.forward, self.backward, self.last_forward, self.last_backward, self.send)
        return np.array([self.stages, *(value for cost in costs for value in astuple(cost))], np.float64)


class TrainBatch:
    """A batch of sequences of ``lengths`` tokens. ``quadratic``: weight of length² against length when ranks are
    balanced. Raises `ValueError` for an empty batch."""

    def __init__(self, lengths: Floats, quadratic: float) -> None:
        self._native = _planner.TrainBatch(np.ascontiguousarray(lengths, np.float64), quadratic)

    def seconds(self, ranks: int, micro: int, coefficients: Floats, forward_only: bool = False) -> tuple[float, float]:
        """The slowest rank's 1F1B pass and, if asked, forward-only pass, in seconds; ``micro`` sequences a
        micro-batch, longest first; ``coefficients`` as `StageCosts.coefficients` gives them."""
        return self._native.seconds(ranks, micro, coefficients, forward_only)

    def dealt(self, ranks: int) -> list[list[float]]:
        """Lengths of each rank, descending: longest first to the least loaded."""
        return self._native.dealt(ranks)


def one_f_one_b(tokens: Floats, squares: Floats, costs: StageCosts) -> float:
    """Seconds of a 1F1B pass of micro-batches with these ``tokens`` and Σ length² (shape (m,))."""
    return _planner.one_f_one_b(tokens, squares, costs.coefficients())


def forward_only(tokens: Floats, squares: Floats, costs: StageCosts) -> float:
    """Seconds of a forward pass of micro-batches with these ``tokens`` and Σ length² (shape (m,))."""
    return _planner.forward_only(tokens, squares, costs.coefficients())
