"""The distribution of lengths at a node: a histogram with relative error, over an exponentially decayed window.

Bins are logarithmic as in DDSketch (Masson, Rim, Lee 2019): bin i holds lengths in (γ^(i-1), γ^i], answered as
2γ^i/(γ+1), within ``ACCURACY`` of every length in it. Time is a count of observations that the caller keeps; a weight
halves with every half-life (forward decay, Cormode et al. 2009: new observations weigh more, old ones are not touched).

Invariants: mean, quantiles and evidence use the same weights, so they speak of the same window; bins are ascending and
at most ``MAX_BINS``; the mean is exact, a quantile within ``ACCURACY`` for lengths from 1 to ``MAX_LENGTH``.
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

ACCURACY = 0.03
MAX_BINS = 255
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)
MAX_LENGTH = int(_GAMMA ** (MAX_BINS - 1))
LENGTHS = tuple(2 * _GAMMA**i / (_GAMMA + 1) for i in range(MAX_BINS))
"""What a bin stands for, in tokens."""
_MAX_EXPONENT = 60.0
_NEGLIGIBLE = 1e-9


def bin_of(length: float) -> int:
    """The bin that holds ``length``; lengths outside 1 to ``MAX_LENGTH`` count as the nearest that is inside."""
    if length <= 1:
        return 0
    return min(MAX_BINS - 1, math.ceil(math.log(length) / _LOG_GAMMA - 1e-9))


class Sketch:
    """Lengths in tokens. ``weight`` and ``total`` (Σw and Σw·length) and the bins' weights are as of ``stamp``: at tick
    t they are worth 2^(-(t - stamp)/half_life) of what they say."""

    __slots__ = ("bins", "stamp", "total", "weight", "weights")

    def __init__(self, stamp: float = 0.0) -> None:
        self.stamp = stamp
        self.weight = 0.0
        self.total = 0.0
        self.bins = bytearray()
        self.weights = array("d")

    def add(self, length: float, now: float, half_life: float) -> None:
        """Count ``length`` at tick ``now``."""
        age = (now - self.stamp) / half_life
        if age > _MAX_EXPONENT:
            self.settle(now, half_life)
            age = 0.0
        self._count(bin_of(length), length, 2.0**age)

    def evidence(self, now: float, half_life: float) -> float:
        """How many observations of this instant the window is worth."""
        return self.weight * 2.0 ** ((self.stamp - now) / half_life)

    def mean(self) -> float:
        """Mean length; ``ZeroDivisionError`` when nothing was counted."""
        return self.total / self.weight

    def quantile(self, q: float) -> float:
        """The length that a share ``q`` of the weight does not exceed; ``IndexError`` when nothing was counted."""
        return LENGTHS[self.bins[quantiles_at(self.weights, (q,))[0]]]

    def settle(self, now: float, half_life: float) -> None:
        """Restate all weights as of ``now`` and forget bins that no longer weigh anything."""
        self.scale(2.0 ** ((self.stamp - now) / half_life))
        self.stamp = now

    def scale(self, factor: float) -> None:
        """Make everything counted so far worth ``factor`` of what it is."""
        self.weight *= factor
        self.total *= factor
        floor = self.weight * _NEGLIGIBLE
        kept = [(b, w * factor) for b, w in zip(self.bins, self.weights, strict=True) if w * factor > floor]
        self.bins = bytearray(b for b, _ in kept)
        self.weights = array("d", (w for _, w in kept))

    def merge(self, other: Sketch, share: float) -> None:
        """Add what ``other`` counted, its weights times ``share``."""
        for b, weight in zip(other.bins, other.weights, strict=True):
            self._count(b, 0.0, weight * share)
        self.total += other.total * share

    def items(self) -> Iterator[tuple[float, float]]:
        """(length, weight) a bin, ascending."""
        return ((LENGTHS[b], w) for b, w in zip(self.bins, self.weights, strict=True))

    @property
    def nbytes(self) -> int:
        """Memory of this object in bytes."""
        return sys.getsizeof(self) + sys.getsizeof(self.bins) + sys.getsizeof(self.weights)

    def _count(self, b: int, length: float, weight: float) -> None:
        at = bisect_left(self.bins, b)
        if at < len(self.bins) and self.bins[at] == b:
            self.weights[at] += weight
        else:
            self.bins.insert(at, b)
            self.weights.insert(at, weight)
        self.weight += weight
        self.total += weight * length


def quantiles_at(weights: array[float], qs: Sequence[float]) -> list[int]:
    """For each of ``qs``, the index of the first entry at which the running sum of ``weights`` reaches that share."""
    reached = list(accumulate(weights))
    whole = reached[-1] * (1 - 1e-12)
    last = len(reached) - 1
    return [min(last, bisect_left(reached, q * whole)) for q in qs]
