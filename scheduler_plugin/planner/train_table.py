"""All strategies of a tree up to a budget, priced by lower bounds at once and exactly only where it matters.

Rows are ordered by devices. A row's value is its lower bound until it is judged, then its exact seconds; pruned rows
are infinite. The least value of a prefix is the best strategy once it is an exact one (best-first search), so searches
are exact although few rows are ever simulated. Invariant: values only rise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from libra.resources.cost_model import TrainingCosts
from libra.resources.cost_model.strategies import RECOMPUTE, Strategies
from libra.resources.types import TrainStrategy

_CLOSE = 1 - 1e-10
"""A bound this near the best exact value is not looked into."""


class TrainTable:
    """``structures``: (tp, ep, pp, micro-batch) of every branch; ``bubble``, ``dp``: the tree's limits."""

    def __init__(
        self, costs: TrainingCosts, structures: Sequence[tuple[int, ...]], budget: int, bubble: float, dp: int | None
    ) -> None:
        self.costs, self.budget = costs, budget
        rows = self._rows(structures, budget, dp)
        rows, self._memory = self._lightest(rows)
        keep = (self._memory <= costs.hardware.memory) & self._within(rows, bubble)
        rows = rows.take(keep)
        order = np.argsort(rows.gpus, kind="stable")
        self.rows = rows.take(order)
        self.gpus = self.rows.gpus
        self._columns = costs.columns(self.rows)
        self._values = costs.lower_bounds(self.rows, self._columns) if len(self.rows) else np.empty(0)
        self._exact = np.zeros(len(self.rows), bool)

    @property
    def evaluated(self) -> int:
        """Rows simulated so far."""
        return int(self._exact.sum())

    def best(self, gpus: int) -> tuple[TrainStrategy, float] | None:
        """The fastest strategy on at most ``gpus`` devices and its seconds; None when none fits."""
        end = int(np.searchsorted(self.gpus, gpus, side="right"))
        if not end:
            return None
        values = self._values[:end]
        best, row = np.inf, -1
        while True:
            i = int(values.argmin())
            if self._exact[i] or values[i] >= best * _CLOSE:
                row = i if self._exact[i] and values[i] <= best else row
                return self.rows.row(row), float(self._values[row])
            self._judge(i)
            if values[i] < best:
                best, row = float(values[i]), i

    def loses(self, gpus: int, slower: Callable[[float], bool]) -> bool | None:
        """``slower`` of the seconds of `best`, None when nothing fits. ``slower`` must be true of every time above one
        of which it is true, so that it is asked of bounds first, and few strategies are judged unless it is close."""
        end = int(np.searchsorted(self.gpus, gpus, side="right"))
        if not end:
            return None
        values = self._values[:end]
        i = int(values.argmin())
        if not self._exact[i]:
            if slower(float(values[i])):
                return True
            self._judge(i)
            if not slower(float(values[i])):
                return False
        found = self.best(gpus)
        return None if found is None else slower(found[1])

    def fewest(self, seconds: float, gpus: int) -> tuple[TrainStrategy, float] | None:
        """A strategy with the fewest devices, at most ``gpus``, that ends within ``seconds``; None when none does."""
        end = int(np.searchsorted(self.gpus, gpus, side="right"))
        while True:
            fits = self._values[:end] <= seconds
            i = int(fits.argmax()) if end else 0
            if not end or not fits[i]:
                return None
            if self._exact[i]:
                return self.rows.row(i), float(self._values[i])
            self._judge(i)

    def _judge(self, i: int) -> None:
        seconds = self.costs.predict_row(self.rows, self._columns, i).seconds
        self._values[i] = max(self._values[i], seconds)
        self._exact[i] = True

    def _rows(self, structures: Sequence[tuple[int, ...]], budget: int, dp: int | None) -> Strategies:
        """Every branch with every data-parallel degree that the budget, the batch and the trainer allow."""
        table = np.array(structures, np.int64).reshape(-1, 4)
        size = table[:, 0] * table[:, 1] * table[:, 2]
        most = np.minimum(budget // size, len(self.costs.lengths) // table[:, 1])
        if dp is not None:
            most = np.minimum(most, dp // table[:, 1])
        repeated = np.repeat(np.arange(len(table)), most)
        starts = np.cumsum(most) - most
        degree = np.arange(len(repeated)) - starts[repeated] + 1
        columns = table[repeated]
        full = np.full(len(repeated), RECOMPUTE.index("full"))
        return Strategies(columns[:, 0], columns[:, 1], columns[:, 2], degree, columns[:, 3], full)

    def _lightest(self, rows: Strategies) -> tuple[Strategies, np.ndarray]:
        """The rows with the fastest recompute policy that fits in memory (full if none does), and their bytes."""
        choice = rows.recompute
        total = self.costs.memory(rows).total
        for policy in reversed(range(len(RECOMPUTE) - 1)):
            bytes_needed = self.costs.memory(rows.with_recompute(np.full(len(rows), policy))).total
            fits = bytes_needed <= self.costs.hardware.memory
            choice, total = np.where(fits, policy, choice), np.where(fits, bytes_needed, total)
        return rows.with_recompute(choice), total

    def _within(self, rows: Strategies, bubble: float) -> np.ndarray:
        micro = self.costs.micro_batches(rows)
        return np.asarray((rows.pp - 1) / (rows.pp - 1 + micro) <= bubble)
