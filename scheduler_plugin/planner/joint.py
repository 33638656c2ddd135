"""The joint search: how many devices train and how many roll out, so that the slower side ends soonest.

Training on at most n devices, f(n), falls with n; the exact rollout partition on the rest, r(G − n), rises. The best
split is where they cross: at the least n with f(n) ≤ r(G − n), or one device less. One bisection over n finds it; a
side is asked for no more than it takes to decide which is the larger. Layouts by greedy mixing are searched the same
way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from libra.resources.types import TrainStrategy
from libra.scheduler_plugin.planner.layouts import Counts, RolloutSide, scaled
from libra.scheduler_plugin.planner.tree import TrainTree

INFINITY = float("inf")
TOLERANCE = 1e-10
"""Relative: differences below it are ties."""
_EXHAUSTIVE = 16
"""Budgets up to which mixing, which need not fall with every device, is tried at every split."""


@dataclass(frozen=True, slots=True)
class Split:
    """``train`` ends in ``train_seconds``; rollout has ``rollout_gpus`` and ends in ``rollout_seconds``. ``counts``:
    instances a level when the layout is mixing (or homogeneous), None when it is the exact partition."""

    train: TrainStrategy
    train_seconds: float
    rollout_gpus: int
    rollout_seconds: float
    counts: Counts | None = None

    @property
    def seconds(self) -> float:
        """Of one iteration."""
        return max(self.train_seconds, self.rollout_seconds)


@dataclass(frozen=True, slots=True)
class Search:
    """What the search found: the best split with the exact ``partition``, the best with ``mixing`` of any degrees, the
    best ``homogeneous`` one (None: none fits), and the number of splits looked at."""

    partition: Split | None
    mixing: Split | None
    homogeneous: Split | None
    probes: int

    @property
    def best(self) -> Split | None:
        """The fastest; within rounding the partition, then the homogeneous layout, are preferred."""
        found = [s for s in (self.partition, self.homogeneous, self.mixing) if s is not None]
        if not found:
            return None
        least = min(split.seconds for split in found)
        return next(split for split in found if split.seconds <= least * (1 + TOLERANCE))


def search(tree: TrainTree, rollout: RolloutSide, budget: int) -> Search:
    """The best splits of ``budget`` devices; each side gets at least one."""
    tree.table(budget - 1)
    crossing = _Crossing(tree, rollout, budget)
    partition = crossing.partition()
    mixing, homogeneous = crossing.mixing(partition)
    return Search(partition, mixing, homogeneous, crossing.probes)


@dataclass(slots=True)
class _Crossing:
    tree: TrainTree
    rollout: RolloutSide
    budget: int
    probes: int = 0

    def partition(self) -> Split | None:
        """The best split with the exact partition."""
        budget, solver = self.budget, self.rollout.solver
        if not self.rollout.smallest or self.rollout.smallest >= budget:
            return None
        # Invariant: at `low` training is the slower side (or impossible), at `high` rollout is (or is impossible).
        low, high = 0, budget - self.rollout.smallest + 1
        while high - low > 1:
            middle = (low + high) // 2
            self.probes += 1
            left = budget - middle

            def rollout_is_faster(trained: float, left: int = left) -> bool:
                return solver.probe(float(np.nextafter(trained, 0.0)), left).gpus <= left

            training_is_slower = self.tree.loses(middle, rollout_is_faster) is not False
            low, high = (middle, high) if training_is_slower else (low, middle)
        return min(filter(None, map(self._exact, (low, high))), key=lambda split: split.seconds, default=None)

    def _exact(self, train_gpus: int) -> Split | None:
        trained = self.tree.best(train_gpus) if 0 < train_gpus < self.budget else None
        if trained is None:
            return None
        left = self.budget - trained[0].gpus
        seconds = self.rollout.solve(left).seconds
        return Split(trained[0], trained[1], left, seconds) if seconds < INFINITY else None

    def mixing(self, partition: Split | None) -> tuple[Split | None, Split | None]:
        """The best mixing and the best homogeneous split, over families of layouts: one degree alone, and the degrees
        of the exact partition. Large budgets: only the homogeneous family that is best beside the partition's split,
        and the partition's own degrees."""
        rollout, budget = self.rollout, self.budget
        families: list[Counts | int | None] = list(range(len(rollout.degrees)))
        if budget <= _EXHAUSTIVE:
            families.append(None)
        elif partition is not None:
            priced = []
            for level in range(len(rollout.degrees)):
                counts = _counts(rollout, level, partition.rollout_gpus)
                if counts is not None:
                    priced.append((rollout.mixed_seconds(counts), level))
            families = [min(priced)[1]] if priced and min(priced)[0] < INFINITY else families
            families += self._promising(partition)
        mixing: Split | None = None
        homogeneous: Split | None = None
        for family in families:
            found = self._family(family, partition)
            if found is None or found.counts is None:
                continue
            if sum(c > 0 for c in found.counts) == 1:
                homogeneous = found if homogeneous is None else min(homogeneous, found, key=lambda s: s.seconds)
            mixing = found if mixing is None else min(mixing, found, key=lambda s: s.seconds)
        return mixing, homogeneous

    def _promising(self, partition: Split) -> list[Counts]:
        """The partition's own degrees, if mixing over them can beat it: with as many devices as training leaves when it
        is faster than the partition, mixing must be so too."""
        rollout = self.rollout
        layout = rollout.partition(partition.rollout_gpus)
        trained = self.tree.fewest(partition.seconds * (1 - TOLERANCE), self.budget - 1)
        if layout is None or trained is None:
            return []
        counts = rollout.counts_of(layout)
        most = _counts(rollout, counts, self.budget - trained[0].gpus)
        return [counts] if most is not None and rollout.mixed_seconds(most) < partition.seconds else []

    def _family(self, family: Counts | int | None, partition: Split | None) -> Split | None:
        best: Split | None = None

        def starved(train_gpus: int) -> bool:
            """Whether training is the slower side with so many devices (or cannot train at all)."""
            nonlocal best
            self.probes += 1
            trained = self.tree.best(train_gpus)
            if trained is None:
                return True
            slower = False
            # Mixing may be worse on more devices: what training leaves over is used, and not used.
            for left in {self.budget - trained[0].gpus, self.budget - train_gpus}:
                counts = _counts(self.rollout, family, left)
                seconds = INFINITY if counts is None else self.rollout.mixed_seconds(counts)
                if seconds == INFINITY:
                    continue
                split = Split(trained[0], trained[1], left, seconds, counts)
                if best is None or split.seconds < best.seconds:
                    best = split
                slower = slower or split.train_seconds > split.rollout_seconds
            return slower

        if self.budget <= _EXHAUSTIVE:
            for gpus in range(1, self.budget):
                starved(gpus)
            return best
        low, high = self._bracket(starved, partition)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if starved(middle) else (low, middle)
        return best

    def _bracket(self, starved: Callable[[int], bool], partition: Split | None) -> tuple[int, int]:
        """Numbers of training devices on both sides of the crossing, looked for around the partition's split."""
        at = partition.train.gpus if partition else self.budget // 2
        step = max(1, self.budget // 64)
        if starved(at):
            low = at
            while low + step < self.budget and starved(low + step):
                low, step = low + step, 2 * step
            return low, min(low + step, self.budget)
        high = at
        while high - step > 0 and not starved(high - step):
            high, step = high - step, 2 * step
        return max(high - step, 0), high


def _counts(rollout: RolloutSide, family: Counts | int | None, gpus: int) -> Counts | None:
    """Instances on ``gpus`` devices: of one degree (its level), as the given counts scaled, or (None) as the exact
    partition on so many devices has them."""
    if family is None:
        layout = rollout.partition(gpus)
        return rollout.counts_of(layout) if layout else None
    if isinstance(family, int):
        tp = rollout.degrees[family]
        return tuple(gpus // tp if i == family else 0 for i in range(len(rollout.degrees))) if tp <= gpus else None
    counts = scaled(family, rollout.degrees, gpus)
    return counts if any(counts) else None
