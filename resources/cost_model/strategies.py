"""Many training strategies at once, as columns, so that a whole tree is priced in a few array operations.

Invariant: row i of every column is the same strategy; `row` gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from libra.resources.types import Recompute, TrainStrategy

RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "full")
"""From the fastest and largest to the slowest and smallest; columns hold the index."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Strategies:
    """Columns of shape (N,): see `TrainStrategy`."""

    tp: Ints
    ep: Ints
    pp: Ints
    dp: Ints
    micro_batch: Ints
    recompute: Ints

    @classmethod
    def of(cls, strategies: Iterable[TrainStrategy]) -> Self:
        """The columns of these strategies."""
        rows = [(s.tp, s.ep, s.pp, s.dp, s.micro_batch, RECOMPUTE.index(s.recompute)) for s in strategies]
        return cls(*np.array(rows, np.int64).reshape(-1, 6).T)

    @property
    def gpus(self) -> Ints:
        """Devices used."""
        return self.tp * self.ep * self.pp * self.dp

    @property
    def replicas(self) -> Ints:
        """Ranks that take different sequences."""
        return self.ep * self.dp

    def row(self, i: int) -> TrainStrategy:
        """The i-th strategy."""
        tp, ep, pp, dp, micro, recompute = (int(getattr(self, f.name)[i]) for f in fields(self))
        return TrainStrategy(tp, ep, pp, dp, micro, RECOMPUTE[recompute])

    def take(self, rows: Ints | NDArray[np.bool_]) -> Self:
        """The strategies chosen by indices or a mask."""
        return type(self)(*(getattr(self, f.name)[rows] for f in fields(self)))

    def with_recompute(self, recompute: Ints) -> Self:
        """The same with another recompute policy each."""
        return type(self)(self.tp, self.ep, self.pp, self.dp, self.micro_batch, recompute)

    def __len__(self) -> int:
        return len(self.tp)
